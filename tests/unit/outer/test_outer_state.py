"""What the outer state of a replica takes over from other peers, and its position on the schedule afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness.specs import published
from harness.swapped import received
from torch import nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.optim.mixing import Agreement
from noloco_p2p.outer.outer_state import OuterState, met_progress, next_progress, progress_after
from noloco_p2p.outer.staging import Staging
from noloco_p2p.spec import OuterSpec, RunSpec


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


@pytest.mark.parametrize(("partner_opened_at", "met"), [(0.4, 0.5), (0.44, 0.52), (0.9, 0.6), (0.0, 0.4)])
def test_partners_meet_on_the_schedule_within_one_round(partner_opened_at: float, met: float) -> None:
    assert met_progress(0.5, partner_opened_at, round_progress=0.1, at_most=0.1) == pytest.approx(met)


def test_a_partner_of_little_weight_moves_the_place_by_little() -> None:
    spec = RunSpec(name="far", total_steps=100, outer=published(inner_steps=10))
    own = {SectionName.SLOW_WEIGHTS: torch.zeros(4)}
    for weight, moved in ((1.0, 0.1), (0.25, 0.025)):
        behind = received(own, own, agreed=Agreement(10.0, weight=weight))  # the partner is at the start of the run
        assert progress_after(0.5, behind, inner_steps=10, spec=spec) == pytest.approx(0.5 - moved)


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


@pytest.mark.parametrize("total_steps", [7, 480, 2_000, 20_000, 60_000])
def test_the_schedule_ends_at_one_however_its_fractions_are_rounded(total_steps: int) -> None:
    progress = 0.0
    for _ in range(total_steps):
        assert progress < 1
        progress = next_progress(progress, total_steps)
    assert progress == 1.0
    assert met_progress(1 - 1e-12, 0.999, round_progress=1e-3, at_most=1e-3) == 1.0


def test_streams_are_those_of_the_models_card_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, waited = list[object](), list[object]()
    stream = SimpleNamespace(wait_stream=waited.append)
    api = SimpleNamespace(Stream=lambda device: made.append(device) or stream, current_stream=lambda device: device)
    monkeypatch.setattr(torch, "get_device_module", lambda device: api)
    second = torch.device("cuda", 1)
    Staging(second).begin()
    assert made == [second, second]
    assert waited == [second]
