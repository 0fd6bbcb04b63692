"""The outer step applies nothing of a refused swap, and a bounded amount of a clipped one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from harness.specs import FP32, published
from harness.swapped import EVEN, received
from torch import Tensor, nn

from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, LonelyCause, Swapped
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.outer.update_filter import UpdateFilter, admitted
from noloco_p2p.telemetry.metrics import Metrics

SLOW, MOMENTUM, GRADIENT = SectionName
Sections = dict[SectionName, Tensor]


def make_state(seed: int = 1) -> OuterState:
    """Return a trained state of two chunks, one tensor of which spans both; its outer gradient is 0.1 everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 3))
    state = OuterState(model, published())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1)
    return state


def sections(state: OuterState) -> Sections:
    gradient = torch.cat([chunk.clone() for chunk in state.outer_gradient()])
    return {name: vector.clone() for name, vector in state.sections().items()} | {GRADIENT: gradient}


def fingerprint(state: OuterState) -> str:
    """Return a digest of all values that a swap may change (I1)."""
    fast = state.parameters.read(0, state.num_elements)
    numbers = (*state.tensors().values(), fast)
    return blake3(b"".join(vector.numpy().tobytes() for vector in numbers)).hexdigest()


def take(state: OuterState, theirs: Mapping[SectionName, Tensor]) -> Swapped | Alone:
    """Take an outer step as a peer does, with its filter."""
    outcome, verdict = admitted(Swapped(received(sections(state), theirs)), state)
    state.step(None if isinstance(outcome, Alone) else outcome.received, scales=verdict.scales)
    assert isinstance(outcome, Swapped | Alone)
    return outcome


def test_a_swap_of_honest_partners_is_the_exact_outer_step() -> None:
    """With equal starts and outer gradients of equal norm, the gates change nothing."""
    here, there = make_state(), make_state()
    theirs = sections(there)
    theirs[GRADIENT] = (
        theirs[GRADIENT] * torch.tensor([-1.0, 1.0]).repeat(len(theirs[GRADIENT]))[: len(theirs[GRADIENT])]
    )
    own = sections(here)
    momentum = 0.7 * (own[GRADIENT] + (theirs[GRADIENT] * 0.5 - own[GRADIENT] * 0.5))
    take(here, theirs)
    assert torch.allclose(here.slow_weights, own[SLOW] + momentum, atol=0, rtol=1e-6)


@pytest.mark.parametrize("whose", ["own", "partner"])
@pytest.mark.parametrize("codec", ["int4", "int2"])
def test_a_gradient_whose_squares_underflow_is_no_reason_to_refuse(codec: str, whose: str) -> None:
    """After a round without inner steps the gradient is 0, and int2 decodes it to the smallest normal numbers."""
    here = make_state()
    for _ in range(2):
        here.gating.gradients.note(55.0)
    mine, theirs = sections(here), sections(make_state(2))
    (mine if whose == "own" else theirs)[GRADIENT].fill_(1e-38)
    (theirs if whose == "own" else mine)[GRADIENT].fill_(-0.1)
    verdict = here.judge_swap(received(mine, theirs, codec=FP32.model_copy(update={"outer_gradient": codec})))
    assert not verdict.refusal


@pytest.mark.parametrize("scale", [11.0, -100.0, 1e30, 3e38])
def test_a_gradient_of_ten_times_the_usual_length_refuses_the_swap_and_the_round_is_solo(scale: float) -> None:
    here, alone = make_state(), make_state()
    theirs = sections(make_state(2))
    theirs[GRADIENT] = (theirs[GRADIENT] * scale).clamp(-3e38, 3e38)
    before = fingerprint(here)
    outcome, _ = admitted(Swapped(received(sections(here), theirs)), here)
    assert fingerprint(here) == before, "judging changes nothing"
    assert isinstance(outcome, Alone)
    assert outcome.cause is LonelyCause.REFUSED_STATE
    assert "outer gradient" in outcome.reason
    assert "..artner" in outcome.reason
    take(here, theirs)
    alone.step(None)
    assert fingerprint(here) == fingerprint(alone), "bit for bit the solo step"


@pytest.mark.parametrize(("scale", "is_refused"), [(1000.0, True), (1.1, False)])
def test_a_late_gradient_that_is_refused_leaves_all_as_it_was(scale: float, is_refused: bool) -> None:
    state, metrics = make_state(), Metrics()
    theirs = sections(state)
    theirs[GRADIENT] = theirs[GRADIENT] * scale
    pair = received(sections(state), theirs).sections[GRADIENT]
    before = fingerprint(state)
    UpdateFilter(state, metrics).correct(Correction(pair, "partner", 0, EVEN))
    assert (fingerprint(state) == before) is is_refused
    assert (metrics.refused_gradients, metrics.late) == ((1, 0) if is_refused else (0, 1))


