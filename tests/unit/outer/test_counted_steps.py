"""NoLoCo counts the steps of torch optimizers: one or several, accumulated, skipped, scaled, and after a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE_S
from harness.specs import published
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from noloco_p2p.errors import CheckpointError, ModelError, SettingsError
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="hooks", outer=published(inner_steps=2, wait=True, max_wait_s=0.0), total_steps=100)


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with MemorySwarm(SPEC) as swarm:
        yield swarm


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def backward(model: nn.Module, seed: int = 0) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    model(inputs).square().mean().backward()


def take_step(model: nn.Module, *optimizers: Optimizer, seed: int = 0) -> None:
    backward(model, seed)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_the_steps_of_an_optimizer_are_inner_steps(tmp_path: Path, swarm: MemorySwarm) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    outer = NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path))
    for _ in range(5):
        take_step(model, optimizer)
    assert (outer.num_steps, outer.progress) == (5, pytest.approx(0.05))


def test_counted_steps_give_the_weights_that_called_steps_give(tmp_path: Path, swarm: MemorySwarm) -> None:
    ends = []
    for is_counted in (True, False):
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=0.1)
        peer = swarm.peer(f"peer-{is_counted}", run_folder=tmp_path / str(is_counted))
        outer = NoLoCo(model, optimizer if is_counted else None, peer, save_every_s=0)
        for step in range(5):
            take_step(model, optimizer, seed=step)
            if not is_counted:
                outer.step()
        ends.append(weights(model))
        swarm.kill(peer)
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_the_last_of_several_optimizers_closes_a_step_of_any_number_of_batches(
    tmp_path: Path, swarm: MemorySwarm
) -> None:
    model = make_model()
    optimizers = [AdamW(model[0].parameters()), SGD(model[1].parameters(), lr=0.1)]
    outer = NoLoCo(model, optimizers, swarm.peer("a", run_folder=tmp_path))
    for _ in range(3):
        backward(model)  # accumulated
        take_step(model, *optimizers)
    assert outer.num_steps == 3


class TinyScaler:
    """Sets the attributes that torch.amp.GradScaler sets on a fused optimizer, as the real one needs a GPU."""

    def step(self, optimizer: Any, *, overflows: bool) -> None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(overflows))
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


def test_a_step_that_a_scaler_skips_is_not_counted(tmp_path: Path, swarm: MemorySwarm) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), fused=True)
    outer = NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path))
    backward(model)
    for overflows in (True, False, True):
        TinyScaler().step(optimizer, overflows=overflows)
    assert outer.num_steps == 1


def test_the_scaler_of_torch_skips_a_step(tmp_path: Path, swarm: MemorySwarm) -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    outer = NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path))
    scaler = torch.amp.GradScaler("cpu")
    for overflows in (True, False):
        scaler.scale(model(torch.ones(1, 4)).sum() * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert outer.num_steps == 1


def test_weights_that_are_not_finite_are_replaced_by_the_checkpoint(
    tmp_path: Path, swarm: MemorySwarm, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    outer = NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
    take_step(model, optimizer)
    outer.save()
    saved = weights(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    outer._looked_at_s = 0.0  # it looks once a second
    with caplog.at_level(logging.ERROR):
        optimizer.step()
    assert "not finite" in caplog.text
    assert not any(optimizer.state.values())
    for param, before in zip(model.parameters(), saved, strict=True):
        assert torch.equal(param, before)


def test_weights_that_are_not_finite_without_any_state_end_training(tmp_path: Path, swarm: MemorySwarm) -> None:
    model = make_model()
    outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
    with torch.no_grad():
        next(model.parameters()).fill_(float("inf"))
    with pytest.raises(ModelError, match="lower learning rate"):
        outer.step()


@pytest.mark.parametrize("of_caller", [False, True], ids=["our checkpoint", "a checkpoint of the caller's own"])
def test_a_restart_goes_on_with_the_same_bits(tmp_path: Path, swarm: MemorySwarm, of_caller: bool) -> None:
    """Weights, moments and the position before the next outer step are restored."""
    ends = []
    for stops in (False, True):
        peer = swarm.peer(f"peer-{stops}", run_folder=tmp_path / str(stops))
        model = make_model()
        optimizer = AdamW(model.parameters(), lr=0.1)
        outer = NoLoCo(model, optimizer, peer, save_every_s=0)
        for step in range(7):
            if stops and step == 3:  # between two outer steps
                outer.save()
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": outer.state_dict()}
                torch.save(states, tmp_path / "own.pt")
                swarm.kill(peer)
                peer = swarm.peer("again", run_folder=tmp_path / ("elsewhere" if of_caller else str(stops)))
                model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
                optimizer = AdamW(model.parameters(), lr=0.1)
                states = torch.load(tmp_path / "own.pt", weights_only=True) if of_caller else {}
                if of_caller:
                    model.load_state_dict(states["model"])
                    optimizer.load_state_dict(states["optimizer"])
                outer = NoLoCo(model, optimizer, peer, save_every_s=0, resume=states.get("outer", True))
                assert outer.num_steps == 3
            take_step(model, optimizer, seed=step)
        ends.append(weights(model))
        swarm.kill(peer)
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_a_state_dict_that_does_not_fit_is_refused(tmp_path: Path, swarm: MemorySwarm) -> None:
    model, other = make_model(), nn.Linear(4, 3)
    outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
    with pytest.raises(CheckpointError, match="another model"):
        NoLoCo(other, None, swarm.peer("b"), save_every_s=0, resume=outer.state_dict())
    with pytest.raises(CheckpointError, match="not created by NoLoCo"):
        outer.load_state_dict(model.state_dict())


def test_a_call_of_step_beside_a_counted_optimizer_is_an_error(tmp_path: Path, swarm: MemorySwarm) -> None:
    model = make_model()
    outer = NoLoCo(model, AdamW(model.parameters()), swarm.peer("a", run_folder=tmp_path), save_every_s=0)
    with pytest.raises(SettingsError, match="counts the steps"):
        outer.step()
    outer.detach()
    outer.detach()
    outer.step()
    assert outer.num_steps == 1


def test_the_end_of_a_peer_frees_the_weights_that_a_failed_step_has_locked(tmp_path: Path, swarm: MemorySwarm) -> None:
    """A thread of the peer that copies them could otherwise never end, and Python would wait for it at its exit."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    peer = swarm.peer("a", run_folder=tmp_path)
    outer = NoLoCo(model, optimizer, peer)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step(closure=fails)
    copying = peer.executor.submit(outer.weights.read, 0, 1)
    with pytest.raises(TimeoutError):
        copying.result(0.1)
    swarm.kill(peer)
    assert len(copying.result(PATIENCE_S)) == 1


