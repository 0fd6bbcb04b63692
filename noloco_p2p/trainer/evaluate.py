"""Loss and perplexity on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.trainer.model import causal_lm_logits

LOGITS_BYTES = 512 << 20  # of one pass, in fp32; the loss needs as much again
IGNORED = -100  # a target that is ignored


def evaluate_loss(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    progress: Progress | None = None,
    logits: Callable[[nn.Module, Tensor], Tensor] = causal_lm_logits,
    logits_bytes: int = LOGITS_BYTES,
) -> float:
    """Mean cross-entropy in nats per predicted token over `batches` of token ids, (batch, sequence) each.

    Each token counts once, whatever the size of its batch; the first token of a sequence is not predicted. A batch is
    split so that its logits, which dominate with a large vocabulary, fit: `logits` returns (batch, sequence,
    vocabulary), and those of one pass take at most `logits_bytes`, or belong to one sequence. Draws no random numbers
    and leaves the model unchanged. Synchronises with the device once, at the end.
    """
    assert batches, "nothing to evaluate on"
    device = next(model.parameters()).device
    num_predicted = 0
    losses: list[Tensor] = []
    task = (progress or Progress()).task("evaluating", unit="batches")
    with evaluating(model), torch.no_grad(), task as report:
        for index, batch in enumerate(batches):
            report(index, len(batches))
            for part in batch.to(device).split(_rows_at_once(model, batch.shape[1], logits_bytes)):
                losses.append(_summed_loss(logits(model, part), part))
            num_predicted += batch[:, 1:].numel()
        total = sum(torch.stack(losses).tolist())
        report(len(batches), len(batches))
    return total / num_predicted


def _rows_at_once(model: nn.Module, sequence_length: int, logits_bytes: int) -> int:
    """The number of sequences per pass, from sizes alone, so that all ranks of a sharded model agree."""
    vocabulary = max((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=1)
    return max(1, logits_bytes // (4 * sequence_length * vocabulary))


def _summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logits are not sliced, as that would copy them: the last token of each row has an ignored target instead."""
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def perplexity(loss: float) -> float:
    """exp(loss), or infinity if that exceeds a float."""
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode (no dropout) inside; then restore the mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
