"""Rounds of peers without a model, with production runners on a virtual clock: each peer has one partner a round."""

from __future__ import annotations

import pytest
from harness.walk import Walk, walk

from noloco_p2p.gossip.deadlines import INTERNET


@pytest.mark.parametrize("num_peers", [2, 3, 8])
def test_who_can_be_paired_is(num_peers: int) -> None:
    result = walk(Walk(num_peers, 4, inner_steps=4, step_s=5.0, max_wait_s=20.0))
    assert result.in_two_swaps() == []
    rounds = [each for each in result.rounds if each.round > 0]
    paired = [each for each in rounds if each.partner]
    assert len(paired) >= 0.9 * len(rounds) * (num_peers // 2 * 2) / num_peers
    assert sum(each.num_offers <= 5 for each in paired) >= 0.75 * len(paired)


def test_peers_of_different_speeds_find_partners_and_mix() -> None:
    result = walk(Walk(6, 5, inner_steps=4, step_s=5.0, max_wait_s=20.0, speeds=(1.0, 2.0), is_in_step=False))
    assert result.in_two_swaps() == []
    assert sum(bool(each.partner) for each in result.rounds) >= 0.8 * len(result.rounds)
    spreads = [float(vectors.var(0).mean()) for _, vectors in result.vectors]
    assert spreads[-1] < 0.2 * spreads[0], "five rounds halve it five times"


def test_a_boundary_lasts_as_long_as_the_run_allows_and_no_longer() -> None:
    """This is law I2 on a virtual clock, which no other load slows down. No gradient or fault ever arrives."""
    max_wait_s = 5.0
    assert max_wait_s < INTERNET.progress_s
    result = walk(Walk(2, 3, inner_steps=4, step_s=5.0, max_wait_s=max_wait_s, late_parts_stall=True))
    waits_s = [each.boundary_s for each in result.rounds if each.partner]
    assert len(waits_s) >= 4
    assert max(waits_s) == pytest.approx(max_wait_s, abs=0.01)


def test_the_same_plan_gives_the_same_rounds() -> None:
    plan = Walk(3, 2, max_wait_s=20.0, seed=5)
    assert walk(plan).rounds == walk(plan).rounds
