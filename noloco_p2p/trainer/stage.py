"""Compute one stage of a model: its own blocks and, in the head (stage 0), the embedding, final norm and LM head.

All parts run the model's own forward code, and parameters keep the names that they have in the whole model. A
microbatch travels from its head through the inner stages and back to the same head.

    hidden = head.forward(tokens)
    hidden = inner.forward(hidden)               # one inner stage after the other
    summed = head.loss_backward(hidden, tokens)  # the loss, and its gradient with respect to `hidden`
    gradient = inner.backward(inputs, gradient)  # the inner stages in the reverse order
    head.backward(tokens, gradient)

Gradients accumulate in the parameters. They are the gradients of the sum of losses over tokens, so that a replica can
divide them by the number of tokens that it has counted. `backward` recomputes the forward pass from `inputs`, with the
current weights. Only one thread may use a stage.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from noloco_p2p.errors import ModelError
from noloco_p2p.spec import ModelSpec, TrainerSpec, TrainSpec
from noloco_p2p.trainer.chunked_loss import chunk_tokens, chunks, following, replaced, tail_loss
from noloco_p2p.trainer.compute import Compute, switch_on
from noloco_p2p.trainer.cut import Part, Sizes, block_range
from noloco_p2p.trainer.model import build_on_meta, give_weights, hidden_matrices
from noloco_p2p.trainer.weights import seed_of


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """The result of the final norm, the LM head and the loss for one microbatch."""

    # sum of the cross-entropy over tokens, in nats; it stays on the device, because reading it syncs an accelerator
    loss: Tensor
    num_tokens: int  # predicted tokens: all but the first of each sequence
    gradient: Tensor  # of the sum with respect to `hidden`, in the same shape


class Stage:
    """Stage `index` of a model that was cut into stages. Stage 0 is the head.

    `model` contains only the parts of this stage, and is moved, trained, swapped and saved like any other model.
    """

    def __init__(self, model: PreTrainedModel, *, index: int, compute: Compute | None = None) -> None:
        self.model = model
        self.index = index
        self.compute = compute or Compute()
        switch_on(model, self.compute, by_block=True)

    @property
    def is_head(self) -> bool:
        return self.index == 0

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def hidden_size(self) -> int:
        """The size of the last axis of the tensors that travel between stages."""
        return _base(self.model).config.hidden_size

    def forward(self, inputs: Tensor, *, seed: int | None = None) -> Tensor:
        """Compute the input of the next stage, of shape (sequences, tokens, hidden), without an autograd graph.

        For the head, `inputs` are token ids of shape (sequences, tokens). For other stages, they are the output of the
        previous stage. `seed` is the seed for dropout.
        """
        with torch.no_grad():
            return self._blocks(inputs, seed)

    def backward(self, inputs: Tensor, gradient: Tensor, *, seed: int | None = None) -> Tensor | None:
        """Recompute `forward(inputs)`, and add the gradients of the parameters to the existing ones.

        `gradient` is the gradient with respect to the output of `forward`. `seed` must be the seed that was passed to
        `forward`. Returns the gradient with respect to `inputs`, or None for the head, whose inputs are token ids.
        """
        inputs = inputs.detach().requires_grad_(not self.is_head)
        with torch.enable_grad():
            outputs = self._blocks(inputs, seed)
        outputs.backward(gradient.to(outputs.dtype))
        return inputs.grad

    def loss_backward(self, hidden: Tensor, tokens: Tensor, *, chunk_tokens: int | None = None) -> SummedLoss:
        """Compute the final norm, the LM head and the loss, and add their gradients to the existing ones.

        `hidden` is the output of the last stage for `tokens`. `chunk_tokens` is the number of tokens whose logits are
        in memory at the same time. By default, LOGITS_BYTES limits this number. A single chunk gives the same numbers
        as the whole model. Several chunks sum the same terms in a different order.
        """
        gradients: list[Tensor] = []
        losses: list[Tensor] = []
        for part, labels in self._chunks(hidden, tokens, chunk_tokens):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = self._tail(part, labels)
            loss.backward()
            assert part.grad is not None
            losses.append(loss.detach())
            gradients.append(part.grad)
        gradient = torch.cat(gradients, dim=1).view_as(hidden)
        return SummedLoss(_sum(losses), tokens[:, 1:].numel(), gradient)

    def loss(self, hidden: Tensor, tokens: Tensor, *, chunk_tokens: int | None = None) -> Tensor:
        """Compute the sum of losses for an evaluation, without gradients."""
        with torch.no_grad():
            return _sum([self._tail(*chunk) for chunk in self._chunks(hidden, tokens, chunk_tokens)])

    def _blocks(self, inputs: Tensor, seed: int | None) -> Tensor:
        if seed is not None:
            _seed(seed, self.device)
        base = _base(self.model)
        name = "input_ids" if self.is_head else "inputs_embeds"
        with replaced(base, norm=nn.Identity()), self._autocast():
            return base(**{name: inputs}).last_hidden_state

    def _tail(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Compute the sum of losses, with its autograd graph. Both arguments have one row: (1, tokens, ...)."""
        with self._autocast():
            return tail_loss(self.model, _base(self.model).norm, hidden, labels)

    def _chunks(self, hidden: Tensor, tokens: Tensor, at_once: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.is_head, "only stage 0 (the head) has the LM head"
        return chunks(hidden, following(tokens), at_once=at_once or chunk_tokens(self.model))

    def _autocast(self) -> torch.autocast:
        is_bf16 = self.compute.is_bf16(self.device)
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_bf16)


