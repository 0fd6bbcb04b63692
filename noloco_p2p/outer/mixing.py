"""Take part in the swaps of one replica, and take its outer steps. This module uses no network and never waits.

`NoLoCo` runs it on the training thread, and a simulated replica on a virtual clock:

    step_taken   ->   apply   ->   in a run with an outer step, after every `outer.inner_steps`: outer_step
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from noloco_p2p.gossip.exchange import Committed, Exchange
from noloco_p2p.outer.position import PartnerPositions, next_progress
from noloco_p2p.outer.weights import Weights
from noloco_p2p.peer_name import named
from noloco_p2p.spec import OuterSpec, Spec
from noloco_p2p.telemetry.console import percent
from noloco_p2p.telemetry.metrics import Metrics

SMOOTHING = 0.1  # weight of a new swap in the metrics
MOST_APART = 2.0  # that counts: the distance of opposite vectors, relative to their length; liars can be anywhere
CLOSING_MORE = 3  # mixings after log2(N), which reduce what is left of the squared distance to an eighth
ANSWERING_S = 3.0  # without an offer, after which a peer that needs no more closing swaps stops answering
ANSWERING_TIMES = 10  # times as long as its own closing swaps took, it answers at most


@dataclass(frozen=True, slots=True)
class Swapped:
    """A swap whose half-differences have been added to the weights.

    `share` is the part of the weights that it carried. `age_steps` is the number of inner steps since the snapshot.
    `distance` is the root mean square of the differences to the partner, relative to that of recent slices.
    """

    partner: str
    share: float
    age_steps: int
    seconds: float
    distance: float

    def __str__(self) -> str:
        age = f"{self.age_steps} steps old"
        return f"swapped {percent(self.share)} of the weights with {named(self.partner)} in {self.seconds:.2g} s, {age}"


class Mixing:
    """The outer optimizer of one replica.

    `clock` returns seconds, and `cpu_clock` the CPU time of this thread. If `follows_caller` is true, the caller sets
    `progress`, and inner steps and swaps do not change it.
    """

    def __init__(
        self,
        spec: Spec,
        weights: Weights,
        exchange: Exchange,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        follows_caller: bool = False,
    ) -> None:
        self.exchange = exchange
        self.follows_caller = follows_caller
        self.steps = 0  # inner steps since the last outer step
        self._spec = spec
        self._weights = weights
        self._metrics = metrics
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._positions = PartnerPositions()
        self._steps_taken = 0
        self._mean_square: float | None = None  # of the weights in recent slices
        self._connect()

    @property
    def progress(self) -> float:
        """The completed fraction of the run's schedule."""
        return self.exchange.progress

    @progress.setter
    def progress(self, progress: float) -> None:
        self.exchange.progress = progress

    def restart(self, *, progress: float, steps: int = 0) -> None:
        """Continue from a new position in the run, after the weights have been replaced."""
        self._positions = PartnerPositions()
        self.progress, self.steps = progress, steps

    def begin_again(self, exchange: Exchange) -> None:
        """Continue from the position of a new exchange, which carries no swaps of the old weights."""
        self.exchange = exchange
        self._connect()
        self.restart(progress=exchange.progress)

    def _connect(self) -> None:
        exchange, weights = self.exchange, self._weights
        if weights.parameters.is_readable_anywhere:
            exchange.read = weights.read
        exchange.judge = lambda coding, partner: weights.filter.judge(coding, partner, is_at_rest=exchange.is_at_rest)
        exchange.codes_beside = weights.is_on_accelerator

    def step_taken(self) -> None:
        """Count an inner step."""
        self.exchange.step_taken(self._clock())
        self.steps += 1
        self._steps_taken += 1
        if not self.follows_caller:
            self.progress = next_progress(self.progress, self._spec.schedule_steps)

    @property
    def is_due(self) -> bool:
        """Return whether an outer step is due. With `outer.wait`, wait for a swap first, and apply it."""
        outer = self._spec.outer
        return outer.has_outer_step and self.steps >= outer.inner_steps

    def outer_step(self) -> None:
        self._weights.outer_step()
        self.steps = 0

    def apply(self) -> list[Swapped]:
        """Add the half-differences that have arrived to the weights, and give the network what it asks for."""
        swapped = [self._apply(swap) for swap in self.exchange.collect()]
        self.exchange.serve(self._weights.read)
        return swapped

    def rest(self) -> None:
        """Begin the closing swaps, after the last inner step."""
        self.exchange.is_at_rest = True
        self.exchange.ages.rest()

    def missing_mixings(self) -> int:
        """Return how often some part of the weights must still be mixed in closing swaps."""
        wanted = closing_mixings(self._spec.outer, self.exchange.num_live())
        return max(0, wanted - self.exchange.ages.least_mixings)

    def _apply(self, swap: Committed) -> Swapped:
        began_s, exchange, halves = self._cpu_clock(), self.exchange, swap.halves
        age_steps = exchange.step - swap.snapshot_step
        self._weights.add(swap.start, halves.values)
        share = len(halves.values) / self._weights.num_swapped
        if exchange.is_at_rest:
            exchange.step += 1
        elif not self.follows_caller:
            total, told = self._spec.schedule_steps, self._steps_taken - (exchange.step - swap.told_step)
            trained = self._steps_taken / total
            self._positions.note(swap.partner, swap.progress, trained=told / total)
            self.progress = self._positions.move(self.progress, trained=trained, share=share, num_live=swap.num_live)
        self._mean_square = _smoothed(self._mean_square, halves.magnitude**2)
        usual = math.sqrt(self._mean_square or 1.0)
        distance = halves.distance / usual
        exchange.applied(swap, seconds=self._cpu_clock() - began_s)
        metrics = self._metrics
        metrics.apart = _smoothed(metrics.apart, min(distance, MOST_APART) / math.sqrt(2))
        metrics.age_steps = _smoothed(metrics.age_steps, age_steps)
        metrics.judged_pieces += halves.num_pieces
        metrics.clipped_pieces += halves.num_clipped
        metrics.last_partner, metrics.moved = swap.partner, halves.moved / usual
        return Swapped(swap.partner, share, age_steps, swap.seconds, distance)


