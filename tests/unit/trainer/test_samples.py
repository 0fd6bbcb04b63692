"""A packed batch of samples has the loss and the gradient of its samples alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BloomConfig, PreTrainedModel

from noloco_p2p.data.samples import IGNORED, mark, num_targets, pack
from noloco_p2p.spec import ModelSpec, TrainSpec
from noloco_p2p.trainer.evaluate import evaluate_loss, mixes_samples
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, samples_loss

MODEL = ModelSpec(hidden_size=32, num_layers=2, num_heads=2, mlp_size=48)
LENGTHS = (3, 9, 5, 12, 4, 6)


def make_samples() -> list[tuple[Tensor, Tensor]]:
    """Return the ids of each sample and which of them are learned."""
    rng = np.random.default_rng(0)
    samples = [(rng.integers(3, 300, length), np.arange(length) >= length // 2) for length in LENGTHS]
    return [(torch.from_numpy(ids), torch.from_numpy(said)) for ids, said in samples]


def packed(samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    rows = pack([mark(ids.numpy(), said.numpy()) for ids, said in samples], 16, padding=1)
    return torch.from_numpy(rows.astype(np.int64))


def loss_of_each(model: nn.Module, samples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean loss of the learned tokens, each sample in a forward pass of its own."""
    sums = []
    for ids, said in samples:
        labels = ids.masked_fill(~said, IGNORED)[None]
        sums.append(model(input_ids=ids[None], labels=labels).loss * said[1:].sum())
    return torch.stack(sums).sum() / sum(int(said[1:].sum()) for _, said in samples)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])


def test_a_packed_batch_has_the_loss_and_the_gradient_of_its_samples_alone() -> None:
    model, samples = build_model(MODEL, sequence_length=16), make_samples()
    batch = packed(samples)
    assert len(batch) < len(samples)
    assert num_targets(batch) == sum(int(said[1:].sum()) for _, said in samples)
    expected = loss_of_each(model, samples)
    expected.backward()
    alone = gradients(model)
    model.zero_grad()
    loss = samples_loss(model, batch)
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert torch.allclose(gradients(model), alone, atol=1e-6)
    assert evaluate_loss(model, list(batch.split(1))) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_step_does_not_depend_on_the_micro_batch_if_rows_have_different_numbers_of_targets() -> None:
    batch = packed(make_samples())
    assert len({num_targets(row[None]) for row in batch}) > 1
    found = []
    for micro_batch in (0, 1, 2):
        inner = InnerStep(build_model(MODEL, sequence_length=16), TrainSpec(), loss=samples_loss)
        inner.micro_batch = micro_batch
        loss = float(inner.backward(batch))
        found.append((loss, gradients(inner.model)))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert torch.allclose(gradient, found[0][1], atol=1e-7)


def test_a_model_that_mixes_samples_is_recognised() -> None:
    bloom = BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(bloom)
    nn.init.normal_(model.get_parameter("transformer.h.0.self_attention.query_key_value.weight"))
    assert mixes_samples(model)
    model = build_model(MODEL, sequence_length=16)
    assert not mixes_samples(model)
    assert model.training
