from __future__ import annotations

import time

import pytest

from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm.clock import MAX_OFFSET_S, DhtClock, Offset, _steady_s, check_clock


class Clocks:
    """A wall clock that can be set, and a monotonic clock."""

    def __init__(self) -> None:
        self.wall_s, self.steady_s = 1_800_000_000.0, 5.0
        self.dht = DhtClock(lambda: self.wall_s, lambda: self.steady_s)

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_wall_clock_that_jumps_moves_nothing(jump_s: float) -> None:
    clocks = Clocks()
    before_s = clocks.dht.now()
    clocks.pass_s(10)
    clocks.wall_s += jump_s
    assert clocks.dht.now() == pytest.approx(before_s + 10)
    clocks.dht.heard(0.1)  # other nodes agree with the time before the jump
    assert clocks.dht.now() == pytest.approx(before_s + 10)


def test_a_clock_that_was_wrong_and_is_set_is_taken_when_others_agree_with_it() -> None:
    clocks = Clocks()
    clocks.wall_s += 3600
    clocks.dht.heard(-7000)  # agrees with neither clock
    assert clocks.dht.now() == pytest.approx(clocks.wall_s - 3600)
    clocks.dht.heard(3599)
    assert clocks.dht.now() == pytest.approx(clocks.wall_s)


@pytest.mark.parametrize("name", ["CLOCK_BOOTTIME", "CLOCK_MONOTONIC"])
def test_the_clock_of_the_system_is_one_that_goes_on_in_its_sleep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "CLOCK_MONOTONIC":  # as on macOS
        monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.setattr(time, "clock_gettime", lambda number: 5.0 if number == getattr(time, name) else 9.0)
    assert DhtClock(lambda: 100.0).now() == 100.0
    assert _steady_s() == 5.0


def test_alone_the_wall_clock_is_followed() -> None:
    clocks = Clocks()
    clocks.wall_s += 3600
    clocks.dht.follow_wall()
    assert clocks.dht.now() == pytest.approx(clocks.wall_s)


def test_a_clock_that_differs_is_told_with_the_offset_and_the_way_out() -> None:
    with pytest.raises(DirectoryError, match=r"60\.0 s behind that of \.\.efghij, .*within 3 s; synchronize") as told:
        check_clock({"abcdefghij": Offset(60.0, 0.1)})
    assert "timedatectl" in str(told.value)
    with pytest.raises(DirectoryError, match=r"5\.0 s ahead of those of 2 nodes, including \.\.a, but"):
        check_clock({"a": Offset(-5.0, 0.1), "b": Offset(-5.0, 0.1), "c": Offset(0.0, 0.1)})


def test_neither_one_wrong_clock_among_many_nor_a_slow_answer_is_a_reason() -> None:
    right = Offset(MAX_OFFSET_S - 0.1, 0.0)
    check_clock({})
    check_clock({"a": Offset(60.0, 0.1), "b": right, "c": right})
    check_clock({"a": Offset(4.0, 1.5)})
