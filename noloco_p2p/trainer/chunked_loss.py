"""Compute the loss of a causal language model in chunks of tokens, so that its logits never exist all at once.

65,536 tokens with a vocabulary of 128,256 have 33 GB of fp32 logits, and the loss and its gradient need as much again.
A chunk has at most LOGITS_BYTES of them. Its gradient is computed at once, in the forward pass, so that no logits have
to be kept or computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from noloco_p2p.data.samples import IGNORED
from noloco_p2p.trainer.needs import LOGITS_BYTES

OF_THE_LOSS = {"num_items_in_batch", "shift_labels"}  # arguments of the model's own loss


class ChunkedLoss:
    """The forward function of a model, in place of its own. It differs only if labels are given for many tokens.

    The model must have the parts `PIPELINE_PARTS`, and compute nothing but logits and their cross-entropy after the
    base model. A single chunk is left to the model itself.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.__wrapped__: Any  # the model's own forward function, which also gives this object its signature
        update_wrapper(self, model.forward)

    def __call__(self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **kwargs: Any) -> Any:
        model: PreTrainedModel = self.__wrapped__.__self__
        if labels is None or kwargs.keys() & OF_THE_LOSS or labels.numel() <= chunk_tokens(model):
            return self.__wrapped__(input_ids=input_ids, labels=labels, **kwargs)
        hidden = getattr(model, model.base_model_prefix)(input_ids=input_ids, **kwargs).last_hidden_state
        return _mean_loss(model, hidden, following(labels))  # pyright: ignore[reportCallIssue]


def chunk_tokens(model: PreTrainedModel) -> int:
    """Return how many tokens have at most LOGITS_BYTES of logits."""
    return max(1, LOGITS_BYTES // (4 * model.config.get_text_config().vocab_size))


def following(tokens: Tensor) -> Tensor:
    """Return the label of each position, which is the next token."""
    return pad(tokens[:, 1:], (0, 1), value=IGNORED)


def chunks(hidden: Tensor, targets: Tensor, *, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the positions in parts of `at_once`, each in one row: (1, tokens, hidden) and (1, tokens)."""
    rows = hidden.flatten(0, 1)[None].split(at_once, dim=1)
    yield from zip(rows, targets.reshape(1, -1).split(at_once, dim=1), strict=True)


def tail_loss(model: PreTrainedModel, norm: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Compute the norm, the head of the model and the sum of losses, with its autograd graph."""
    own = model.forward.__wrapped__ if isinstance(model.forward, ChunkedLoss) else model.forward
    with replaced(model, **{model.base_model_prefix: _Final(norm)}):
        # transformers divides the sum of losses by num_items_in_batch
        return own(inputs_embeds=hidden, labels=labels, shift_labels=labels, num_items_in_batch=1).loss


@contextmanager
def replaced(module: nn.Module, **children: nn.Module) -> Iterator[None]:
    """Replace children of a module temporarily.

    A copy of the module would not work, because transformers registers modules by identity.
    """
    own = {name: module._modules[name] for name in children}
    module._modules.update(children)
    try:
        yield
    finally:
        module._modules.update(own)


class _Final(nn.Module):
    """A replacement for the base model that computes only what follows the last block."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, inputs_embeds: Tensor, **_: object) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


@torch.compiler.disable  # because dynamo cannot trace the backward passes of chunks
def _mean_loss(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> CausalLMOutputWithPast:
    head = [child for name, child in model.named_children() if name != model.base_model_prefix]
    params = [param for child in head for param in child.parameters() if param.requires_grad]
    if torch.is_grad_enabled():
        total: Any = _SumOfLosses.apply(hidden, targets, model, *params)
    else:
        parts = chunks(hidden, targets, at_once=chunk_tokens(model))
        total = torch.stack([tail_loss(model, nn.Identity(), *part) for part in parts]).sum()
    return CausalLMOutputWithPast(loss=total / (targets != IGNORED).sum())


class _SumOfLosses(torch.autograd.Function):
    """The sum of losses, whose gradients are known before the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, model: PreTrainedModel, *params: Tensor) -> Tensor:
        gradient, sums = torch.empty_like(hidden), list[Tensor]()
        total = torch.zeros((), device=hidden.device)
        places = gradient.view(1, -1, hidden.shape[-1]).split(at_once := chunk_tokens(model), dim=1)
        for place, (part, labels) in zip(places, chunks(hidden, targets, at_once=at_once), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                loss = tail_loss(model, nn.Identity(), part, labels)
            with torch.autocast(hidden.device.type, enabled=False):
                of_part, *of_params = torch.autograd.grad(loss, [part, *params])
            place.copy_(of_part)
            total += loss.detach()
            if sums:
                for each, of_param in zip(sums, of_params, strict=True):
                    each.add_(of_param)
            else:
                sums = [each.float() for each in of_params]  # because a sum of many chunks in bf16 would lose bits
        ctx.save_for_backward(gradient, *(each.to(param.dtype) for each, param in zip(sums, params, strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *of_params = (each.mul_(outer[0]) for each in ctx.saved_tensors)  # a copy could be too large
        return gradient, None, None, *of_params
