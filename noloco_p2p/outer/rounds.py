"""Run the rounds of one replica. This module uses no network and never waits.

The methods of `Rounds` are called in this order:

    open  ->  step_taken after each step until it returns True  ->  reach_boundary  ->  poll until the end  ->  open

`NoLoCo` blocks between polls, and a simulated replica sleeps on its virtual clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, Outcome, Received
from noloco_p2p.gossip.round_length import RoundLength
from noloco_p2p.outer.progress import PartnerPositions, next_progress, swap_progress
from noloco_p2p.spec import Spec


class Vectors(Protocol):
    """The vectors that a round sends. `OuterState` implements them."""

    def sections(self) -> dict[SectionName, Tensor]:
        """Return flat fp32 vectors on the CPU, which have the same size and do not change during a round."""
        ...

    def outer_gradient(self) -> Iterable[Tensor]:
        """Yield the outer gradient, fast - slow, chunk by chunk."""
        ...


class OuterStep(Protocol):
    """The interface through which a round takes its outer step. `UpdateFilter` implements it."""

    def step(self, outcome: Outcome, *, is_closing: bool) -> tuple[Outcome, bool]:
        """Take the outer step.

        Returns the outcome that was applied, and whether this peer's weights were non-finite.
        """
        ...

    def correct(self, correction: Correction) -> None:
        """Apply a late part that arrived after its boundary."""
        ...


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The end of one round.

    `round` is the index of the round. `swap_progress` is the progress of the swap, which is the same for both partners.
    Without a swap, it is the progress of this replica. `boundary_s` is the time spent at the boundary. `diverged` says
    whether this replica's weights were non-finite.
    """

    round: int
    outcome: Outcome
    swap_progress: float
    boundary_s: float
    diverged: bool


