"""Measure the overhead of the trainer's loop on a CPU. The target is at most 3 % of a bare PyTorch loop.

    python benchmarks/step_cpu.py [--quick] [--json FILE]

The model is that of the preset `tiny`, in fp32 on one torch thread. `step_loop.py` describes both loops.
"""

from __future__ import annotations

import torch
from claims import Claim, run
from step_loop import Case
from step_loop import measure as measure_case

from noloco_p2p.presets import PRESETS


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    spec = PRESETS["tiny"].with_changes({"name": "step", "outer.inner_steps": 10 if quick else 25})
    case = Case(
        spec,
        torch.device("cpu"),
        precision="fp32",
        compile=False,
        micro_batch=spec.train.batch_size,
        num_rounds=5 if quick else 21,
        most=0.03,
    )
    return [*measure_case(case)]


if __name__ == "__main__":
    run(measure, doc=__doc__)
