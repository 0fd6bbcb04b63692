"""The number of connections of a swap: as many as help, one on a full link, and no trial in a short swap."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.net.connection_tuning import (
    QUIET_SWAPS,
    REMEMBERED_PEERS,
    ConnectionMemory,
    ConnectionPolicy,
    ConnectionTuner,
    Direction,
    Measured,
)

POLICY = ConnectionPolicy(max_connections=8, window_s=1.5)
FRAME_BYTES = 262_144
Rate = Callable[[int], float]  # number of connections -> MB/s in one direction


def each(mb_s: float) -> Rate:
    return lambda num_connections: mb_s * num_connections


def shared(mb_s: float) -> Rate:
    return lambda num_connections: mb_s


def capped(mb_s: float, most: float) -> Rate:
    return lambda num_connections: min(mb_s * num_connections, most)


def swap(
    tuner: ConnectionTuner, sent: Rate, received: Rate, *, seconds: float, noise: float = 0.0, granted: int = 8
) -> list[int]:
    """Play frames at these rates in virtual time; return the numbers of connections in order."""
    rng = random.Random(0)
    rates = {Direction.SENT: sent, Direction.RECEIVED: received}
    connections = min(tuner.wanted, granted)
    tuner.in_place(connections, 0.0)
    history = [connections]
    due_s = dict.fromkeys(Direction, 0.0)
    number = 0
    while min(due_s.values()) < seconds:
        way = min(due_s, key=lambda way: due_s[way])
        number += 1
        if tuner.moved(way, FRAME_BYTES, due_s[way], connection=number // 2 % connections):
            connections = min(tuner.wanted, granted)
            tuner.in_place(connections, due_s[way])
            history.append(connections)
        due_s[way] += FRAME_BYTES / (rates[way](connections) * 1e6) * rng.uniform(1 - noise, 1 + noise)
    return history


def fresh(policy: ConnectionPolicy = POLICY) -> ConnectionTuner:
    return ConnectionMemory(policy).tuner("there", settle_s=1.0)


@pytest.mark.parametrize(
    ("sent", "received", "history"),
    [
        (each(0.3), each(0.3), [1, 2, 4, 8, 8]),
        (each(0.3), shared(12.0), [1, 2, 4, 8, 8]),
        (shared(12.0), each(0.3), [1, 2, 4, 8, 8]),
        (shared(12.0), shared(12.0), [1, 2, 1]),
        (shared(0.1), shared(0.1), [1, 2, 1]),
        (capped(0.3, 1.2), capped(0.3, 1.2), [1, 2, 4, 8, 4]),
        (capped(3.0, 4.5), shared(12.0), [1, 2, 4, 2]),
    ],
    ids=["lossy", "lossy up", "lossy down", "full", "full and slow", "four fill it", "one and a half fill it"],
)
def test_connections_are_doubled_while_that_pays(sent: Rate, received: Rate, history: list[int]) -> None:
    tuner = fresh()
    assert swap(tuner, sent, received, seconds=120.0) == history
    assert tuner.is_settled


def test_a_trial_that_helps_one_direction_at_the_cost_of_the_other_does_not_pay() -> None:
    assert swap(
        fresh(), lambda connections: 3.0 * connections, lambda connections: 12.0 / connections, seconds=60.0
    ) == [1, 2, 1]


def test_a_direction_that_stalls_for_a_moment_does_not_end_a_trial() -> None:
    """The frames of a new connection wait for the backlog of the others, so one direction looks slow for a moment."""
    tuner = fresh()
    tuner.before = Measured(1, {Direction.SENT: 1e6, Direction.RECEIVED: 1e6})
    tuner.wanted = 2
    tuner.in_place(2, 0.0)
    has_decided, number = False, 0
    while not has_decided:
        number += 1
        now_s = 1.0 + 0.1 * number
        ways = [Direction.RECEIVED] if now_s < 4.0 and number % 5 else list(Direction)
        decisions = [tuner.moved(way, FRAME_BYTES, now_s, connection=number % 2) for way in ways]
        has_decided = any(decisions)
        assert number < 1000
    assert tuner.wanted == 4


def test_noise_is_not_taken_for_a_gain() -> None:
    assert swap(fresh(), shared(2.0), shared(2.0), seconds=60.0, noise=0.5) == [1, 2, 1]


def test_a_short_swap_never_wants_a_second_connection() -> None:
    assert swap(fresh(), each(50.0), each(50.0), seconds=2.4) == [1]


def test_with_one_connection_allowed_nothing_is_measured() -> None:
    tuner = fresh(ConnectionPolicy(max_connections=1))
    assert swap(tuner, each(1.0), each(1.0), seconds=60.0) == [1]
    assert tuner.is_settled


@pytest.mark.parametrize("granted", [1, 3])
def test_refused_connections_are_not_asked_for_again(granted: int) -> None:
    history = swap(fresh(), each(0.3), each(0.3), seconds=120.0, granted=granted)
    assert max(history) == granted
    assert len(history) <= 4


def test_a_pause_between_two_parts_is_not_measured() -> None:
    """Bursts of frames last a second, with a minute of silence after each; the rate is that of the bursts."""
    tuner = fresh()
    tuner.in_place(1, 0.0)
    now_s, per_frame_s, decided = 0.0, 0.01, []
    for _ in range(10):
        for _ in range(100):
            now_s += per_frame_s
            if tuner.moved(Direction.SENT, FRAME_BYTES, now_s, connection=0):
                decided.append(tuner.before)
                tuner.in_place(tuner.wanted, now_s)
        tuner.pause(Direction.SENT)
        now_s += 60.0
    assert decided[0] is not None
    assert decided[0].rates == {Direction.SENT: pytest.approx(FRAME_BYTES / per_frame_s)}


@given(
    up=st.floats(0.05, 20.0),
    down=st.floats(0.05, 20.0),
    per_connection=st.booleans(),
    noise=st.floats(0.0, 0.9),
    start=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_connections_stay_within_bounds_and_settle(
    up: float, down: float, per_connection: bool, noise: float, start: int
) -> None:
    rate = each if per_connection else shared
    tuner = ConnectionTuner(POLICY, start=start, is_trying=True, settle_s=1.0)
    history = swap(tuner, rate(up), rate(down), seconds=300.0, noise=noise)
    assert tuner.is_settled
    assert all(1 <= connections <= 8 for connections in history)
    assert len(history) <= 6


# memory between swaps


def after(memory: ConnectionMemory, rate: Rate, *, seconds: float = 120.0, address: str = "there") -> list[int]:
    tuner = memory.tuner(address, settle_s=1.0)
    history = swap(tuner, rate, rate, seconds=seconds)
    memory.learn(address, tuner)
    return history


@pytest.mark.parametrize(("rate", "best"), [(each(0.3), 8), (shared(12.0), 1)], ids=["lossy", "full"])
def test_the_next_swaps_begin_with_what_was_learned_and_one_in_nine_tries_again(rate: Rate, best: int) -> None:
    memory = ConnectionMemory(POLICY)
    after(memory, rate)
    for _ in range(2):
        assert [after(memory, rate) for _ in range(QUIET_SWAPS)] == [[best]] * QUIET_SWAPS
        trial = after(memory, rate)
        assert trial[0] == max(1, best // 2)
        assert trial[-1] == best
    assert memory.num_connections("there") == best


def test_a_link_that_was_lossy_and_is_good_again_comes_down_step_by_step() -> None:
    memory = ConnectionMemory(POLICY)
    after(memory, each(0.3))
    for best in (4, 2, 1):
        for _ in range(QUIET_SWAPS + 1):
            after(memory, shared(12.0))
        assert memory.num_connections("there") == best


def test_swaps_too_short_to_learn_from_alone_learn_together() -> None:
    """Each is long enough for one window; a trial that was cut short continues in the next."""
    memory = ConnectionMemory(POLICY)
    for _ in range(12):
        after(memory, each(0.3), seconds=4.5)
    assert memory.num_connections("there") == 8


def test_swaps_too_short_for_a_window_teach_nothing() -> None:
    memory = ConnectionMemory(POLICY)
    assert [after(memory, each(0.3), seconds=1.0) for _ in range(3)] == [[1]] * 3


def test_memory_is_bounded_and_of_each_address() -> None:
    memory = ConnectionMemory(POLICY)
    after(memory, each(0.3), address="first")
    assert (memory.num_connections("first"), memory.num_connections("second")) == (8, 1)
    learned = memory.tuner("first", settle_s=1.0)
    swap(learned, each(0.3), each(0.3), seconds=1.0)
    long = ConnectionTuner(POLICY, start=1, is_trying=True, settle_s=1.0)
    swap(long, each(0.3), each(0.3), seconds=60.0)
    for index in range(REMEMBERED_PEERS):
        memory.learn(f"peer {index}", long)
    assert memory.num_connections("first") == 1
    assert memory.num_connections("peer 0") == 8


def test_chunks_without_a_byte_have_no_rate() -> None:
    """With a rate of 0 bytes/s no gain could be measured."""
    tuner = ConnectionTuner(POLICY, start=1, is_trying=True, settle_s=0.0)
    tuner.in_place(1, 0.0)
    assert not any(tuner.moved(Direction.RECEIVED, 0, 0.1 * number, connection=1) for number in range(100))
    assert not tuner.has_measured
