"""Measure how many honest frames the RMS gate of a pipeline drops, and how many lies it admits.

    python benchmarks/rms_gate.py [--quick] [--json FILE]

Three stages of two replicas really train on a virtual clock, with a gate that records the size of each frame and admits
all frames. The sizes are then shown to two gates: one with the tenfold limit from the start, and the gate of real
peers. A lie is a frame that is a thousand times as large as the honest frame that it replaces; all earlier frames are
honest.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from claims import Claim, run
from torch import Tensor

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.presets import PRESETS
from noloco_p2p.simulate.run import simulate_stages
from noloco_p2p.simulate.stage_plan import StagedPlan
from noloco_p2p.simulate.staged import staged
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer import rms_gate, stage_work
from noloco_p2p.trainer.rms_gate import LEAST_FRAMES, MOST_TIMES, RmsGate

TOY = Path(__file__).parent / "toy.toml"
REPLICAS = (2, 2, 2)
LIE_TIMES = 1000.0
TOYS = {"model.num_layers": 3, "outer.inner_steps": 5, "outer.alpha": 0.0, "outer.beta": 1.0, "outer.gamma": 1.0}
FEW = {"train.batch_size": 4, "train.total_steps": 200, "train.warmup_steps": 20}  # frames per step
MANY = {"train.batch_size": 16, "train.total_steps": 60, "train.warmup_steps": 10}
RUNS = {
    "AdamW, 4 frames a step": {**TOYS, **FEW, "train.learning_rate": 4e-3},
    "AdamW at 8e-3, 16 frames a step": {**TOYS, **MANY, "train.learning_rate": 8e-3},
    "Muon, 4 frames a step": {**TOYS, **FEW, "train.learning_rate": 16e-3, "train.inner_optimizer": "muon"},
    "the demo": {"train.total_steps": 60, "train.warmup_steps": 15, "pipeline.microbatch": 2},
}


@dataclass
class Recorder:
    """A gate that admits every frame and records its RMS."""

    name: str
    sizes: list[float] = field(default_factory=list[float])

    def admit(self, values: Tensor) -> None:
        self.sizes.append(float(torch.linalg.vector_norm(values, dtype=torch.float32)) / values.numel() ** 0.5)


def sizes_of(name: str, seed: int) -> list[list[float]]:
    """Return the sizes of the frames at each boundary of each replica, in both directions, in order of arrival."""
    base = PRESETS["tiny"] if name == "the demo" else TrainerSpec.load(TOY)
    spec = staged(base.with_changes({**RUNS[name], "model.parameter_seeds": True}), len(REPLICAS))
    made: list[Recorder] = []

    def recorder(name: str) -> Recorder:
        made.append(Recorder(name))
        return made[-1]

    stage_work.RmsGate = recorder
    (_,) = simulate_stages(spec, StagedPlan(REPLICAS, seed=seed, evaluations=1))
    return [each.sizes for each in made]


def is_admitted(gate: RmsGate, size: float) -> bool:
    try:
        gate.admit(torch.tensor([size]))
    except CorruptPayload:
        return False
    return True


def dropped(sizes: list[float], *, first_times: float) -> int:
    rms_gate.FIRST_TIMES = first_times
    gate = RmsGate("")
    return sum(not is_admitted(gate, size) for size in sizes)


def lies_admitted(sizes: list[float]) -> int:
    gate, found = RmsGate(""), 0
    for number, size in enumerate(sizes):
        found += number >= LEAST_FRAMES and is_admitted(copy.deepcopy(gate), LIE_TIMES * size)
        is_admitted(gate, size)
    return found


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    first_times, claims = rms_gate.FIRST_TIMES, list[Claim]()
    for name in list(RUNS)[-1:] if quick else RUNS:
        boundaries = [sizes for seed in range(1 if quick else 4) for sizes in sizes_of(name, seed)]
        frames = sum(map(len, boundaries))
        before = sum(dropped(sizes, first_times=MOST_TIMES) for sizes in boundaries)
        after = sum(dropped(sizes, first_times=first_times) for sizes in boundaries)
        admitted = sum(map(lies_admitted, boundaries))
        claims += [
            Claim(f"{name}: honest frames", frames, "frames"),
            Claim(f"{name}: dropped by a tenfold limit", before, "frames"),
            Claim(f"{name}: dropped by the gate", after, "frames", "0", after == 0),
            Claim(f"{name}: lies of {LIE_TIMES:g} times let through", admitted, "frames", "0", admitted == 0),
        ]
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