def test_a_gradient_that_came_late_leaves_what_one_in_time_leaves() -> None:
    """Slow weights, momentum and model are equal, if no outer step falls between the two."""
    in_time, late = make_state(), make_state()
    theirs = sections(in_time)
    theirs[GRADIENT] = theirs[GRADIENT] * torch.linspace(0.5, 1.5, len(theirs[GRADIENT]))
    own = sections(in_time)
    gradients = received({GRADIENT: own[GRADIENT]}, {GRADIENT: theirs[GRADIENT]})
    in_time.step(gradients)
    correction = Correction(gradients.sections[GRADIENT], "partner", 0, EVEN)
    late.step(None)
    UpdateFilter(late, Metrics()).correct(correction)
    for one, other in zip(in_time.tensors().values(), late.tensors().values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    assert torch.allclose(late.parameters.read(0, late.num_elements), late.slow_weights, atol=1e-7)


def test_of_an_offset_that_was_clipped_what_was_let_through_is_remembered() -> None:
    """The next radius is at most twice the clipped norm, so a liar does not widen its own gate."""
    state = make_state()
    own = sections(state)
    lengths = [float(own[GRADIENT][start:stop].norm()) for start, stop in places_of_pieces(state)]
    take(state, own | {SLOW: own[SLOW] + 50.0})
    usual = state.gating.offsets[SLOW].usual()
    assert usual == pytest.approx([state.gating.limits.offset_least * length for length in lengths], rel=1e-4)


def places_of_pieces(state: OuterState) -> list[tuple[int, int]]:
    sizes = [place.stop - place.start for chunk in state.gating.pieces.in_chunk for _, place in chunk]
    return [(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]


@pytest.mark.parametrize("scale", [-1.0, -9.0])
def test_a_gradient_against_the_own_one_refuses_the_swap(scale: float) -> None:
    here, alone = make_state(), make_state()
    theirs = sections(here)
    theirs[GRADIENT] = theirs[GRADIENT] * scale
    outcome = take(here, theirs)
    assert isinstance(outcome, Alone)
    assert "opposes" in outcome.reason
    alone.step(None)
    assert fingerprint(here) == fingerprint(alone), "bit for bit the solo step"


def test_a_gradient_that_is_all_in_one_tensor_moves_it_little_more_than_training_does() -> None:
    """The whole gradient is as long as an honest one, so the last bias alone is 1,000 times as long."""
    here, alone = make_state(), make_state()
    theirs = sections(here)
    length = theirs[GRADIENT].norm()
    theirs[GRADIENT] = torch.zeros_like(theirs[GRADIENT])
    theirs[GRADIENT][-3:] = length / 3**0.5
    before = here.slow_weights[-3:].clone()
    take(here, theirs)
    alone.step(None)
    own = float((alone.slow_weights[-3:] - before).norm())
    assert float((here.slow_weights[-3:] - before).norm()) <= 2.6 * own


def test_a_partner_far_away_is_refused_among_near_ones() -> None:
    state = make_state()
    for number in range(4):
        outcome = replace(received(sections(state), sections(state)), partner=f"near{number}")
        assert isinstance(admitted(Swapped(outcome), state)[0], Swapped)
    theirs = sections(state)
    theirs[SLOW] = theirs[SLOW] + 10 * theirs[GRADIENT]
    outcome, _ = admitted(Swapped(received(sections(state), theirs)), state)
    assert isinstance(outcome, Alone)
    assert "as far from" in outcome.reason
    assert outcome.cause is LonelyCause.REFUSED_STATE


@pytest.mark.parametrize("section", [SLOW, MOMENTUM], ids=["weights", "momentum"])
@pytest.mark.parametrize("size", [10.0, 1e10, 3e38])
def test_however_far_the_partner_is_it_pulls_by_the_radius_at_most(section: SectionName, size: float) -> None:
    here, honest = make_state(), make_state()
    own = sections(here)
    take(honest, own)
    theirs = sections(here)
    theirs[section] = torch.full_like(theirs[section], size)
    take(here, theirs)
    moved = float((here.slow_weights - honest.slow_weights).norm())
    radius = float(own[GRADIENT].norm())  # without a history: the norm of the own outer gradient
    assert moved <= radius / 2 * 1.001
    assert moved or size > 1e18, "its square overflows: then nothing of it is taken"
    assert bool(torch.isfinite(here.slow_weights).all())


def test_the_pull_is_bounded_for_each_tensor_by_itself() -> None:
    """Otherwise a lie in the few elements of the last layer would hide in the norm of the whole vector."""
    here, honest = make_state(), make_state()
    own = sections(here)
    take(honest, own)
    theirs = sections(here)
    theirs[SLOW][-3:] += 20.0
    take(here, theirs)
    moved = (here.slow_weights - honest.slow_weights)[-3:]
    assert float(moved.norm()) <= float(own[GRADIENT][-3:].norm()) / 2 * 1.001
    assert torch.equal(here.slow_weights[:-3], honest.slow_weights[:-3])


def test_a_thousand_swaps_with_a_liar_leave_every_number_finite() -> None:
    state = OuterState(nn.Linear(4, 3), published())
    noise = torch.Generator().manual_seed(5)
    for _ in range(1000):
        with torch.no_grad():
            for _, param in state.parameters.named:
                param.add_(torch.randn(param.shape, generator=noise) * 0.01)
        size = 10.0 ** float(torch.randint(-3, 38, (1,), generator=noise))
        own = sections(state)
        lies = {name: torch.randn(len(vector), generator=noise) * size for name, vector in own.items()}
        lies[GRADIENT] = own[GRADIENT] * -9  # short enough for its gate
        take(state, {name: vector.clamp(-3e38, 3e38) for name, vector in lies.items()})
        assert bool(torch.isfinite(state.slow_weights).all())
    assert float(state.slow_weights.abs().max()) < 1000
