"""Compute the loss and the perplexity on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from noloco_p2p.data.samples import UNLEARNED, num_targets
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.trainer.model import causal_lm_logits, causal_lm_loss, samples_loss

LOGITS_BYTES = 512 << 20  # limit for the fp32 logits of one pass; the loss needs as much memory again


def evaluate_loss(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    progress: Progress | None = None,
    logits_bytes: int = LOGITS_BYTES,
) -> float:
    """Return the mean cross-entropy in nats per predicted token.

    Each of the `batches` holds token ids of shape (batch, sequence), which may be marked (`data/samples.py`). A token
    counts once, regardless of the size of its batch. The first token of a sequence is not predicted.

    With a large vocabulary, logits take up most of the memory. A batch is therefore split until the logits of one pass
    take at most `logits_bytes`, or belong to a single sequence.

    This function draws no random numbers and leaves the model unchanged. It synchronises with the device only once, at
    the end.
    """
    assert batches, "there are no batches to evaluate on"
    device = next(model.parameters()).device
    vocabulary = max((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), default=1)
    num_predicted = 0
    losses: list[Tensor] = []
    task = (progress or Progress()).task("evaluating", unit="batches")
    with evaluating(model), torch.no_grad(), task as report:
        for index, batch in enumerate(batches):
            report(index, len(batches))
            rows_at_once = max(1, logits_bytes // (4 * batch.shape[1] * vocabulary))  # the same on all ranks
            loss = samples_loss if bool((batch >= UNLEARNED).any()) else causal_lm_loss
            for part in batch.split(rows_at_once):
                if count := num_targets(part):
                    losses.append(loss(model, part.to(device)) * count)
                    num_predicted += count
        total = sum(torch.stack(losses).tolist())
        report(len(batches), len(batches))
    return total / num_predicted


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode (without dropout), and restore the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def mixes_samples(model: nn.Module) -> bool:
    """Return whether a token of one sample sees the sample before it in the same sequence.

    Most models keep samples apart by their positions, but some do not, such as those that are recurrent.
    """
    param = next(model.parameters())
    rows = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 4, 5, 6]], device=param.device)
    positions = torch.tensor([0, 1, 2, 0, 1, 2], device=param.device).expand_as(rows)
    with evaluating(model):
        one, other = causal_lm_logits(model, rows, positions)[:, 3:].float()
    return not torch.allclose(one, other, rtol=0, atol=float(one.abs().max()) * torch.finfo(param.dtype).eps ** 0.5)
