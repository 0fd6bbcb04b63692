"""What a swarm has learned, from its peers' checkpoints: losses, the merged model, the spread of the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noloco_p2p.data.stream import validation_batches
from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.trainer.evaluate import evaluate_loss
from noloco_p2p.trainer.merge import TakenState, from_checkpoint
from noloco_p2p.trainer.model import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Verdict:
    spec: TrainerSpec
    model: PreTrainedModel  # with the mean of the slow weights
    losses: dict[Path, float]  # of each peer's slow weights, nats per token; empty when only the merge was asked for
    merged_loss: float  # nats per token on the held-out sequences
    spread: float  # root mean square distance of a replica from the mean, as a share of the norm of the mean
    num_sequences: int


def judge(
    spec: TrainerSpec,
    folders: Sequence[Path],
    *,
    bindings: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """`folders`: the checkpoint folder of each peer. Raises CheckpointError when none holds a checkpoint."""
    weights: dict[Path, Tensor] = {}
    model: PreTrainedModel | None = None
    with (progress or Progress()).task("merging", unit="checkpoints") as report:
        for index, folder in enumerate(folders):
            report(index, len(folders))
            try:
                state = from_checkpoint(folder)
            except CheckpointError:
                continue  # a peer that was killed before its first checkpoint
            weights[folder], model = state.slow_weights, state.model
    if model is None:
        raise CheckpointError("no peer has written a checkpoint")
    return _judge(model, weights, spec, each=False, bindings=bindings or {}, models={}, progress=progress)


def judge_each(
    folders: Sequence[Path],
    *,
    device: torch.device,
    bindings: Mapping[str, str],
    models: Mapping[str, str],
    progress: Progress | None = None,
) -> Verdict:
    """Every checkpoint by itself, and their mean. Raises CheckpointError, also when they are not of one run."""
    assert folders, "nothing to judge"
    weights: dict[Path, Tensor] = {}
    states: list[TakenState] = []
    for folder in folders:
        state = from_checkpoint(folder, folders=models)
        states = states or [state]  # one model is enough
        if state.spec != states[0].spec:
            ours, theirs = state.spec.run_id, states[0].spec.run_id
            raise CheckpointError(f"{folder} is of run {ours}, the first one of {theirs}: not one swarm")
        weights[folder] = state.slow_weights
    model = states[0].model
    torch.nn.Module.to(model, device)
    return _judge(model, weights, states[0].spec, each=True, bindings=bindings, models=models, progress=progress)


def _judge(
    model: PreTrainedModel,
    weights: Mapping[Path, Tensor],
    spec: TrainerSpec,
    *,
    each: bool,
    bindings: Mapping[str, str],
    models: Mapping[str, str],
    progress: Progress | None,
) -> Verdict:
    batches = validation_batches(
        spec.data,
        tokenizer=build_tokenizer(spec.data, folders=models),
        bindings=bindings,
        num_sequences=spec.evaluate.num_sequences,
        batch_size=spec.train.batch_size,
        progress=progress,
    )
    flat, losses = FlatParameters(model), dict[Path, float]()
    for folder, slow_weights in weights.items() if each else ():
        flat.write(0, slow_weights)
        losses[folder] = evaluate_loss(model, batches, progress=progress)
    replicas = list(weights.values())
    mean = replicas[0].clone()
    for replica in replicas[1:]:  # stacked they would be held twice
        mean += replica
    mean /= len(replicas)
    flat.write(0, mean)
    merged_loss = evaluate_loss(model, batches, progress=progress)
    return Verdict(spec, model, losses, merged_loss, spread(replicas, mean), sum(map(len, batches)))


def spread(replicas: Sequence[Tensor], mean: Tensor) -> float:
    """sqrt(mean_i |phi_i - mean|^2) / |mean|."""
    squares = [float((replica - mean).square().sum()) for replica in replicas]
    return (sum(squares) / len(squares)) ** 0.5 / max(float(mean.norm()), 1e-12)
