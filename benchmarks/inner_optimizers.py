"""Measure an inner step with Muon, which may take at most 1.2 times as long as one with AdamW.

    python benchmarks/inner_optimizers.py [--quick] [--json FILE]

The model is that of the demo, on one thread. A step consists of the forward and backward pass, clipping and the
optimizer, in fp32 on a CPU. Steps with AdamW, with Muon and with `torch.optim.Muon` (bf16 products, one matrix after
another) take turns in one process. Each figure is the median, over all turns, of a ratio of CPU times. The figures are
valid for this machine only.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from claims import Claim, run

from noloco_p2p.optim.inner import make_inner_optimizer
from noloco_p2p.presets import PRESETS
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, hidden_matrices

MOST = 1.2
PROGRESS = 0.1  # of the schedule: the learning rate does not matter here


def make(optimizer: str) -> InnerStep:
    spec = PRESETS["tiny"].with_changes({"train.inner_optimizer": "adamw" if optimizer == "adamw" else "muon"})
    model = build_model(spec.model, sequence_length=spec.data.sequence_length)
    step = InnerStep(model, spec.train)
    if optimizer == "torch":
        chosen = {id(matrix) for matrix in hidden_matrices(model)}
        rest = [param for param in step.trainable.values() if id(param) not in chosen]
        of_torch = torch.optim.Muon(hidden_matrices(model), lr=1e-3, adjust_lr_fn="match_rms_adamw")
        step.optimizers = step._steppers = [of_torch, make_inner_optimizer(rest, spec.train)]
    return step


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    data, train = PRESETS["tiny"].data, PRESETS["tiny"].train
    batch = torch.randint(0, 256, (train.batch_size, data.sequence_length))
    steps = {name: make(name) for name in ("adamw", "ours", "torch")}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(12 if quick else 60):
        for name, step in steps.items():
            began_s = time.process_time()
            step(batch, progress=PROGRESS)
            if turn >= 2:  # the first steps create the state of the optimizers
                seconds[name].append(time.process_time() - began_s)
    ratios = {
        name: median(one / adamw for one, adamw in zip(each, seconds["adamw"], strict=True))
        for name, each in seconds.items()
    }
    bf16 = "with" if torch.cpu._is_avx512_bf16_supported() else "without"
    return [
        Claim(f"an inner step with AdamW, on a CPU {bf16} bf16 instructions", 1e3 * median(seconds["adamw"]), "ms"),
        Claim("the same step with Muon", ratios["ours"], "times", f"at most {MOST}", ratios["ours"] <= MOST),
        Claim("the same step with torch.optim.Muon", ratios["torch"], "times"),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
