"""Builds the model, data and held-out text of the replicas of a simulation, in the same way as the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from noloco_p2p.data.stream import Corpus, TokenStream, validation_batches
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.evaluate import evaluate_loss
from noloco_p2p.trainer.model import build_model, build_tokenizer, check_vocabulary

CPU = torch.device("cpu")

CURVE_SHARE = 0.1  # of the time of training, for the points of a curve


def shortened(spec: TrainerSpec, num_steps: int) -> TrainerSpec:
    """Return the spec with another number of inner steps, of which at most a tenth are warmup."""
    warmup = min(spec.train.warmup_steps, num_steps // 10)
    return spec.with_changes({"train.total_steps": num_steps, "train.warmup_steps": warmup}, origin="--steps")


@dataclass(frozen=True, slots=True)
class Material:
    spec: TrainerSpec
    tokenizer: PreTrainedTokenizerBase
    validation: list[Tensor]
    bindings: Mapping[str, str]
    device: torch.device  # of all models; outer states stay on the CPU, as in a real peer
    folders: Mapping[str, str]  # of bound models

    @classmethod
    def of(
        cls,
        spec: TrainerSpec,
        bindings: Mapping[str, str],
        *,
        device: torch.device = CPU,
        seed: int = 0,
        folders: Mapping[str, str] | None = None,
    ) -> Material:
        """Build the material of a spec, whose initial weights also depend on `seed`.

        Raises DataError and ModelError in the same cases as the trainer.
        """
        if seed:
            spec = spec.with_changes({"model.seed": spec.model.seed + seed}, origin="--seed")
        tokenizer = build_tokenizer(spec.data, folders=folders)
        validation = validation_batches(
            Corpus(spec.data, tokenizer, bindings),
            num_sequences=spec.evaluate.num_sequences,
            batch_size=spec.train.batch_size,
        )
        return cls(spec, tokenizer, validation, bindings, device, folders or {})

    def model(self) -> PreTrainedModel:
        length = self.spec.data.sequence_length
        model = build_model(self.spec.model, sequence_length=length, folders=self.folders)
        check_vocabulary(model, self.tokenizer)
        torch.nn.Module.to(model, self.device)
        return model

    def batches(self, peer_id: str, *, replica: int = 0, batch_size: int | None = None) -> TokenStream:
        """Open the batches of a replica.

        `{replica}` in a binding is replaced by the number of the replica, so that each replica can read different
        files. If `batch_size` is None, it is `train.batch_size`. The sequences and their order do not depend on it.
        """
        bindings = {name: files.replace("{replica}", str(replica)) for name, files in self.bindings.items()}
        corpus = Corpus(self.spec.data, self.tokenizer, bindings)
        return TokenStream(corpus, peer_id=peer_id, batch_size=batch_size or self.spec.train.batch_size)

    def loss(self, model: PreTrainedModel) -> float:
        """Return the validation loss of a model."""
        return evaluate_loss(model, self.validation)

    def loss_at_point(self, model: PreTrainedModel, *, num_points: int) -> float:
        """Return the loss for one of `num_points` points of a curve, each on the same held-out batches.

        These are as many as take CURVE_SHARE of the time of training, because a step takes as long as three forward
        passes, but at least one.
        """
        num_batches = int(CURVE_SHARE * 3 * self.spec.train.total_steps / num_points)
        return evaluate_loss(model, self.validation[: max(1, num_batches)])

    def loss_of(self, weights: Tensor, scratch: PreTrainedModel) -> float:
        """Return the validation loss of a flat vector of weights. This overwrites the weights of `scratch`."""
        FlatParameters(scratch).write(0, weights)
        return self.loss(scratch)
