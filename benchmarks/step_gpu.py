"""Measure the trainer's loop on an accelerator with a compiled 125M model in bf16.

    python benchmarks/step_gpu.py [--quick] [--json FILE]

Targets: the loop takes at most 2 % more time than a bare PyTorch loop of the same model, and at most 5 % more peak
memory than plain AdamW training (see `step_loop.py`). MFU is reported for GPUs whose peak rate is known. Without an
accelerator, a toy model runs on the CPU, which tests the script but measures nothing useful.
"""

from __future__ import annotations

from claims import Claim, run
from step_loop import Case
from step_loop import measure as measure_case

from noloco_p2p.presets import PRESETS
from noloco_p2p.trainer.compute import choose_device


def measure(quick: bool) -> list[Claim]:
    device = choose_device("auto")
    changes = {"name": "step", "data.source": "stdlib", "data.tokenizer": "bytes", "train.batch_size": 16}
    if device.type == "cpu":
        print("# no accelerator: a toy model on the CPU, whose figures mean nothing")
        toy = {"train.batch_size": 4, "outer.inner_steps": 3, "model.vocab_size": 384}
        spec = PRESETS["tiny"].with_changes(changes | toy)
    else:
        spec = PRESETS["small"].with_changes(changes | {"outer.inner_steps": 50})
    return measure_case(
        Case(
            spec,
            device,
            precision="bf16",
            compile=True,
            micro_batch=spec.train.batch_size // 2,
            num_rounds=3 if quick else 11,
            most=0.02,
        )
    )


if __name__ == "__main__":
    run(measure, doc=__doc__)