class Rounds:
    """The sequence of rounds of one replica.

    `steps` is the number of inner steps taken in the current round. If `follows_caller` is true, the caller sets
    `progress`, and inner steps and swaps do not change it. `clock` returns seconds and must be the clock of the
    exchange's step rate.
    """

    def __init__(
        self,
        spec: Spec,
        exchange: Exchange,
        vectors: Vectors,
        outer_step: OuterStep,
        *,
        follows_caller: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.exchange = exchange
        self.length = RoundLength(spec.outer, first_inner_steps=spec.first_inner_steps, max_wait_s=spec.boundary_wait_s)
        self.follows_caller = follows_caller
        self.progress = 0.0  # fraction of the run's schedule, which determines the learning rate
        self.round = 0
        self.steps = 0
        self.is_open = False
        self._is_closing = False
        self._vectors = vectors
        self._outer_step = outer_step
        self._partners = PartnerPositions()
        self._steps_taken = 0  # inner steps of all rounds
        self._clock = clock
        self._boundary_s: float | None = None  # when the boundary was reached; None before that
        self._until_s = 0.0

    @property
    def inner_steps(self) -> int:
        """Return the length of the current round in inner steps."""
        return self.length.inner_steps

    @property
    def is_at_boundary(self) -> bool:
        """Return whether the round waits for `poll`. No inner step may be completed until the round has ended."""
        return self._boundary_s is not None

    def open(self, *, patience_s: float = 0.0, is_closing: bool = False) -> None:
        """Begin a round. If `is_closing` is true, it has no inner steps, and both partners move to the midpoint.

        `patience_s` is used only in a closing round (see `Opening`).
        """
        self.apply_late()  # matchmaking would wait for a late part that arrived after the last outer step
        self._is_closing = is_closing
        self.is_open = True
        step_rate = self.exchange.step_rate
        if not self.steps:  # a round that began before a restart keeps its length
            self.length.next(step_rate.seconds_per_step, others_s=step_rate.others_s(self._clock()))
        self.exchange.open(
            self.round,
            progress=self.progress,
            state=self._vectors.sections(),
            steps_done=self.inner_steps if is_closing else self.steps,
            inner_steps=self.inner_steps,
            shortest_round_s=self.length.told_s(step_rate.seconds_per_step),
            patience_s=patience_s,
        )

    def step_taken(self) -> bool:
        """Record an inner step. Returns True after the last step of the round; call `reach_boundary` next."""
        assert not self.is_at_boundary, "call `poll` until the round has ended"
        self.steps += 1
        self._steps_taken += 1
        if not self.follows_caller:
            self.progress = next_progress(self.progress, self.spec.schedule_steps)
        self.exchange.step_rate.step(self._clock())
        self.apply_late()
        return self.steps >= self.inner_steps

    def reach_boundary(self, *, wait_s: float | None = None) -> None:
        """Stage the outer gradient. `poll` then gives up after `wait_s`, which is `Spec.boundary_wait_s` by default."""
        self._boundary_s = self._clock()
        self.exchange.stage(self._vectors.outer_gradient)
        self._until_s = self._clock() + (self.spec.boundary_wait_s if wait_s is None else wait_s)

    @property
    def wait_left_s(self) -> float:
        """Return for how many more seconds this replica may wait at the boundary."""
        return max(0.0, self._until_s - self._clock())

    def poll(self) -> RoundEnd | None:
        """If the round is over, take the outer step and return the `RoundEnd`. Otherwise, return None.

        This method may be called only at the boundary.
        """
        outcome = self.exchange.poll(wait_s=self.wait_left_s)
        return None if outcome is None else self.finish(outcome)

    def finish(self, outcome: Outcome) -> RoundEnd:
        """Take the outer step with the outcome of the round, after any number of inner steps."""
        boundary_s = 0.0 if self._boundary_s is None else self._clock() - self._boundary_s
        link = outcome.link if isinstance(outcome, Alone) else outcome.received.link
        if link:
            self.length.note(link)
        self.apply_late()  # a late part may have waited for the early part of this round
        outcome, diverged = self._outer_step.step(outcome, is_closing=self._is_closing)
        swapped_at = self.progress
        if not isinstance(outcome, Alone):
            if not (self._is_closing or self.follows_caller):
                swapped_at = swap_progress(self.progress, outcome.received, inner_steps=self.steps, spec=self.spec)
                self._approach_partners(outcome.received)
            outcome.received.sections.clear()  # payloads are as large as the model, and callers may keep results
        end = RoundEnd(self.round, outcome, swapped_at, boundary_s, diverged)
        self.round += 1
        self.steps = 0
        self.is_open = self._is_closing = False
        self._boundary_s = None
        return end

    def _approach_partners(self, received: Received) -> None:
        """Move towards the progress of the partners, after a swap.

        The move is at most as long as the round, so this peer ends no round at a lower progress than it began with.
        """
        total = self.spec.schedule_steps
        trained, round_progress = self._steps_taken / total, self.steps / total
        self._partners.note(received.partner, received.partner_progress, trained=trained - round_progress)
        self.progress = self._partners.move(
            self.progress, trained=trained, at_most=round_progress, num_live=received.num_live
        )

    def withdraw(self) -> RoundEnd | None:
        """Make sure that no partner waits for this peer.

        A round that has a partner, or is at its boundary, ends here. Otherwise, None is returned, and the round
        continues when it is opened again.
        """
        if not self.is_open:
            return None
        outcome = self.exchange.poll(wait_s=0.0) if self.is_at_boundary else self.exchange.withdraw()
        assert outcome is not None
        self.is_open = False
        if isinstance(outcome, Alone) and not self.is_at_boundary:
            return None
        return self.finish(outcome)

    def give_up(self) -> None:
        """Leave the boundary after the caller was interrupted.

        The next step reaches the boundary again. Vectors that have arrived are not applied.
        """
        if self.is_at_boundary:
            self.exchange.poll(wait_s=0.0)
        self.is_open = self._is_closing = False
        self._boundary_s = None

    def restart(self, *, round_index: int, progress: float, steps: int = 0) -> None:
        """Continue from a new position in the run, after the vectors have been replaced.

        The new vectors come from a checkpoint or from another peer.
        """
        self._partners = PartnerPositions()
        self.round, self.progress, self.steps = round_index, progress, steps

    def apply_late(self) -> None:
        """Apply a late part that arrived after its boundary, if there is one and the vectors are not being sent."""
        correction = self.exchange.late(self.round)
        if correction:
            self._outer_step.correct(correction)
            self.exchange.corrected()
