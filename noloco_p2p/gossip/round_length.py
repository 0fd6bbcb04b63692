"""How many inner steps the next round takes: as few as the link carries, for `outer.inner_steps = "auto"`.

Pure: no clock, no network. It is told what each round measured and how long an inner step takes. Short rounds come
nearest to synchronous training, and a swap in the background costs the accelerator nothing, so a peer swaps as often as
the swap of a round fits into the round, with room to spare. Rounds of all peers come to last about as long: each tells
its partners the shortest that it can keep up with, and a faster one takes more steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from noloco_p2p.gossip.rate_estimators import cautious
from noloco_p2p.spec import OuterSpec

WINDOW_SWAPS = 7  # remembered; a change of the link is believed when it has shown in four of them

# Share of a round that its swap may take. Partners' boundaries may be 0.6 rounds apart (pairing.FAR_SHARE): 0.4 of a
# round is then common to both, and of that a partner has to be found, too.
FILL = 1 / 3

# Share of the time that training may stand still for late parts where it waits for them. Twice as many swaps are worth
# some per cent of the loss (docs/results.md), a twentieth of the inner steps less than one.
BLOCKED_SHARE = 0.05

MAX_CHANGE = 1.5  # factor from one round to the next
STILL = 1.25  # a smaller factor is not worth a change: noise alone must not move the length

STILL_WAITING = 1.04  # where partners wait for each other, rounds that differ by a quarter cost the shorter a quarter

# All peers go by the slowest that is not far slower than the others: peers whose rounds last about as long find each
# other, and need not wait. One that is far slower drags nobody; two peers, or a third of all, are nobody's exception.
SLOWEST = 4.0  # times the median
MAJORITY = 2 / 3

GIVEN_UP_FACTOR = 2.0  # a swap that moved nothing until it was given up would have taken at least so many times longer


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """What the swap of one round told about the link."""

    swap_s: float  # for all bytes of a round, at the rate at which they moved
    late_s: float  # for the late part of them, once both sides were sending it
    is_whole: bool  # False: the boundary came before the early part was committed


def measure_link(
    *,
    round_bytes: int,
    late_bytes: int,
    moved_bytes: int,
    elapsed_s: float,
    late_s: float | None,
    is_whole: bool,
) -> LinkMeasure:
    """From counters to seconds.

    round_bytes, late_bytes: payload of a whole swap and of its late part, one way. moved_bytes, elapsed_s: what this
    peer moved while the early part travelled, in the slower direction and in all of its swaps together, and how long
    that took. late_s: measured, or None when the late part was not committed; its bytes and the rate then tell.
    """
    swap_s = elapsed_s * (round_bytes / moved_bytes if moved_bytes else GIVEN_UP_FACTOR)
    if late_s is None:
        late_s = swap_s * late_bytes / round_bytes
    return LinkMeasure(swap_s, late_s, is_whole)


class RoundLength:
    """Chooses the length of each round; `inner_steps` is that of the round of now. A fixed one never changes."""

    def __init__(
        self, outer: OuterSpec, *, first_inner_steps: int | None = None, max_wait_s: float | None = None
    ) -> None:
        """first_inner_steps: None = `outer.first_inner_steps`, whatever the length of the run is. max_wait_s: of a
        boundary; None = `outer.max_wait_s`, as in a run whose swaps have a late part."""
        self.inner_steps = first_inner_steps or outer.first_inner_steps
        self._outer = outer
        self._max_wait_s = outer.max_wait_s if max_wait_s is None else max_wait_s
        self._swaps_s: deque[float] = deque(maxlen=WINDOW_SWAPS)
        self._blocked_s: deque[float] = deque(maxlen=WINDOW_SWAPS)
        self._given_up_s: deque[float] = deque(maxlen=2)  # without a whole one since

    def resume(self, inner_steps: int) -> None:
        """Go on with the length that a checkpoint tells; what was measured before it is measured anew."""
        if self._outer.is_auto:
            self.inner_steps = self._bounded(inner_steps)

    def note(self, link: LinkMeasure) -> None:
        """A round ended. What a swap that was given up early seems to say tells only how long it takes at least."""
        if link.is_whole:
            self._given_up_s.clear()
        if link.is_whole or link.swap_s > cautious(self._swaps_s):
            self._swaps_s.append(link.swap_s)
            self._blocked_s.append(min(link.late_s, self._max_wait_s))
            if not link.is_whole:
                self._given_up_s.append(link.swap_s)

    def next(self, seconds_per_step: float | None, *, others_s: Sequence[float] = ()) -> int:
        """The length of the round that begins now; that of the last one while nothing is measured.

        others_s: the shortest rounds of other peers, as they told them (their `shortest_s`).
        """
        if self._outer.is_auto and seconds_per_step and (self._swaps_s or others_s):
            own_s = self.shortest_s(seconds_per_step)
            target_s = max(own_s, usual_s([own_s, *(each for each in others_s if each > 0)]))
            wanted = self._bounded(math.ceil(min(target_s / seconds_per_step, self._outer.max_inner_steps)))
            still = STILL_WAITING if self._max_wait_s else STILL
            if not 1 / still <= wanted / self.inner_steps <= still:
                self.inner_steps = self._nearer_to(wanted)
        return self.inner_steps

    def told_s(self, seconds_per_step: float | None) -> float | None:
        """What other peers are told; None while it is not measured, and where rounds have a fixed length."""
        return self.shortest_s(seconds_per_step) if self._outer.is_auto and seconds_per_step else None

    def shortest_s(self, seconds_per_step: float) -> float:
        """The shortest round that this peer can keep up with: its link's, and its speed's."""
        return max(self.needed_s(), self._outer.min_inner_steps * seconds_per_step)

    def needed_s(self) -> float:
        """The shortest round that the own link carries; 0 while nothing is measured.

        Two swaps in a row that were given up are believed at once, as each has cost a round.
        """
        is_too_short = len(self._given_up_s) == self._given_up_s.maxlen
        swap_s = max(cautious(self._swaps_s), min(self._given_up_s) if is_too_short else 0.0)
        return max(swap_s / FILL, cautious(self._blocked_s) * (1 - BLOCKED_SHARE) / BLOCKED_SHARE)

    def _nearer_to(self, wanted: int) -> int:
        """At most MAX_CHANGE away from now, but at least one step."""
        now = self.inner_steps
        if wanted > now:
            return min(wanted, max(now + 1, math.floor(now * MAX_CHANGE)))
        return max(wanted, min(now - 1, math.ceil(now / MAX_CHANGE)))

    def _bounded(self, inner_steps: int) -> int:
        return min(max(inner_steps, self._outer.min_inner_steps), self._outer.max_inner_steps)


def usual_s(shortest_s: Sequence[float]) -> float:
    """How long rounds should last in a swarm whose peers, this one too, can keep up with these at the shortest.

    Nobody's own rounds enter, so that rounds which are too long for everybody do not keep themselves alive.
    """
    ordered = sorted(shortest_s)
    most = ordered[math.ceil(MAJORITY * len(ordered)) - 1]
    return max(most, *(each for each in ordered if each <= SLOWEST * median_low(ordered)))
