"""How many connections (lanes) a swap needs, by hill climbing on what it carries: no constant here is about a link.

Lanes are doubled while that pays. A TCP stream that loss holds back carries as much beside others as alone, so that two
carry nearly twice as much; a link that is full carries no more, whatever the number. Each direction is looked at by
itself. The frames of a new lane wait for the backlog of the other lanes, so a trial that makes one direction faster and
the other one slower is measured once more. What was learned is remembered for the next swap with the same peer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

GAIN = 1.2  # a trial pays when it makes a direction so much faster, and the other not as much slower
FRAMES_PER_LANE = 2  # of each direction in a window at least; a lane of 2 Mbit/s needs two seconds for them
MAX_SETTLE_S = 5.0
REMEMBERED_PEERS = 256
QUIET_SWAPS = 8  # so many swaps use what was learned before it is tried again


class Direction(IntEnum):
    SENT = 0
    RECEIVED = 1


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """max_lanes: of one swap, 1 = never a second one. window_s: the least time over which a rate is measured."""

    max_lanes: int = 8
    window_s: float = 1.5


class _Meter:
    """Rate of one direction in a window. Times between sections, when nothing has to move, do not count."""

    def __init__(self) -> None:
        self.num_bytes = self.num_frames = 0
        self.active_s = 0.0
        self.lanes: set[int] = set()
        self._last_s: float | None = None

    @property
    def is_moving(self) -> bool:
        return self._last_s is not None

    def moved(self, num_bytes: int, now_s: float, *, lane: int) -> None:
        self.lanes.add(lane)
        if self._last_s is not None:  # the first frame came out of a time that was not measured
            self.num_bytes += num_bytes
            self.num_frames += 1
            self.active_s += now_s - self._last_s
        self._last_s = now_s

    def pause(self) -> None:
        self._last_s = None

    def restart(self) -> None:
        self.lanes.clear()
        self.num_bytes = self.num_frames = 0
        self.active_s = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    num_lanes: int
    rates: Mapping[Direction, float]  # bytes per second


class ConnectionTuner:
    """The number of lanes of one swap: `wanted`. Pure: it is given the time.

    The caller brings the lanes to `wanted` and says so with `in_place`; `moved` then tells when that number changes.
    settle_s: how long new TCP streams take to find their rate, many round trips; not measured.
    before: what was measured before the trial with `start` lanes, in an earlier swap.
    """

    def __init__(
        self, policy: LanePolicy, *, start: int, is_trying: bool, settle_s: float, before: Measured | None = None
    ) -> None:
        self.wanted = min(start, policy.max_lanes)
        self.is_settled = not is_trying or policy.max_lanes == 1
        self.has_measured = False
        self.before = before
        self._policy = policy
        self._settle_s = min(settle_s, MAX_SETTLE_S)
        self._meters = (_Meter(), _Meter())
        self._lanes = 1
        self._window_begins_s = 0.0
        self._is_measuring = False
        self._is_repeated = False

    def in_place(self, num_lanes: int, now_s: float) -> None:
        """So many lanes are open now; fewer than wanted when the other side has refused some."""
        if num_lanes < self.wanted:
            self.wanted = num_lanes
            self.is_settled = self.is_settled or self.before is None or num_lanes <= self.before.num_lanes
        self._lanes = num_lanes
        self._is_measuring = not self.is_settled
        self._is_repeated = False
        self._begin_window(now_s + self._settle_s)

    def pause(self, direction: Direction) -> None:
        """A section of this direction begins or has ended."""
        self._meters[direction].pause()

    def moved(self, direction: Direction, num_bytes: int, now_s: float, *, lane: int) -> bool:
        """A frame is through, on a lane with this number; True = `wanted` or `is_settled` has changed."""
        if not self._is_measuring:
            return False
        if now_s < self._window_begins_s:
            self._meters[direction].pause()
            return False
        self._meters[direction].moved(num_bytes, now_s, lane=lane)
        if not self._window_is_full(now_s):
            return False
        rates = {way: self._meters[way].num_bytes / self._meters[way].active_s for way in Direction if self._knows(way)}
        if not self._is_repeated and self.before and _disagree(_gains(self.before.rates, rates)):
            self._is_repeated = True
            self._begin_window(now_s)
            return False
        self._is_measuring = False
        self._judge(rates)
        return True

    def _judge(self, rates: dict[Direction, float]) -> None:
        self.has_measured = True
        if self.before and not _pay(_gains(self.before.rates, rates)):
            self.wanted, self.is_settled = self.before.num_lanes, True
            return
        self.before = Measured(self._lanes, rates)
        self.wanted = min(2 * self._lanes, self._policy.max_lanes)
        self.is_settled = self.wanted == self._lanes

    def _knows(self, direction: Direction) -> bool:
        meter = self._meters[direction]
        is_long = meter.active_s >= self._policy.window_s and meter.num_frames >= FRAMES_PER_LANE * self._lanes
        return is_long and meter.num_bytes > 0  # empty chunks have no rate

    def _window_is_full(self, now_s: float) -> bool:
        if not any(self._knows(direction) for direction in Direction):
            return False
        # A slower direction, or one whose frames do not come over the new lanes yet, gets some more time. One that has
        # nothing to send, or a slow sender, is not waited for.
        is_late = now_s - self._window_begins_s > 3 * self._policy.window_s
        return is_late or all(
            (self._knows(way) and self._is_spread(way)) or not self._meters[way].is_moving for way in Direction
        )

    def _is_spread(self, direction: Direction) -> bool:
        return self.before is None or len(self._meters[direction].lanes) > self.before.num_lanes

    def _begin_window(self, begins_s: float) -> None:
        self._window_begins_s = begins_s
        for meter in self._meters:
            meter.restart()


def _gains(before: Mapping[Direction, float], after: Mapping[Direction, float]) -> list[float]:
    return [after[way] / before[way] for way in after.keys() & before.keys()]


def _pay(gains: list[float]) -> bool:
    return bool(gains) and max(gains) >= GAIN and min(gains) >= 1 / GAIN


def _disagree(gains: list[float]) -> bool:
    return bool(gains) and max(gains) >= GAIN and min(gains) < 1 / GAIN


@dataclass(slots=True)
class _Known:
    num_lanes: int
    quiet_swaps: int = 0  # how many more swaps take it as it is
    is_settled: bool = False
    before: Measured | None = None  # a trial of more was cut short: the next swap begins with it


class LaneMemory:
    """How many lanes the last swaps with each address needed. Forgotten slowly: every ninth swap tries from half."""

    def __init__(self, policy: LanePolicy) -> None:
        self._policy = policy
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def tuner(self, address: str, *, settle_s: float) -> ConnectionTuner:
        """For a swap that begins now."""
        known = self._known.get(address, _Known(1))
        start, is_trying, before = known.num_lanes, not known.quiet_swaps, known.before
        if known.quiet_swaps:
            known.quiet_swaps -= 1
        elif known.is_settled:  # a link may have become better, or worse
            start, known.quiet_swaps = max(1, start // 2), QUIET_SWAPS
        elif before:
            start, known.before = 2 * start, None  # once: this swap, too, may be too short
        return ConnectionTuner(self._policy, start=start, is_trying=is_trying, settle_s=settle_s, before=before)

    def num_lanes(self, address: str) -> int:
        """With how many the next swap begins, unless it is time to try."""
        return self._known[address].num_lanes if address in self._known else 1

    def learn(self, address: str, tuner: ConnectionTuner) -> None:
        """A swap has ended."""
        if not tuner.has_measured:
            return
        if tuner.is_settled:
            self._known[address] = _Known(tuner.wanted, QUIET_SWAPS, is_settled=True)
        elif tuner.before:
            self._known[address] = _Known(tuner.before.num_lanes, before=tuner.before)
        self._known.move_to_end(address)
        if len(self._known) > REMEMBERED_PEERS:
            self._known.popitem(last=False)