def fails() -> float:
    raise RuntimeError("no step")


def test_a_new_noloco_takes_the_optimizer_over(tmp_path: Path, swarm: MemorySwarm) -> None:
    """A script creates another NoLoCo after it has frozen a layer, for example."""
    model, peer = make_model(), swarm.peer("a", run_folder=tmp_path)
    optimizer = AdamW(model.parameters())
    first, second = (NoLoCo(model, optimizer, peer, save_every_s=0) for _ in range(2))
    steps = first.num_steps
    take_step(model, optimizer)
    assert second.num_steps == steps + 1


def test_an_optimizer_of_foreign_parameters_is_refused(tmp_path: Path, swarm: MemorySwarm) -> None:
    optimizer = AdamW([*make_model().parameters(), *make_model()[0].parameters()])
    with pytest.raises(ModelError, match="6 parameters that do not belong to the model"):
        NoLoCo(make_model(), optimizer, swarm.peer("a", run_folder=tmp_path))
    with pytest.raises(ModelError, match="the list of optimizers is empty"):
        NoLoCo(make_model(), [], swarm.peer("b", run_folder=tmp_path))


def test_a_group_that_is_added_later_must_belong_to_the_model(
    tmp_path: Path, swarm: MemorySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noloco_p2p.outer.noloco.LOOK_S", 0.0)
    model = make_model()
    optimizer = AdamW(model[0].parameters())
    NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    take_step(model, optimizer)
    optimizer.add_param_group({"params": [*make_model().parameters()]})
    with pytest.raises(ModelError, match="4 parameters that do not belong to the model"):
        take_step(model, optimizer)


def test_moments_of_a_group_that_is_added_after_a_restart_are_reported_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with MemorySwarm(SPEC) as swarm:
            model = make_model()
            optimizer = AdamW(model[0].parameters())
            outer = NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
            optimizer.add_param_group({"params": [*model[1].parameters()]})
            take_step(model, optimizer)
            outer.save()
    assert (
        caplog.text.count("optimizer state of 2 parameters was not restored, because no optimizer trains 1.bias") == 1
    )


class Sharpness(Optimizer):
    """A wrapper like that of SAM: it is a torch optimizer itself, and scripts call other methods than `step`."""

    def __init__(self, base: Optimizer) -> None:
        self.base_optimizer = base
        super().__init__(base.param_groups, {})

    def second_step(self) -> None:
        self.base_optimizer.step()


def test_the_optimizer_inside_another_one_is_counted_and_kept(tmp_path: Path) -> None:
    moments: list[Tensor] = []
    for _ in range(2):
        with MemorySwarm(SPEC) as swarm:
            model = make_model()
            wrapper = Sharpness(SGD(model.parameters(), lr=0.1, momentum=0.9))
            outer = NoLoCo(model, wrapper, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
            if outer.resumed:
                assert outer.num_steps == 2
                assert torch.equal(
                    wrapper.base_optimizer.state[next(model.parameters())]["momentum_buffer"], moments[0]
                )
                return
            for _ in range(2):
                backward(model)
                wrapper.second_step()
            moments.append(wrapper.base_optimizer.state[next(model.parameters())]["momentum_buffer"].clone())
            outer.save()


def test_an_optimizer_whose_state_is_no_tensor_trains_all_the_same(
    tmp_path: Path, swarm: MemorySwarm, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    outer = NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path), save_every_s=1)
    take_step(model, optimizer)
    optimizer.state[next(model.parameters())]["note"] = "no tensor"
    with caplog.at_level(logging.WARNING):
        outer.save()
        outer.save()
    assert caplog.text.count("will start from scratch") == 1
