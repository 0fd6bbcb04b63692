"""What a swarm has learned, from its peers' checkpoints: the merged model, its loss, the spread of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noloco_p2p.errors import CheckpointError
from noloco_p2p.spec import RunSpec
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.train.data import validation_batches
from noloco_p2p.train.evaluate import evaluate_loss
from noloco_p2p.train.flat import FlatParameters
from noloco_p2p.train.merge import from_checkpoint
from noloco_p2p.train.model import build_model, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Verdict:
    model: PreTrainedModel  # with the mean of the slow weights
    merged_loss: float  # nats per token on the held-out sequences
    spread: float  # root mean square distance of a replica from the mean, as a share of the norm of the mean


def judge(
    spec: RunSpec,
    folders: Sequence[Path],
    *,
    bindings: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """`folders`: the checkpoint folder of each peer. Raises CheckpointError when none holds a checkpoint."""
    replicas = []
    with (progress or Progress()).task("merging", unit="checkpoints") as report:
        for index, folder in enumerate(folders):
            report(index, len(folders))
            try:
                replicas.append(from_checkpoint(folder).slow_weights)
            except CheckpointError:
                continue  # a peer that was killed before its first checkpoint
    if not replicas:
        raise CheckpointError("no peer has written a checkpoint")
    mean = torch.stack(replicas).mean(0)
    model = build_model(spec.model, sequence_length=spec.data.sequence_length)
    FlatParameters(model).write(0, mean)
    batches = validation_batches(
        spec.data,
        tokenizer=build_tokenizer(spec.data),
        bindings=bindings or {},
        num_sequences=spec.evaluate.num_sequences,
        batch_size=spec.train.batch_size,
        progress=progress,
    )
    return Verdict(model, evaluate_loss(model, batches, progress=progress), spread(replicas, mean))


def spread(replicas: Sequence[Tensor], mean: Tensor) -> float:
    """sqrt(mean_i |phi_i - mean|^2) / |mean|."""
    squares = [float((replica - mean).square().sum()) for replica in replicas]
    return (sum(squares) / len(squares)) ** 0.5 / max(float(mean.norm()), 1e-12)
