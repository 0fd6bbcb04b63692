"""If `outer.inner_steps` is "auto", this module chooses the number of inner steps of each round.

The goal is the lowest loss after a given training time on this link. Short rounds come closest to synchronous training,
but training waits for the late part of each round, and also for the early part if its transfer takes longer than the
inner steps. `best_inner_steps` weighs the first wait against the loss, and `FILL` avoids the second wait.

The rounds of all peers converge to about the same duration, because each peer announces the shortest round that it can
keep up with, and faster peers take more steps per round. Callers supply the measurements of each round and the duration
of an inner step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from noloco_p2p.gossip.rate_estimators import cautious
from noloco_p2p.spec import OuterSpec

WINDOW_SWAPS = 7  # swaps in the window; a change in the link takes effect once four of them show it

# FILL is the fraction of a round that transfers may take during its inner steps. These transfers are the early part and
# whatever remains of the late part after the longest wait. Partners' boundaries can be 0.6 rounds apart
# (pairing.FAR_SHARE), so the partners' rounds overlap by 0.4 of a round. With a larger fraction, training also waits
# for partners and early parts, and solo rounds appear. Peers that never wait drift apart and have more solo rounds, so
# their fraction is smaller.
FILL = 0.4
FILL_UNWAITED = 1 / 3

# These constants fit the loss of the toy model: after n inner steps in rounds of H steps, the loss is proportional to
# n^-STEPS_EXPONENT (CURVE_START + H)^LENGTH_EXPONENT. The runs had 8 replicas, Muon, modulo coding with 8 bits, and
# int4. The root mean square error of the fit is 0.6 %.
STEPS_EXPONENT = 0.24
LENGTH_EXPONENT = 0.09
CURVE_START = 1.0

MAX_CHANGE = 1.5  # largest factor between one round's length and the next
STILL = 1.25  # changes by a smaller factor are skipped, so that noise alone does not change the length

# This replaces STILL if partners wait for each other. If one partner's rounds are longer by a quarter, the other
# partner waits for that quarter.
STILL_WAITING = 1.04

# All peers adapt to the slowest one that is not an outlier, because peers whose rounds have similar durations find each
# other without waiting. A peer that is far slower is an outlier and delays nobody. At most a third of all peers count
# as outliers.
SLOWEST = 4.0  # relative to the median
MAJORITY = 2 / 3

# A swap that is abandoned before it transfers anything is assumed to need this many times the elapsed time.
GIVEN_UP_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """The link measurements of one round's swap."""

    early_s: float  # duration of the early part at its measured rate
    late_s: float  # duration of the late part, once both partners were sending it
    is_whole: bool  # False if the boundary came before the early part was committed


def measure_link(
    *,
    early_bytes: int,
    late_bytes: int,
    moved_bytes: int,
    elapsed_s: float,
    late_s: float | None,
    is_whole: bool,
) -> LinkMeasure:
    """Convert the counters of a swap to seconds.

    `early_bytes` and `late_bytes` are the payload sizes of the two parts in one direction. `moved_bytes` is the number
    of bytes transferred in the slower direction during the early part, which lasted `elapsed_s` seconds. `late_s` is
    the measured duration of the late part. If it is None, because the late part was not committed, the duration is
    estimated from the part's size and the rate of the early part.
    """
    early_s = elapsed_s * (early_bytes / moved_bytes if moved_bytes else GIVEN_UP_FACTOR)
    if late_s is None:
        late_s = early_s * late_bytes / early_bytes
    return LinkMeasure(early_s, late_s, is_whole)


def best_inner_steps(wait_steps: float) -> float:
    """Return the round length H that leads to the lowest loss after a given training time.

    Each round is assumed to end with a wait of w inner steps. Because of the wait, an inner step takes 1 + w / H times
    as long, and fewer steps fit into the training time. The loss is then proportional to (c + H)^a (1 + w / H)^p, where
    a is LENGTH_EXPONENT, p is STEPS_EXPONENT and c is CURVE_START. The derivative of this expression is zero where a
    H^2 - (p - a) w H - p c w = 0. For long waits, H approaches (p / a - 1) w, independently of c.
    """
    gain = (STEPS_EXPONENT - LENGTH_EXPONENT) * wait_steps
    root = math.sqrt(gain**2 + 4 * LENGTH_EXPONENT * STEPS_EXPONENT * CURVE_START * wait_steps)
    return (gain + root) / (2 * LENGTH_EXPONENT)


