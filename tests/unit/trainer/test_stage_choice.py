"""A newcomer takes a stage that needs peers, and many newcomers do not all take the same one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.trainer.stage_choice import capacities, draw_stage, missing_stages, needier_stage


def peers(*num_at: int, capacity: float = 0.0, state: str = "training") -> list[Candidate]:
    """Return the given number of peers of each stage."""
    return [
        Candidate(f"{stage}-{number}", "", state=state, stage=stage, capacity=capacity)
        for stage, num_peers in enumerate(num_at)
        for number in range(num_peers)
    ]


def drawn(members: list[Candidate], fitting: list[int], number: int = 1000) -> Counter[int]:
    rng = random.Random(0)
    return Counter(draw_stage(members, fitting, num_stages=3, rng=rng) for _ in range(number))


def test_the_capacity_of_a_stage_is_that_of_its_peers_together() -> None:
    members = [*peers(1, 2, capacity=100.0), *peers(1), *peers(0, 0, 1, state="leaving")]
    assert capacities(members, 3) == [200.0, 200.0, 0.0], "who has not measured itself counts as an average peer"
    assert capacities(peers(2, 1), 3) == [2.0, 1.0, 0.0]
    assert missing_stages(members, own=None, num_stages=3) == [2]
    assert missing_stages(members, own=2, num_stages=3) == []


@pytest.mark.parametrize(
    ("num_at", "stage", "least", "most"),
    [((1, 1, 0), 2, 600, 900), ((10, 10, 0), 2, 950, 1000), ((4, 4, 2), 2, 600, 700), ((0, 0, 0), 1, 300, 370)],
    ids=["an empty stage", "an empty stage of many peers", "half the capacity", "an empty run"],
)
def test_a_stage_is_drawn_by_need(num_at: tuple[int, ...], stage: int, least: int, most: int) -> None:
    assert least <= drawn(peers(*num_at), [0, 1, 2])[stage] <= most


def one(stage: int, number: int = 0, capacity: float = 100.0) -> Candidate:
    return Candidate(f"{stage}-{number}", "", stage=stage, capacity=capacity)


def who_switches(members: list[Candidate], *, epoch: int = 0, fitting: tuple[int, ...] = (0, 1, 2)) -> dict[str, int]:
    """Let each peer decide by itself; return those that switch, with their targets."""
    found = {}
    for own in members:
        others = [peer for peer in members if peer is not own]
        target = needier_stage(others, own, fitting, num_stages=3, epoch=epoch)
        if target is not None:
            found[own.peer_id] = target
    return found


def test_of_a_stage_with_too_many_one_peer_at_a_time_switches_to_the_neediest() -> None:
    members = [*peers(4, 4, capacity=100.0), one(2)]
    switching = who_switches(members)
    assert len(switching) == 2, "one of each stage that can give one"
    assert set(switching.values()) == {2}
    epochs = {tuple(who_switches(members, epoch=epoch)) for epoch in range(20)}
    assert len(epochs) > 3, "another one in another epoch"


@pytest.mark.parametrize(
    "members",
    [
        [*peers(2, 2, capacity=100.0), one(2)],
        [*peers(4, 4, 4, capacity=100.0)],
        [*peers(9, 9, capacity=100.0), *(one(2, number) for number in range(8))],
    ],
    ids=["two replicas stay behind", "even stages", "a gain of less than a quarter"],
)
def test_a_switch_that_helps_little_or_leaves_too_few_is_not_made(members: list[Candidate]) -> None:
    assert who_switches(members) == {}


def test_nobody_switches_to_a_stage_that_does_not_fit() -> None:
    assert who_switches([*peers(4, 4, capacity=100.0), one(2)], fitting=(0, 1)) == {}


def test_switches_end_with_even_stages_and_never_empty_one() -> None:
    members = [*peers(12, 2, 1, capacity=100.0)]
    for epoch in range(60):
        for peer, target in who_switches(members, epoch=epoch).items():
            members = [replace(each, stage=target) if each.peer_id == peer else each for each in members]
    assert sorted(Counter(peer.stage for peer in members).values()) in ([4, 5, 6], [5, 5, 5])
