"""One inner step with either optimizer, and its state through a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from noloco_p2p.optim.muon import flops, orthogonalize
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.optimizer_state import flatten_optimizers, restore_optimizers
from noloco_p2p.spec import DataSpec, ModelSpec, TrainerSpec, TrainSpec
from noloco_p2p.trainer.compute import flops_per_token
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model

MODEL = ModelSpec(hidden_size=32, num_layers=1, num_heads=2, mlp_size=48)


def make(inner_optimizer: str) -> InnerStep:
    spec = TrainerSpec(name="t", model=MODEL, data=DataSpec(sequence_length=16)).with_changes(
        {"train.inner_optimizer": inner_optimizer, "train.warmup_steps": 1, "train.total_steps": 50}
    )
    return InnerStep(build_model(spec.model, sequence_length=16), spec.train)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 384, (4, 16), generator=torch.Generator().manual_seed(step))


def weights(inner: InnerStep) -> torch.Tensor:
    return nn.utils.parameters_to_vector(inner.trainable.values()).detach()


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_of_the_blocks_and_adamw_everything_else(tied: bool) -> None:
    model = build_model(MODEL.model_copy(update={"tied_embeddings": tied}), sequence_length=16)
    inner = InnerStep(model, TrainSpec(inner_optimizer="muon"))
    names = {id(param): name for name, param in inner.trainable.items()}
    muon, adamw = ([names[id(p)] for group in o.param_groups for p in group["params"]] for o in inner.optimizers)
    assert isinstance(inner.optimizers[0], torch.optim.Muon)
    assert len(muon) == 7, muon  # four of attention, three of the MLP
    assert all(name.startswith("model.layers.0") for name in muon)
    assert sorted([*muon, *adamw]) == sorted(inner.trainable)
    assert any("embed" in name for name in adamw)


@pytest.mark.parametrize(
    ("inner_optimizer", "batch_size", "tells"),
    [("muon", 1, "with 16 tokens per step, Muon computes [0-9]+% as much as"), ("muon", 64, None), ("adamw", 1, None)],
)
def test_muon_with_few_tokens_is_told(inner_optimizer: str, batch_size: int, tells: str | None) -> None:
    inner = make(inner_optimizer)
    inner.train = inner.train.model_copy(update={"batch_size": batch_size})
    warnings = inner.warnings(sequence_length=16)
    assert [bool(re.match(tells, each)) for each in warnings] == [True] if tells else warnings == []


@pytest.mark.parametrize("shape", [(8, 8), (8, 11), (16, 8), (8, 40)], ids=["square", "wide", "tall", "long"])
def test_the_flops_of_muon_are_those_of_its_products(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, *shape))
    assert counter.get_total_flops() == flops(*shape)


@pytest.mark.parametrize("inner_optimizer", ["adamw", "adamw8bit", "muon"])
def test_it_learns_and_goes_on_bit_for_bit_through_a_checkpoint(tmp_path: Path, inner_optimizer: str) -> None:
    whole = make(inner_optimizer)
    first = float(whole(batch(0), progress=0.0))
    for step in range(1, 4):
        whole(batch(step % 2), progress=step / 50)
    flat = flatten_optimizers(whole.optimizers, whole.trainable)
    files = {"optimizer": flat, "model": {name: p.detach() for name, p in whole.trainable.items()}}
    checkpoint = Checkpoint(Checkpoints(tmp_path).save(0, files=files, meta={}))
    for step in range(4, 6):
        whole(batch(step % 2), progress=step / 50)
    assert float(whole.loss(batch(0)).detach()) < first
    again = make(inner_optimizer)
    again.model.load_state_dict(checkpoint.load("model"), strict=False)
    restore_optimizers(again.optimizers, again.trainable, checkpoint.load("optimizer"))
    for step in range(4, 6):
        again(batch(step % 2), progress=step / 50)
    assert torch.equal(weights(again), weights(whole))


def test_a_gradient_is_clipped_to_the_norm_of_the_spec() -> None:
    """AdamW's steps do not depend on the norm of the gradient, but its first moments do."""
    inner = make("adamw")
    inner.train = inner.train.model_copy(update={"clip_norm": 0.01})
    inner(batch(0), progress=0.5)
    assert inner.gradient_norm is not None
    assert float(inner.gradient_norm) > 0.01, "the norm before clipping is reported"
    first_moments = [value for name, value in inner.state().items() if "exp_avg" in name and "exp_avg_sq" not in name]
    length = float(torch.cat([each.flatten() for each in first_moments]).norm()) / (1 - inner.train.adam_beta1)
    assert length == pytest.approx(0.01, rel=1e-3)


def test_weights_change_only_while_the_lock_is_held() -> None:
    """Another thread copies the weights meanwhile."""
    inner, seen = make("muon"), list[torch.Tensor]()

    @contextmanager
    def lock() -> Iterator[None]:
        seen.append(weights(inner))
        yield
        seen.append(weights(inner))

    before, inner.weights_lock = weights(inner), lock()
    inner(batch(0), progress=0.5)
    held, released = seen
    assert torch.equal(held, before)
    assert not torch.equal(held, released)
    assert torch.equal(released, weights(inner))


def test_a_step_without_gradients_changes_nothing() -> None:
    inner = make("muon")
    inner(batch(0), progress=0.5)
    before, state = weights(inner), {name: value.clone() for name, value in inner.state().items()}
    inner.update(progress=0.6)
    assert torch.equal(weights(inner), before)
    assert all(torch.equal(value, state[name]) for name, value in inner.state().items())


def test_any_module_trains_by_a_loss_of_its_own() -> None:
    """A plain module without a config or `.loss` works with the inner step and the gauges."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))

    def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    train = TrainSpec(learning_rate=1e-2, warmup_steps=0, total_steps=50)
    inner, tokens = InnerStep(model, train, loss=loss), torch.arange(32).view(2, 16)
    losses = [float(inner(tokens, progress=step / 50)) for step in range(20)]
    assert losses[-1] < losses[0] - 0.5
    assert flops_per_token(model, sequence_length=16) == 6 * (8 * 50 + 50)
