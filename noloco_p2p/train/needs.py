"""What a run needs of a machine, said before it trains: memory, disk, and megabytes an hour."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from noloco_p2p.gossip.frames import Part
from noloco_p2p.gossip.sections import part_bytes, section_plans
from noloco_p2p.spec import RunSpec
from noloco_p2p.telemetry.console import count, mib
from noloco_p2p.train.compute import Compute
from noloco_p2p.train.memory import MOMENT_BYTES, free_memory

TRAINING_BYTES = 16  # a parameter: fp32 weights, gradients and the two moments of AdamW
OUTER_BYTES = 8  # a parameter: slow weights and outer momentum, fp32, on the CPU
CHECKPOINT_BYTES = 20  # a parameter: outer state, moments, and the fast weights of a round that was left
PROBE_STEPS = 2
PROBE_TOKENS = 2048  # enough to keep a small machine busy, few enough to wait for


@dataclass(frozen=True, slots=True)
class Needs:
    num_parameters: int
    model_bytes: int  # on an accelerator; activations come on top
    outer_bytes: int  # in main memory: outer state, offloaded moments, one coded payload per direction and section
    disk_bytes: int
    round_bytes: int  # each way
    hour_bytes: int  # each way, at the speed measured on this machine; with inner_steps = "auto" the most it can be
    has_fixed_rounds: bool
    step_s: float
    memory_free_bytes: int
    disk_free_bytes: int

    def lines(self) -> list[str]:
        """For people."""
        about = "about" if self.has_fixed_rounds else "as the link carries it, at most"
        return [
            f"model: {count(self.num_parameters)} trainable parameters, {self.step_s:.2f} s an inner step here",
            f"needs: {mib(self.model_bytes)} to train (activations on top), {mib(self.outer_bytes)} for the outer step,"
            f" {mib(self.disk_bytes)} of disk",
            f"sends and receives: {mib(self.round_bytes)} a round, {about} {mib(self.hour_bytes)} an hour, each way",
            f"this machine has: {mib(self.memory_free_bytes)} of memory and {mib(self.disk_free_bytes)} of disk free",
        ]

    def warnings(self) -> list[str]:
        warnings = []
        if self.model_bytes + self.outer_bytes > self.memory_free_bytes:
            warnings.append("this run needs more memory than this machine has free; it may be killed")
        if self.disk_bytes > self.disk_free_bytes:
            warnings.append("checkpoints need more disk than is free; free some, or use another --state-dir")
        return warnings

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def estimate(
    spec: RunSpec,
    *,
    num_parameters: int,
    frozen_bytes: int = 0,
    step_s: float,
    folder: Path,
    compute: Compute | None = None,
    keep_checkpoints: int = 2,
) -> Needs:
    """`num_parameters`: trainable ones; `frozen_bytes`: of the others; `step_s`: seconds of one inner step here."""
    compute = compute or Compute()
    moments = MOMENT_BYTES if compute.offload_optimizer else 0
    plans = section_plans(spec.codec, swap_momentum=spec.outer.sends_momentum, num_elements=num_parameters)
    round_bytes = sum(part_bytes(plans, part) for part in Part)
    inner_steps = spec.outer.inner_steps
    shortest = spec.outer.min_inner_steps if inner_steps == "auto" else inner_steps
    rounds_per_hour = 3600 / max(step_s * shortest, 1e-6)
    return Needs(
        num_parameters=num_parameters,
        model_bytes=((TRAINING_BYTES - moments) * num_parameters + frozen_bytes) // compute.num_ranks,
        outer_bytes=(OUTER_BYTES + moments) * num_parameters + 2 * round_bytes,
        disk_bytes=(keep_checkpoints + 1) * CHECKPOINT_BYTES * num_parameters,  # one is being written
        round_bytes=round_bytes,
        hour_bytes=int(round_bytes * rounds_per_hour),
        has_fixed_rounds=not spec.outer.is_auto,
        step_s=step_s,
        memory_free_bytes=free_memory(),
        disk_free_bytes=shutil.disk_usage(folder).free,
    )


def probe_step_s(backward: Callable[[Tensor], Tensor], batch: Tensor) -> float:
    """Seconds of forward and backward of one batch, scaled up from a few sequences; `backward` gives their loss."""
    sample = batch[: max(1, PROBE_TOKENS // batch.shape[1])]
    durations_s = []
    for _ in range(1 + PROBE_STEPS):  # the first one warms up
        began_s = time.monotonic()
        float(backward(sample))  # waits for an accelerator
        durations_s.append(time.monotonic() - began_s)
    return min(durations_s[1:]) * batch.shape[0] / sample.shape[0]