def build_stage(
    spec: ModelSpec,
    cut: Sequence[int],
    *,
    index: int,
    sequence_length: int,
    folders: Mapping[str, str] | None = None,
    compute: Compute | None = None,
) -> Stage:
    """Build stage `index` at the start of the run, in fp32, on the CPU, in training mode.

    Memory is allocated only for the parts of this stage. `cut` lists the number of blocks of each stage. Raises
    ModelError if the model cannot be cut or loaded.
    """
    model = build_part(spec, cut, index=index, sequence_length=sequence_length, folders=folders)
    give_weights(model, spec, folders=folders)
    return Stage(model, index=index, compute=compute)


def train_of_stage(spec: TrainerSpec) -> TrainSpec:
    """Return the inner-step settings of one stage.

    The clip norm is scaled so that all stages together clip as the whole model would.
    """
    return spec.train.model_copy(update={"clip_norm": spec.train.clip_norm / spec.pipeline.stages**0.5})


def build_part(
    spec: ModelSpec,
    cut: Sequence[int],
    *,
    index: int,
    sequence_length: int,
    folders: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """Build the model of stage `index` without memory for its weights. Names and `model.config` are those of the whole
    model.

    Raises ModelError if the model cannot be cut, or if the cut does not match it.
    """
    model = build_on_meta(spec, sequence_length=sequence_length, folders=folders)
    base, own = _base(model), block_range(cut, index)
    if sum(cut) != len(base.layers):
        raise ModelError(f"pipeline.cut lists {sum(cut)} blocks in total, but the model has {len(base.layers)}")
    layers = nn.ModuleList()
    for number in own:
        layers.add_module(str(number), base.layers[number])
    base.layers = layers
    # The copy describes only these blocks, because some models look up the kind of a block by its index.
    base.config = copy.copy(base.config)
    base.config.num_hidden_layers = len(own)
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = base.config.layer_types[own.start : own.stop]
    if index:
        base.embed_tokens, base.norm = nn.Identity(), nn.Identity()
        model.set_output_embeddings(nn.Identity())
    return model


def measure(model: PreTrainedModel, *, sequence_length: int) -> Sizes:
    """Count the parameters and flops of the parts of a whole model, which may be on the meta device.

    All of its blocks must be alike.
    """
    matrices = {id(matrix) for matrix in hidden_matrices(model)}
    layers = _base(model).layers
    block = list(layers[0].parameters())
    num_blocks, (vocabulary, hidden_size) = len(layers), _base(model).embed_tokens.weight.shape
    of_block = sum(param.numel() for param in block)
    of_vocabulary = sum(param.numel() for param in model.parameters()) - num_blocks * of_block
    # A forward pass takes 2 flops per weight, and a backward pass 4. Half of the attention matrix is masked.
    return Sizes(
        num_blocks,
        Part(
            of_block,
            sum(param.numel() for param in block if id(param) in matrices),
            8 * (of_block + hidden_size * sequence_length),
        ),
        Part(of_vocabulary, 0, 6 * vocabulary * hidden_size),
        hidden_size,
    )


def dropout_seed(microbatch: str, stage: int) -> int:
    """Derive the dropout seed that a stage uses in both forward passes of one microbatch.

    `microbatch` is the name that its head has given it.
    """
    return seed_of(f"{microbatch}/{stage}")


def _base(model: PreTrainedModel) -> Any:
    """Return the base of a model from `build_on_meta`. It has `embed_tokens`, `layers`, `norm` and a config."""
    return model.base_model


def _seed(seed: int, device: torch.device) -> None:
    """Seed the random number generator that modules on this device use.

    If an accelerator's library is installed but unused, torch.manual_seed keeps a stack trace for each call. That costs
    a millisecond, and memory that is never freed.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _sum(losses: list[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()
