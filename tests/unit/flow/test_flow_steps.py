"""Unit tests of the median mark, a head's own batch, the turns of heads, and the window of seen microbatches."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_table import virtual

from noloco_p2p.flow.frames import MicrobatchId, MicrobatchTicket
from noloco_p2p.flow.limits import MAX_HEADS, SEEN_NUMBERS, SHORTEST_VOTE_S, VOTE_INTERVALS, VOTE_S
from noloco_p2p.flow.replica import SeenForwards
from noloco_p2p.flow.rooms import Kind, Rooms, Turns
from noloco_p2p.flow.steps import MedianSteps

HEADS = [f"h{number}" for number in range(2 * MAX_HEADS)]


def median_steps() -> MedianSteps:
    return MedianSteps(heads={*"abcde", *HEADS}, batch_tokens=40)


def vote(steps: MedianSteps, head: str, number: int, mark: float, now_s: float = 0.0) -> None:
    steps.vote(MicrobatchTicket(MicrobatchId(head, number), mark, 10), now_s)


def test_the_median_is_the_lower_one() -> None:
    """Half of the heads alone cannot push the others forward."""
    steps = median_steps()
    for head, mark in {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}.items():
        vote(steps, head, 1, mark)
    assert steps.median(0.0) == 0.2
    vote(steps, "e", 1, 0.5)
    assert steps.median(0.0) == 0.3


@given(
    marks=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.integers(0, 3)), max_size=60),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_no_token_is_in_two_steps_and_none_is_lost(marks: list[tuple[str, int, int]], seed: int) -> None:
    steps, rng, now_s = median_steps(), random.Random(seed), 0.0
    mark_of = dict.fromkeys("abc", 0)
    num_counted, closed = 0, []
    for number, (head, num_microbatches, rise) in enumerate(marks):
        now_s += rng.choice((0.1, 1.0, VOTE_S))
        mark_of[head] = min(10, mark_of[head] + rise)
        vote(steps, head, number, mark_of[head] / 10, now_s)
        steps.count(10 * num_microbatches)
        num_counted += 10 * num_microbatches
        before = steps.progress
        if steps.is_due(now_s):
            num_tokens = steps.take()
            closed.append(num_tokens)
            assert num_tokens >= 20 or steps.progress == 1.0, "a step on less than half a batch"
        assert steps.progress >= before
        assert not steps.is_due(now_s), "two steps for one rise"
    assert sum(closed) + steps.num_tokens == num_counted


def test_votes_are_bounded() -> None:
    steps = median_steps()
    for head in HEADS:
        vote(steps, head, 1, 0.5)
    assert len(steps) == MAX_HEADS


def test_invented_heads_neither_outvote_nor_evict_honest_ones() -> None:
    """Eight heads take 100 steps while one neighbour signs marks with 9 keys, then with as many as are remembered."""
    steps, closed = median_steps(), 0
    for number in range(1, 101):
        for head in HEADS[:8]:
            steps.count(10)
            vote(steps, head, number, number / 100)
        for key in range(9 if number < 50 else MAX_HEADS):
            vote(steps, f"invented {key}", number, 1.0 if number % 2 else 0.0)
        if steps.is_due(0.0):
            closed += steps.take() > 0
        assert steps.progress == number / 100
    assert closed == 100


@given(numbers=st.lists(st.integers(0, 3 * SEEN_NUMBERS), max_size=200))
@settings(max_examples=100, deadline=None)
def test_a_window_knows_what_it_has_seen_and_takes_the_old_for_seen(numbers: list[int]) -> None:
    seen, taken = SeenForwards(), set()
    for number in numbers:
        id = MicrobatchId("h", number)
        is_old = bool(taken) and number <= max(taken) - SEEN_NUMBERS
        assert (id in seen) == (number in taken or is_old)
        if id not in seen:
            seen.add(id)
            taken.add(number)


def test_a_window_follows_a_head_that_starts_again_with_the_clock() -> None:
    seen = SeenForwards()
    seen.add(MicrobatchId("h", 5))
    seen.add(MicrobatchId("h", 1 << 60))
    assert MicrobatchId("h", 5) in seen, "it is too old"
    assert MicrobatchId("h", (1 << 60) - 1) not in seen
    assert MicrobatchId("i", 5) not in seen


def test_windows_are_bounded() -> None:
    seen = SeenForwards()
    for head in range(2 * MAX_HEADS):
        seen.add(MicrobatchId(f"h{head}", 0))
        seen.add(MicrobatchId(f"h{head}", 10**9))
    assert len(seen) == MAX_HEADS
    assert all(bits < 1 << SEEN_NUMBERS for _, bits in seen._windows.values())


async def served(rooms: Rooms, *ids: str) -> list[str]:
    """Return the order in which microbatches get the only slot, if all of them ask while it is taken."""
    taken, order = MicrobatchId("taken", 0), list[str]()
    rooms.held.add(taken)
    for id in ids:
        head, _, number = id.partition(".")
        rooms.ask(MicrobatchId(head, int(number)), f"peer {id}")
    rooms.release(taken)
    while rooms.held:
        (held,) = rooms.held
        order.append(f"{held.head}.{held.number}")
        rooms.release(held)
    return order


@virtual
async def test_heads_get_room_in_turn() -> None:
    assert await served(Rooms(1), "a.1", "a.2", "a.3", "b.1", "c.1", "b.2") == [
        "a.1",
        "b.1",
        "c.1",
        "a.2",
        "b.2",
        "a.3",
    ]
    assert await served(Rooms(1, is_barred=lambda head: head == "a"), "a.1", "a.2", "b.1") == ["b.1"]


@virtual
async def test_a_head_that_had_twice_its_fair_share_is_passed_over_while_others_wait() -> None:
    rooms = Rooms(1)
    assert (await served(rooms, *(f"a.{i}" for i in range(9)), "b.1", "c.1"))[-1] == "a.8"
    # otherwise a would be next after b.2
    assert await served(rooms, "b.2", "a.9", "b.3") == ["b.2", "b.3", "a.9"]
    rooms.new_step()
    assert await served(rooms, "a.10", "b.4", "a.11") == ["a.10", "b.4", "a.11"]


@virtual
async def test_a_release_gives_the_slot_to_the_next_even_if_nobody_waits_for_it_any_more() -> None:
    rooms = Rooms(1)
    await rooms.ask(MicrobatchId("a", 1), "peer")
    rooms.ask(MicrobatchId("a", 2), "peer").cancel()
    third = rooms.ask(MicrobatchId("a", 3), "peer")
    rooms.release(MicrobatchId("a", 1))
    rooms.release(MicrobatchId("a", 2))
    assert third.done()


@virtual
async def test_the_most_urgent_task_is_next_and_a_step_waits_for_both_turns() -> None:
    turns, order, go_on = Turns(), list[Kind](), asyncio.Event()

    async def take(kind: Kind) -> None:
        async with turns.take(kind):
            order.append(kind)
            await go_on.wait()

    first = [asyncio.create_task(take(Kind.FORWARD)) for _ in range(3)]
    await asyncio.sleep(0)
    later = [asyncio.create_task(take(kind)) for kind in (Kind.LOSS, Kind.BACKWARD, Kind.CLOSE_STEP)]
    await asyncio.sleep(0)
    first[2].cancel()  # while it waits
    assert order == [Kind.FORWARD, Kind.FORWARD]
    go_on.set()
    await asyncio.gather(*first, *later, return_exceptions=True)
    assert order[2:] == [Kind.CLOSE_STEP, Kind.BACKWARD, Kind.LOSS]
    assert len(turns) == 0


@pytest.mark.parametrize("interval_s", [0.1, 5.0])
def test_a_head_that_falls_silent_loses_its_vote_after_some_of_its_intervals(interval_s: float) -> None:
    steps = median_steps()
    for number in range(20):
        vote(steps, "a", number, 0.1, number * interval_s)
        vote(steps, "b", number, 0.2, number * interval_s)
    last_s, lasts_s = 19 * interval_s, max(SHORTEST_VOTE_S, VOTE_INTERVALS * interval_s)
    assert lasts_s < VOTE_S / 2
    vote(steps, "b", 20, 0.3, last_s + lasts_s)
    assert steps.median(last_s + lasts_s) == 0.1, "the lower one of two"
    vote(steps, "b", 21, 0.3, last_s + lasts_s + 1)
    assert steps.median(last_s + lasts_s + 1) == 0.3
    vote(steps, "a", 20, 0.1, last_s + lasts_s + 2)
    assert steps.median(last_s + lasts_s + 2) == 0.1, "it is back"
