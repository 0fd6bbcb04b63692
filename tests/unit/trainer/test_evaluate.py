"""The loss is the mean over tokens, and an evaluation changes no state."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noloco_p2p.spec import ModelSpec
from noloco_p2p.trainer.evaluate import evaluate_loss
from noloco_p2p.trainer.model import build_model


class Bigram(nn.Module):
    """Returns the loss of the next token given the current one, after dropout."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.frozen(self.dropout(self.table(input_ids)))[:, :-1]
        return SimpleNamespace(loss=cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def test_it_equals_the_models_own_loss_on_equal_batches() -> None:
    model = build_model(ModelSpec(hidden_size=32, num_layers=1, mlp_size=48), sequence_length=16)
    batches = list(torch.randint(0, 384, (6, 16)).split(2))
    with torch.no_grad():
        expected = sum(model(input_ids=batch, labels=batch).loss.item() for batch in batches) / len(batches)
    assert evaluate_loss(model, batches) == pytest.approx(expected, rel=1e-6)


def test_a_batch_goes_through_in_parts_where_its_logits_are_large() -> None:
    model, rows, passes = Bigram(20), torch.randint(0, 20, (7, 5)), list[int]()
    whole = evaluate_loss(model, [rows])
    model.register_forward_pre_hook(lambda _, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True)
    assert evaluate_loss(model, [rows], logits_bytes=4 * 5 * 20 * 3) == pytest.approx(whole)
    assert passes == [3, 3, 1]
    assert evaluate_loss(model, [rows], logits_bytes=1) == pytest.approx(whole), "one at a time is the least"


def test_evaluation_leaves_modes_gradients_and_random_state_alone() -> None:
    model = Bigram(20).train()
    model.frozen.eval()
    before = torch.get_rng_state()
    first = evaluate_loss(model, [torch.arange(20).view(2, 10)])
    assert evaluate_loss(model, [torch.arange(20).view(2, 10)]) == first  # dropout is off
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.dropout.training
    assert not model.frozen.training
    assert model.table.weight.grad is None
