"""What the outer state of a replica takes over from other peers, and its position on the schedule afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness.specs import published
from torch import nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.outer.staging import Staging
from noloco_p2p.spec import OuterSpec


def test_a_refused_state_changes_nothing() -> None:
    """The slow weights of a donor must not stay when its momentum turns out to be invalid."""
    model = nn.Linear(3, 2)
    state = OuterState(model, published())
    before = state.slow_weights.clone()
    for momentum in (torch.full((8,), torch.nan), torch.zeros(7)):
        with pytest.raises(CheckpointError):
            state.take({"slow_weights": torch.ones(8), "outer_momentum": momentum})
        assert torch.equal(state.slow_weights, before)
        assert torch.equal(state.parameters.read(0, 8), before)


def test_a_taken_state_is_the_models() -> None:
    state = OuterState(nn.Linear(3, 2), published())
    state.take({"slow_weights": torch.arange(8.0), "outer_momentum": torch.ones(8)})
    assert torch.equal(state.parameters.read(0, 8), torch.arange(8.0))
    state.step(None)
    assert torch.equal(state.parameters.read(0, 8), torch.arange(8.0) + 0.5)


def test_without_alpha_there_is_no_momentum_and_a_round_goes_all_the_way() -> None:
    state = OuterState(nn.Linear(3, 2), OuterSpec())
    assert [*state.tensors()] == ["slow_weights"]
    before = state.slow_weights.clone()
    for _ in range(2):
        state.parameters.add(0, torch.ones(8))
        state.step(None)
    assert torch.allclose(state.slow_weights, before + 2)
    assert torch.equal(state.parameters.read(0, 8), state.slow_weights)


def test_a_state_with_more_than_is_needed_is_taken() -> None:
    """A run that was forked without momentum gets a state with momentum."""
    state = OuterState(nn.Linear(3, 2), OuterSpec())
    state.take({"slow_weights": torch.arange(8.0), "outer_momentum": torch.ones(8)})
    assert torch.equal(state.parameters.read(0, 8), torch.arange(8.0))


def test_the_overlapped_outer_step_is_the_plain_one() -> None:
    """The CPU takes the path of an accelerator here, with streams that do nothing."""
    ends = []
    for is_overlapped in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(1000, 700)  # three chunks
        state = OuterState(model, published())
        state._staging = Staging(torch.device("cpu"), is_overlapped=is_overlapped)
        for _ in range(2):
            with torch.no_grad():
                model.weight.add_(torch.randn_like(model.weight))
            state.step(None)
        assert torch.equal(state.parameters.read(0, state.num_elements), state.slow_weights)
        ends.append(state.slow_weights)
    assert torch.equal(ends[0], ends[1])


def test_streams_are_those_of_the_models_card_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, waited = list[object](), list[object]()
    stream = SimpleNamespace(wait_stream=waited.append)
    api = SimpleNamespace(Stream=lambda device: made.append(device) or stream, current_stream=lambda device: device)
    monkeypatch.setattr(torch, "get_device_module", lambda device: api)
    second = torch.device("cuda", 1)
    Staging(second).begin()
    assert made == [second, second]
    assert waited == [second]
