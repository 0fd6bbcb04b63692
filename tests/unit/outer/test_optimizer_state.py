"""Optimizer state is restored exactly, from tensors alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.optim.inner import make_inner_optimizer
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.optimizer_state import flatten_optimizers, restore_optimizers
from noloco_p2p.spec import TrainSpec

TRAIN = TrainSpec(weight_decay=0.1, learning_rate=0.01)  # two groups, not in the order of the model


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    return model, make_inner_optimizer(model.parameters(), TRAIN)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, first: int, last: int) -> None:
    for step in range(first, last):
        model(torch.full((2, 4), step / 7.0) * torch.arange(4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_continues_bit_for_bit_through_a_checkpoint(tmp_path: Path) -> None:
    whole, whole_optimizer = make_model()
    train(whole, whole_optimizer, first=1, last=9)

    model, optimizer = make_model()
    train(model, optimizer, first=1, last=5)
    flat = flatten_optimizers([optimizer], dict(model.named_parameters()))
    assert "exp_avg_sq/1.weight" in flat
    files = {"optimizer": flat, "model": {name: tensor.detach() for name, tensor in model.named_parameters()}}
    checkpoint = Checkpoint(Checkpoints(tmp_path).save(0, files=files, meta={}))

    again, again_optimizer = make_model()
    again.load_state_dict(checkpoint.load("model"))
    restore_optimizers([again_optimizer], dict(again.named_parameters()), checkpoint.load("optimizer"))
    train(again, again_optimizer, first=5, last=9)
    for (name, expected), (_, found) in zip(whole.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(expected, found), name
    checkpoint.verify()  # training did not write to the mapped file


def test_the_learning_rate_stays_the_optimizers_own() -> None:
    model, optimizer = make_model()
    train(model, optimizer, first=1, last=2)
    names = dict(model.named_parameters())
    flat = flatten_optimizers([optimizer], names)
    optimizer.param_groups[0]["lr"] = 0.5
    restore_optimizers([optimizer], names, flat)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_state_of_another_model_is_refused() -> None:
    model, optimizer = make_model()
    names = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=r"exp_avg/elsewhere .* does not match any parameter"):
        restore_optimizers([optimizer], names, {"exp_avg/elsewhere": torch.zeros(4)})
    for shape in ((3,), (3, 2)):
        with pytest.raises(CheckpointError, match=r"exp_avg/1\.weight \(3,.*\) does not match any parameter"):
            restore_optimizers([optimizer], names, {"exp_avg/1.weight": torch.zeros(shape)})


def test_a_factored_state_is_kept_too() -> None:
    """Adafactor keeps a row and a column for each matrix."""
    model, _ = make_model()
    names, optimizer = dict(model.named_parameters()), torch.optim.Adafactor(model.parameters())
    train(model, optimizer, first=1, last=2)
    flat = {key: value.clone() for key, value in flatten_optimizers([optimizer], names).items()}
    again = torch.optim.Adafactor(model.parameters())
    restore_optimizers([again], names, flat)
    assert flat.keys() == flatten_optimizers([again], names).keys()
    assert all(torch.equal(value, flat[key]) for key, value in flatten_optimizers([again], names).items())


def test_an_optimizer_that_cannot_be_kept_is_told() -> None:
    model, _ = make_model()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> float:
        loss = torch.stack([param.sin().sum() for param in model.parameters()]).sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match="LBFGS cannot be saved"):
        flatten_optimizers([optimizer], dict(model.named_parameters()))
