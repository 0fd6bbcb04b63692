"""Evaluate a swarm from the checkpoints of its peers: losses, the merged model, and the spread of the replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noloco_p2p.data.stream import Corpus, validation_batches
from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.trainer.evaluate import evaluate_loss
from noloco_p2p.trainer.merge import TakenState, from_checkpoint
from noloco_p2p.trainer.model import build_model, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class SwarmEvaluation:
    spec: TrainerSpec
    model: PreTrainedModel  # with the mean weights
    losses: dict[Path, float]  # in nats per token, for each peer; empty after `evaluate_swarm`
    merged_loss: float  # in nats per token, on the held-out sequences
    spread: float  # root mean square distance of a replica from the mean, relative to the norm of the mean
    num_sequences: int


def evaluate_swarm(spec: TrainerSpec, folders: Sequence[Sequence[Path]]) -> SwarmEvaluation:
    """Evaluate the model that consists of the mean weights of each stage.

    `folders` lists, for each stage, the run folders of its peers; a run without stages has one entry. Raises
    CheckpointError if a stage has no checkpoint.
    """
    parts: dict[str, Tensor] = {}
    distances: list[float] = []
    norms: list[float] = []
    for number, of_stage in enumerate(folders):
        stage = number if spec.pipeline.stages > 1 else None
        states: list[TakenState] = []
        for folder in of_stage:
            with suppress(CheckpointError):  # a peer may have been killed before its first checkpoint
                states.append(from_checkpoint(folder, stage=stage))
        if not states:
            what = "" if stage is None else f"of stage {stage} "
            raise CheckpointError(f"no peer {what}has written a checkpoint")
        replicas = [state.weights for state in states]
        mean = _mean(replicas)
        parts |= FlatParameters(states[0].model).by_name(mean)
        norms.append(float(mean.norm()))
        distances.append(spread(replicas, mean) * norms[-1])
    model = build_model(spec.model, sequence_length=spec.data.sequence_length)
    FlatParameters(model).take(parts)
    batches = _held_out(spec, {}, {})
    loss = evaluate_loss(model, batches)
    return SwarmEvaluation(spec, model, {}, loss, math.hypot(*distances) / math.hypot(*norms), sum(map(len, batches)))


def evaluate_each(
    folders: Sequence[Path],
    *,
    device: torch.device,
    bindings: Mapping[str, str],
    models: Mapping[str, str],
    progress: Progress | None = None,
) -> SwarmEvaluation:
    """Evaluate each checkpoint separately, and then the mean of all checkpoints.

    Raises CheckpointError if one of them cannot be loaded, or if they belong to different runs.
    """
    first = from_checkpoint(folders[0], folders=models)
    replicas = {folders[0]: first.weights}
    for folder in folders[1:]:
        state = from_checkpoint(folder, folders=models)
        if state.spec != first.spec:
            raise CheckpointError(
                f"{folder} belongs to the run {state.spec.run_id}, but the first folder belongs to the run "
                f"{first.spec.run_id}"
            )
        replicas[folder] = state.weights
    spec = first.spec
    model = build_model(spec.model, sequence_length=spec.data.sequence_length, folders=models)
    torch.nn.Module.to(model, device)
    batches, flat = _held_out(spec, bindings, models, progress), FlatParameters(model)
    mean = _mean(list(replicas.values()))

    def loss_of(weights: Tensor) -> float:
        flat.write(0, weights)
        return evaluate_loss(model, batches, progress=progress)

    losses = {folder: loss_of(weights) for folder, weights in replicas.items()}
    apart = spread(list(replicas.values()), mean)
    return SwarmEvaluation(spec, model, losses, loss_of(mean), apart, sum(map(len, batches)))


def spread(replicas: Sequence[Tensor], mean: Tensor) -> float:
    """Return sqrt(mean_i |phi_i - mean|^2) / |mean|, where phi_i are the replicas."""
    squares = [float((replica - mean).square().sum()) for replica in replicas]
    return (sum(squares) / len(squares)) ** 0.5 / max(float(mean.norm()), 1e-12)


def _mean(replicas: Sequence[Tensor]) -> Tensor:
    mean = replicas[0].clone()
    for replica in replicas[1:]:  # stacking them would use twice the memory
        mean += replica
    return mean.div_(len(replicas))


def _held_out(
    spec: TrainerSpec, bindings: Mapping[str, str], models: Mapping[str, str], progress: Progress | None = None
) -> list[Tensor]:
    corpus = Corpus(spec.data, build_tokenizer(spec.data, folders=models), bindings, progress or Progress())
    return validation_batches(corpus, num_sequences=spec.evaluate.num_sequences, batch_size=spec.train.batch_size)
