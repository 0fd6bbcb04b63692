"""Compare the processor time of a simulated inner step, including swaps, with that of a plain training loop.

    python benchmarks/simulate_speed.py [--quick] [--json FILE]

Both train the model of the preset `tiny` on one thread. Other programs on the machine hardly affect processor time. The
time of a run of half the length is subtracted, so that building models, reading text and the final evaluation do not
count.
"""

from __future__ import annotations

import resource
import time

import torch
from claims import Claim, run

from noloco_p2p.presets import PRESETS
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.inner_step import InnerStep

MIB = 1 << 20


def plain_s(material: Material) -> float:
    """Return the processor time of a plain loop over one model and its batches, in seconds."""
    inner, batches = InnerStep(material.model(), material.spec.train), material.batches("replica-0")
    next(batches)
    began_s = time.process_time()
    for step in range(material.spec.train.total_steps):
        inner(next(batches), progress=step / material.spec.train.total_steps)
    return time.process_time() - began_s


def simulated_s(material: Material, num_replicas: int) -> tuple[float, float]:
    """Return (processor seconds, inner steps of all replicas)."""
    began_s = time.process_time()
    result = simulate_swarm(material, Plan(num_replicas, evaluations=1))
    assert result.swaps.failed == 0, result
    return time.process_time() - began_s, result.steps * num_replicas


def of_length(spec: TrainerSpec, num_steps: int) -> Material:
    return Material.of(spec.with_changes({"train.total_steps": num_steps, "train.warmup_steps": 1}), {})


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    num_replicas, num_steps = (2, 60) if quick else (8, 60)
    shorter, longer = (of_length(PRESETS["tiny"], length) for length in (num_steps, 2 * num_steps))
    plain = (plain_s(longer) - plain_s(shorter)) / num_steps
    (longer_s, more_steps), (shorter_s, fewer_steps) = (simulated_s(each, num_replicas) for each in (longer, shorter))
    simulated = (longer_s - shorter_s) / (more_steps - fewer_steps)
    ratio = simulated / plain
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB
    return [
        Claim("inner step of a plain loop", 1e3 * plain, "ms"),
        Claim(f"inner step of {num_replicas} simulated replicas, each", 1e3 * simulated, "ms"),
        Claim("simulated against plain", ratio, "times", "<= 1.3", ratio <= 1.3),
        Claim("memory of the process at its peak, torch and all", peak, "MiB"),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