class RoundLength:
    """Chooses the length of each round. `inner_steps` is the current length. A fixed length never changes."""

    def __init__(
        self, outer: OuterSpec, *, first_inner_steps: int | None = None, max_wait_s: float | None = None
    ) -> None:
        """Set the length of the first round and the longest wait at a boundary.

        If `first_inner_steps` is None, `outer.first_inner_steps` is used, regardless of the length of the run. If
        `max_wait_s` is None, `outer.max_wait_s` is used, which applies to swaps with a late part.
        """
        self.inner_steps = first_inner_steps or outer.first_inner_steps
        self._outer = outer
        self._max_wait_s = outer.max_wait_s if max_wait_s is None else max_wait_s
        self._beside_s: deque[float] = deque(maxlen=WINDOW_SWAPS)  # durations of transfers during the inner steps
        self._waits_s: deque[float] = deque(maxlen=WINDOW_SWAPS)  # waits at the boundary
        self._given_up_s: deque[float] = deque(maxlen=2)  # the same, for swaps abandoned since the last complete one

    def resume(self, inner_steps: int) -> None:
        """Continue with the length from a checkpoint. Measurements are not restored."""
        if self._outer.is_auto:
            self.inner_steps = self._bounded(inner_steps)

    def note(self, link: LinkMeasure) -> None:
        """Record the measurement of a round. An abandoned swap provides only a lower bound on the transfer time."""
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
        """Return the length of the round that begins now. The length does not change until a swap has been measured.

        `others_s` holds the durations of the shortest rounds that other peers have announced (see `told_s`).
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
        """Return the duration to announce to other peers, or None if it is unmeasured or the length is fixed."""
        return self.shortest_s(seconds_per_step) if self._outer.is_auto and seconds_per_step else None

    def shortest_s(self, seconds_per_step: float) -> float:
        """Return the duration of the shortest round that suits this peer's link and speed, in seconds."""
        best = best_inner_steps(cautious(self._waits_s) / seconds_per_step)
        return max(self.needed_s(), max(best, self._outer.min_inner_steps) * seconds_per_step)

    def needed_s(self) -> float:
        """Return the duration of the shortest round into which the transfers fit, or 0 before the first measurement.

        Two abandoned swaps in a row affect the result at once, because each of them has cost a round.
        """
        is_too_short = len(self._given_up_s) == self._given_up_s.maxlen
        beside_s = max(cautious(self._beside_s), min(self._given_up_s) if is_too_short else 0.0)
        return beside_s / (FILL if self._max_wait_s else FILL_UNWAITED)

    def _nearer_to(self, wanted: int) -> int:
        """Return the length moved towards `wanted`, by a factor of at most MAX_CHANGE but by at least one step."""
        now = self.inner_steps
        if wanted > now:
            return min(wanted, max(now + 1, math.floor(now * MAX_CHANGE)))
        return max(wanted, min(now - 1, math.ceil(now / MAX_CHANGE)))

    def _bounded(self, inner_steps: int) -> int:
        return min(max(inner_steps, self._outer.min_inner_steps), self._outer.max_inner_steps)


def usual_s(shortest_s: Sequence[float]) -> float:
    """Return the duration that all rounds should have, given the shortest round that each peer can keep up with.

    `shortest_s` includes this peer's own value. The actual durations are not taken into account, because otherwise
    rounds that are too long for every peer would never become shorter.
    """
    ordered = sorted(shortest_s)
    most = ordered[math.ceil(MAJORITY * len(ordered)) - 1]
    return max(most, *(each for each in ordered if each <= SLOWEST * median_low(ordered)))
