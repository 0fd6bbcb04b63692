"""The number of inner steps of the next round with `outer.inner_steps = "auto"`: the one with the lowest loss in equal
time on this link.

Pure: no clock, no network. Callers pass what each round measured and how long an inner step takes. Short rounds come
closest to synchronous training, but training waits for the late part of each round, and also for the early part if it
does not fit into the inner steps. `best_inner_steps` weighs the first wait against the loss, and `FILL` avoids the
second one. The rounds of all peers converge to about the same duration: each peer announces the shortest round that it
can keep up with, and a faster peer takes more steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from noloco_p2p.gossip.rate_estimators import cautious
from noloco_p2p.spec import OuterSpec

WINDOW_SWAPS = 7  # swaps in the window; a change of the link counts once it shows in four of them

# The share of a round for transfers during its inner steps: the early part, and the rest of the late part after the
# longest wait. Partners' boundaries may be 0.6 rounds apart (pairing.FAR_SHARE), so 0.4 of a round is common to both.
# With more, training also waits for partners and for early parts, and solo rounds begin
# (benchmarks/results/round_lengths.txt). Peers that never wait drift apart, and have more solo rounds.
FILL = 0.4
FILL_UNWAITED = 1 / 3

# The loss of the toy: a schedule of n inner steps in rounds of H ends at a loss that is proportional to
# n^-STEPS_EXPONENT (CURVE_START + H)^LENGTH_EXPONENT. benchmarks/study/round_lengths.py fits it to 8 replicas with
# Muon, modulo8 and int4; the error of the fit is in benchmarks/results/round_lengths.txt.
STEPS_EXPONENT = 0.24
LENGTH_EXPONENT = 0.09
CURVE_START = 1.0

MAX_CHANGE = 1.5  # factor from one round to the next
STILL = 1.25  # a smaller factor is not worth a change: noise alone must not move the length

STILL_WAITING = 1.04  # if partners wait for each other, rounds that differ by a quarter cost the shorter one a quarter

# All peers follow the slowest one that is not far slower than the others, because peers whose rounds last about as long
# find each other without waiting. A far slower peer delays nobody; two peers, or a third of all, are never outliers.
SLOWEST = 4.0  # times the median
MAJORITY = 2 / 3

# a swap that moved nothing until it was given up would have taken at least this many times longer
GIVEN_UP_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """What the swap of one round measured of the link."""

    early_s: float  # for the early part, at the rate at which it moved
    late_s: float  # for the late part, once both sides were sending it
    is_whole: bool  # False: the boundary came before the early part was committed


def measure_link(
    *,
    early_bytes: int,
    late_bytes: int,
    moved_bytes: int,
    elapsed_s: float,
    late_s: float | None,
    is_whole: bool,
) -> LinkMeasure:
    """Convert counters to seconds.

    early_bytes, late_bytes: payload of both parts, one way. moved_bytes, elapsed_s: what this peer moved while the
    early part travelled, in the slower direction and in all of its swaps together, and how long that took. late_s:
    measured, or None when the late part was not committed; then it follows from its bytes and the rate.
    """
    early_s = elapsed_s * (early_bytes / moved_bytes if moved_bytes else GIVEN_UP_FACTOR)
    if late_s is None:
        late_s = early_s * late_bytes / early_bytes
    return LinkMeasure(early_s, late_s, is_whole)


def best_inner_steps(wait_steps: float) -> float:
    """The round length H with the lowest loss in equal time, if each round ends with a wait of w inner steps.

    An inner step takes 1 + w / H times as long, so fewer of them fit, and the loss in equal time is proportional to
    (c + H)^a (1 + w / H)^p. Its derivative is zero where a H^2 - (p - a) w H - p c w = 0. a, p, c: LENGTH_EXPONENT,
    STEPS_EXPONENT, CURVE_START. For long waits H approaches (p / a - 1) w, independently of c.
    """
    gain = (STEPS_EXPONENT - LENGTH_EXPONENT) * wait_steps
    root = math.sqrt(gain**2 + 4 * LENGTH_EXPONENT * STEPS_EXPONENT * CURVE_START * wait_steps)
    return (gain + root) / (2 * LENGTH_EXPONENT)


class RoundLength:
    """Chooses the length of each round; `inner_steps` is that of the current one. A fixed length never changes."""

    def __init__(
        self, outer: OuterSpec, *, first_inner_steps: int | None = None, max_wait_s: float | None = None
    ) -> None:
        """first_inner_steps: None = `outer.first_inner_steps`, regardless of the length of the run.

        max_wait_s: of a boundary; None = `outer.max_wait_s`, as in a run whose swaps have a late part.
        """
        self.inner_steps = first_inner_steps or outer.first_inner_steps
        self._outer = outer
        self._max_wait_s = outer.max_wait_s if max_wait_s is None else max_wait_s
        self._beside_s: deque[float] = deque(maxlen=WINDOW_SWAPS)  # transfers during the inner steps
        self._waits_s: deque[float] = deque(maxlen=WINDOW_SWAPS)  # at the boundary
        self._given_up_s: deque[float] = deque(maxlen=2)  # since the last complete swap

    def resume(self, inner_steps: int) -> None:
        """Continue with the length in a checkpoint; earlier measurements are not kept."""
        if self._outer.is_auto:
            self.inner_steps = self._bounded(inner_steps)

    def note(self, link: LinkMeasure) -> None:
        """Record the measurement of a round. A swap that was given up only gives a lower bound."""
        wait_s = min(link.late_s, self._max_wait_s)
        beside_s = link.early_s + link.late_s - wait_s
        if link.is_whole:
            self._given_up_s.clear()
        if link.is_whole or beside_s > cautious(self._beside_s):
            self._beside_s.append(beside_s)
            self._waits_s.append(wait_s)
            if not link.is_whole:
                self._given_up_s.append(beside_s)

    def next(self, seconds_per_step: float | None, *, others_s: Sequence[float] = ()) -> int:
        """The length of the round that begins now; the last one while nothing is measured.

        others_s: the shortest rounds that other peers announced (their `shortest_s`).
        """
        if self._outer.is_auto and seconds_per_step and (self._beside_s or others_s):
            own_s = self.shortest_s(seconds_per_step)
            target_s = max(own_s, usual_s([own_s, *(each for each in others_s if each > 0)]))
            wanted = self._bounded(math.ceil(min(target_s / seconds_per_step, self._outer.max_inner_steps)))
            still = STILL_WAITING if self._max_wait_s else STILL
            if not 1 / still <= wanted / self.inner_steps <= still:
                self.inner_steps = self._nearer_to(wanted)
        return self.inner_steps

    def told_s(self, seconds_per_step: float | None) -> float | None:
        """The value announced to other peers; None while it is not measured, and for rounds of a fixed length."""
        return self.shortest_s(seconds_per_step) if self._outer.is_auto and seconds_per_step else None

    def shortest_s(self, seconds_per_step: float) -> float:
        """The shortest round that suits this peer's link and speed."""
        best = best_inner_steps(cautious(self._waits_s) / seconds_per_step)
        return max(self.needed_s(), max(best, self._outer.min_inner_steps) * seconds_per_step)

    def needed_s(self) -> float:
        """The shortest round into which the transfers fit; 0 while nothing is measured.

        Two swaps in a row that were given up count at once, because each has cost a round.
        """
        is_too_short = len(self._given_up_s) == self._given_up_s.maxlen
        beside_s = max(cautious(self._beside_s), min(self._given_up_s) if is_too_short else 0.0)
        return beside_s / (FILL if self._max_wait_s else FILL_UNWAITED)

    def _nearer_to(self, wanted: int) -> int:
        """Move towards `wanted`, by at most MAX_CHANGE, but at least one step."""
        now = self.inner_steps
        if wanted > now:
            return min(wanted, max(now + 1, math.floor(now * MAX_CHANGE)))
        return max(wanted, min(now - 1, math.ceil(now / MAX_CHANGE)))

    def _bounded(self, inner_steps: int) -> int:
        return min(max(inner_steps, self._outer.min_inner_steps), self._outer.max_inner_steps)


def usual_s(shortest_s: Sequence[float]) -> float:
    """How long rounds should last in a swarm whose peers, including this one, can keep up with these at the shortest.

    Actual rounds are not an input, so that rounds which are too long for everybody do not perpetuate themselves.
    """
    ordered = sorted(shortest_s)
    most = ordered[math.ceil(MAJORITY * len(ordered)) - 1]
    return max(most, *(each for each in ordered if each <= SLOWEST * median_low(ordered)))
