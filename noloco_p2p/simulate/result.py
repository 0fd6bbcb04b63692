"""Computes the results of a simulation, and formats them as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.simulate.material import Material
from noloco_p2p.telemetry.console import aligned, counted, mib
from noloco_p2p.trainer.swarm_evaluation import spread

SWAP_COLUMNS = ("swaps", "failed", "age", "link %", "clipped")
COLUMNS = (
    *("rule", "replicas", "loss", "worst", "merged", "spread %", "sent per peer", "bytes/param/step"),
    *(*SWAP_COLUMNS, "virtual s"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the curve of one replica."""

    replica: int
    step: int
    virtual_s: float
    loss: float  # validation, nats per token
    sent_bytes: float  # payload, up to this point


@dataclass(frozen=True, slots=True)
class Swaps:
    """What has become of the swaps of a peer, or the mean over several peers.

    `age_steps` is the mean number of inner steps from a snapshot until its half-differences were applied. `link_use` is
    the share of the time in which a swap moved. `clipped_pieces` counts the parts of tensors that the update filter
    clipped.
    """

    committed: float = 0.0
    failed: float = 0.0
    age_steps: float = 0.0
    link_use: float = 0.0
    clipped_pieces: float = 0.0

    @classmethod
    def mean(cls, each: Iterable[Swaps]) -> Swaps:
        peers = list(each)
        return cls(*(fmean(getattr(swaps, field.name) for swaps in peers) for field in fields(cls)))

    def cells(self) -> tuple[str, ...]:
        if self == Swaps():  # a rule without swaps
            return ("-",) * len(fields(self))
        counts = f"{self.committed:.0f}", f"{self.failed:.0f}"
        return *counts, f"{self.age_steps:.1f}", f"{100 * self.link_use:.0f}", f"{self.clipped_pieces:.0f}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one rule. Losses are validation losses of the final weights, in nats per token."""

    rule: str
    num_replicas: int  # replicas present at the end
    num_parameters: int
    loss: float  # mean over replicas
    worst_loss: float
    merged_loss: float  # loss of the mean of the weights
    spread: float  # root mean square distance from the mean, relative to its norm
    sent_bytes: float  # payload, mean over replicas
    sent_per_parameter_step: float  # bytes
    steps: float  # inner steps, mean over replicas
    virtual_s: float
    curve: tuple[Point, ...]
    swaps: Swaps = Swaps()

    def __str__(self) -> str:
        return (
            f"{self.rule}: loss {self.loss:.4f}, merged {self.merged_loss:.4f}, {100 * self.spread:.2g} % apart, after "
            f"{self.steps:.0f} steps of {counted(self.num_replicas, 'replica')} that sent {mib(self.sent_bytes)} each"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def row(self) -> tuple[str, ...]:
        return (
            *(self.rule, str(self.num_replicas), f"{self.loss:.4f}", f"{self.worst_loss:.4f}"),
            *(f"{self.merged_loss:.4f}", f"{100 * self.spread:.3f}", mib(self.sent_bytes)),
            *(f"{self.sent_per_parameter_step:.4g}", *self.swaps.cells(), f"{self.virtual_s:.1f}"),
        )


def judge(material: Material, weights: Sequence[Tensor]) -> dict[str, Any]:
    """Compute the fields of a `Result` that depend only on the flat weights of the replicas."""
    scratch = material.model()
    losses = [material.loss_of(each, scratch) for each in weights]
    mean = torch.stack(list(weights)).mean(0)
    return {
        "num_replicas": len(weights),
        "num_parameters": mean.numel(),
        "loss": fmean(losses),
        "worst_loss": max(losses),
        "merged_loss": material.loss_of(mean, scratch),
        "spread": spread(weights, mean),
    }


def table(results: Sequence[Result]) -> list[str]:
    return aligned([COLUMNS, *(result.row() for result in results)], num_left=0)
