"""Loss and perplexity on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noloco_p2p.telemetry.progress import Progress


def evaluate_loss(model: nn.Module, batches: Sequence[Tensor], *, progress: Progress | None = None) -> float:
    """Mean cross-entropy in nats per predicted token over `batches` of token ids, (batch, sequence) each.

    Each token counts once, whatever the size of its batch; the first token of a sequence is not predicted. Draws no
    random number and leaves the model as it was. One sync with the device, at the end.
    """
    assert batches, "nothing to evaluate on"
    device = next(model.parameters()).device
    num_predicted = 0
    losses: list[Tensor] = []
    task = (progress or Progress()).task("evaluating", unit="batches")
    with evaluating(model), torch.no_grad(), task as report:
        for index, batch in enumerate(batches):
            report(index, len(batches))
            logits = model(input_ids=batch.to(device)).logits[:, :-1]
            targets = batch[:, 1:].to(device)
            losses.append(cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"))
            num_predicted += targets.numel()
        total = sum(torch.stack(losses).tolist())
        report(len(batches), len(batches))
    return total / num_predicted


def perplexity(loss: float) -> float:
    """exp(loss); infinity where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout); afterwards every module is in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
