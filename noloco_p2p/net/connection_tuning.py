"""Tune the number of connections of a swap by hill climbing on its throughput. No constant here depends on the link.

The number doubles as long as that raises the throughput. If packet loss limits a TCP stream, two streams carry nearly
twice as much. A saturated link carries no more, however many streams there are. Each direction is judged separately.
Because the frames of a new connection wait behind the backlog of the others, a trial that makes one direction faster
and the other slower is measured once more. The result is remembered for the next swap with the same peer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

GAIN = 1.2  # a trial pays if one direction gets this much faster, and the other does not get this much slower
# Minimum number of frames per direction in a window; at 2 Mbit/s, one connection needs two seconds for them.
FRAMES_PER_CONNECTION = 2
MAX_SETTLE_S = 5.0
REMEMBERED_PEERS = 256
QUIET_SWAPS = 8  # the number of swaps that use a result before another trial


class Direction(IntEnum):
    SENT = 0
    RECEIVED = 1


@dataclass(frozen=True, slots=True)
class ConnectionPolicy:
    """The limits of the tuning.

    `max_connections` is the maximum number of connections of one swap. With 1, there is never a second connection.
    `window_s` is the shortest time over which a rate is measured.
    """

    max_connections: int = 8
    window_s: float = 1.5


class _Meter:
    """A meter of the throughput in one direction during a window. The time between sections does not count, because no
    data is due then.
    """

    def __init__(self) -> None:
        self.num_bytes = self.num_frames = 0
        self.active_s = 0.0
        self.connections: set[int] = set()
        self._last_s: float | None = None

    @property
    def is_moving(self) -> bool:
        return self._last_s is not None

    def moved(self, num_bytes: int, now_s: float, *, connection: int) -> None:
        self.connections.add(connection)
        if self._last_s is not None:  # the time before the first frame was not measured
            self.num_bytes += num_bytes
            self.num_frames += 1
            self.active_s += now_s - self._last_s
        self._last_s = now_s

    def pause(self) -> None:
        self._last_s = None

    def restart(self) -> None:
        self.connections.clear()
        self.num_bytes = self.num_frames = 0
        self.active_s = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    num_connections: int
    rates: Mapping[Direction, float]  # bytes per second


class ConnectionTuner:
    """A tuner for the number of connections of one swap. Callers supply the current time as an argument.

    The caller opens or closes connections until their number is `wanted`, and then calls `in_place`. `moved` returns
    whether `wanted` has changed. A new TCP stream needs many round trips to reach its full rate, so the first
    `settle_s` are not measured. If an earlier swap began the trial with `start` connections, `before` is the
    measurement that preceded it.
    """

    def __init__(
        self, policy: ConnectionPolicy, *, start: int, is_trying: bool, settle_s: float, before: Measured | None = None
    ) -> None:
        self.wanted = min(start, policy.max_connections)
        self.is_settled = not is_trying or policy.max_connections == 1
        self.has_measured = False
        self.before = before
        self._policy = policy
        self._settle_s = min(settle_s, MAX_SETTLE_S)
        self._meters = (_Meter(), _Meter())
        self._connections = 1
        self._window_begins_s = 0.0
        self._is_measuring = False
        self._is_repeated = False

    def in_place(self, num_connections: int, now_s: float) -> None:
        """Report how many connections are open now. There can be fewer than wanted, because the partner may have
        refused some.
        """
        if num_connections < self.wanted:
            self.wanted = num_connections
            self.is_settled = self.is_settled or self.before is None or num_connections <= self.before.num_connections
        self._connections = num_connections
        self._is_measuring = not self.is_settled
        self._is_repeated = False
        self._begin_window(now_s + self._settle_s)

    def pause(self, direction: Direction) -> None:
        """Report that a section in this direction is beginning or has ended."""
        self._meters[direction].pause()

    def moved(self, direction: Direction, num_bytes: int, now_s: float, *, connection: int) -> bool:
        """Report that a frame was sent or received on the connection with this number.

        The result is whether `wanted` or `is_settled` has changed.
        """
        if not self._is_measuring:
            return False
        if now_s < self._window_begins_s:
            self._meters[direction].pause()
            return False
        self._meters[direction].moved(num_bytes, now_s, connection=connection)
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
            self.wanted, self.is_settled = self.before.num_connections, True
            return
        self.before = Measured(self._connections, rates)
        self.wanted = min(2 * self._connections, self._policy.max_connections)
        self.is_settled = self.wanted == self._connections

    def _knows(self, direction: Direction) -> bool:
        meter = self._meters[direction]
        is_long = (
            meter.active_s >= self._policy.window_s and meter.num_frames >= FRAMES_PER_CONNECTION * self._connections
        )
        return is_long and meter.num_bytes > 0  # empty chunks have no rate

    def _window_is_full(self, now_s: float) -> bool:
        if not any(self._knows(direction) for direction in Direction):
            return False
        # A direction gets more time if it is slower, or if its frames do not use the new connections yet. Nothing waits
        # for a direction without data, and the wait for a slow direction is limited.
        is_late = now_s - self._window_begins_s > 3 * self._policy.window_s
        return is_late or all(
            (self._knows(way) and self._is_spread(way)) or not self._meters[way].is_moving for way in Direction
        )

    def _is_spread(self, direction: Direction) -> bool:
        return self.before is None or len(self._meters[direction].connections) > self.before.num_connections

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
    num_connections: int
    quiet_swaps: int = 0  # the number of further swaps that use it unchanged
    is_settled: bool = False
    # Set if a trial with more connections was interrupted; the next swap repeats the trial.
    before: Measured | None = None


class ConnectionMemory:
    """A memory of the number of connections that worked best for each address.

    Every ninth swap starts with half that number, because the link may have changed.
    """

    def __init__(self, policy: ConnectionPolicy) -> None:
        self._policy = policy
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def tuner(self, address: str, *, settle_s: float) -> ConnectionTuner:
        """Return the tuner for a swap that begins now."""
        known = self._known.get(address, _Known(1))
        start, is_trying, before = known.num_connections, not known.quiet_swaps, known.before
        if known.quiet_swaps:
            known.quiet_swaps -= 1
        elif known.is_settled:  # the link may have become better or worse
            start, known.quiet_swaps = max(1, start // 2), QUIET_SWAPS
        elif before:
            start, known.before = 2 * start, None  # only once, because this swap may also be too short
        return ConnectionTuner(self._policy, start=start, is_trying=is_trying, settle_s=settle_s, before=before)

    def num_connections(self, address: str) -> int:
        """Return the number of connections with which the next swap begins, unless a trial is due."""
        return self._known[address].num_connections if address in self._known else 1

    def learn(self, address: str, tuner: ConnectionTuner) -> None:
        """Remember the result of a swap."""
        if not tuner.has_measured:
            return
        if tuner.is_settled:
            self._known[address] = _Known(tuner.wanted, QUIET_SWAPS, is_settled=True)
        elif tuner.before:
            self._known[address] = _Known(tuner.before.num_connections, before=tuner.before)
        self._known.move_to_end(address)
        if len(self._known) > REMEMBERED_PEERS:
            self._known.popitem(last=False)