class Closing:
    """The closing swaps of one replica, which begin at `now_s`, and end if there is none for `wait_s`.

    A peer that needs no more of them answers the offers of others, because pairs that finish first would otherwise
    leave nobody for the last peer. It does not answer for ever, because a liar may never have enough.
    """

    def __init__(self, mixing: Mixing, now_s: float, *, wait_s: float) -> None:
        mixing.rest()
        self._mixing = mixing
        self._wait_s = wait_s if mixing.missing_mixings() else 0.0
        self._began_s = self._swapped_s = now_s
        self._until_s = math.inf

    def is_over(self, now_s: float) -> bool:
        exchange = self._mixing.exchange
        wait_s = min(self._wait_s, ANSWERING_S) if exchange.only_answers else self._wait_s
        return not exchange.has_partners() or now_s >= min(self._swapped_s + wait_s, self._until_s)

    def note(self, now_s: float, *, has_swapped: bool) -> None:
        """Note whether swaps have been applied since the last call."""
        if has_swapped:
            self._swapped_s = now_s
        self._mixing.exchange.only_answers = has_enough = not self._mixing.missing_mixings()
        if has_enough:
            most_s = max(self._wait_s, ANSWERING_TIMES * (now_s - self._began_s))
            self._until_s = min(self._until_s, now_s + most_s)


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)


def closing_mixings(outer: OuterSpec, num_peers: int) -> int:
    """Return how often each part of the weights is mixed in closing swaps.

    Each mixing halves the squared distance of randomly paired peers from their mean. After log2 N mixings, 1 / N of it
    is left, and `CLOSING_MORE` mixings reduce it to an eighth of that.
    """
    if num_peers < 2:
        return 0
    return math.ceil(math.log2(num_peers)) + CLOSING_MORE if outer.closing_mixings == "auto" else outer.closing_mixings
