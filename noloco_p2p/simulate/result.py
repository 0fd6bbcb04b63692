"""Computes the results of a simulation, and formats them as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.simulate.material import Material
from noloco_p2p.telemetry.console import aligned, mib
from noloco_p2p.trainer.swarm_evaluation import spread

COLUMNS = (
    *("rule", "replicas", "loss", "worst", "merged", "spread %", "sent per peer", "bytes/param/step"),
    *("swapped", "half", "solo", "late", "virtual s"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the curve of one replica."""

    replica: int
    step: int
    virtual_s: float
    loss: float  # validation, nats per token


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one rule. Losses are validation losses of the final slow weights, in nats per token."""

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
    swapped: int  # number of rounds of all replicas, as in the next two fields
    half: int
    alone: int
    refused: int  # rounds that became solo, and late gradients that were refused, because of a gate
    clipped: int  # rounds in which a gate clipped what a partner sent
    cut_share: float  # fraction of the norm of the offsets that was clipped, mean over swaps
    late: int  # outer gradients that were applied after their boundary
    modulo_chunks: int
    plain_chunks: int
    extended_chunks: int
    broken_chunks: int
    virtual_s: float
    curve: tuple[Point, ...]
    rounds_s: tuple[float, ...] = ()  # median virtual seconds of the second half of each replica's rounds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def row(self) -> tuple[str, ...]:
        return (
            *(self.rule, str(self.num_replicas), f"{self.loss:.4f}", f"{self.worst_loss:.4f}"),
            *(f"{self.merged_loss:.4f}", f"{100 * self.spread:.3f}", mib(self.sent_bytes)),
            *(f"{self.sent_per_parameter_step:.4g}", str(self.swapped), str(self.half), str(self.alone)),
            *(str(self.late), f"{self.virtual_s:.1f}"),
        )


def judge(material: Material, weights: Sequence[Tensor]) -> dict[str, Any]:
    """Compute the fields of a `Result` that depend only on the flat weights of the replicas."""
    scratch = material.model()
    losses = [material.loss_of(each, scratch) for each in weights]
    mean = torch.stack(list(weights)).mean(0)
    return {
        "num_replicas": len(weights),
        "num_parameters": mean.numel(),
        "loss": sum(losses) / len(losses),
        "worst_loss": max(losses),
        "merged_loss": material.loss_of(mean, scratch),
        "spread": spread(weights, mean),
    }


def table(results: Sequence[Result]) -> list[str]:
    return aligned([COLUMNS, *(result.row() for result in results)], num_left=0)
