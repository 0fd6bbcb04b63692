"""The rounds of one replica, without a network and without waiting: the only place that knows their sequence.

open  ->  step_taken, once per inner step  ->  when it returns True: reach_boundary  ->  poll until the end  ->  open

`NoLoCo` blocks between polls; a simulated replica sleeps on its virtual clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, Outcome
from noloco_p2p.gossip.round_length import RoundLength
from noloco_p2p.outer.outer_state import next_progress, progress_after, swap_progress
from noloco_p2p.spec import Spec


class Vectors(Protocol):
    """What a round sends; `OuterState` implements it."""

    def sections(self) -> dict[SectionName, Tensor]:
        """Flat fp32 vectors on the CPU, of one size, which do not change during a round."""
        ...

    def outer_gradient(self) -> Iterable[Tensor]:
        """Yield fast - slow, chunk by chunk."""
        ...


class OuterStep(Protocol):
    """What a round does with its outcome; `UpdateFilter` implements it."""

    def step(self, outcome: Outcome, *, is_closing: bool) -> tuple[Outcome, bool]:
        """Take the outer step. Returns what was applied of the outcome, and whether own weights were not finite."""
        ...

    def correct(self, correction: Correction) -> None:
        """Apply a late part after its boundary."""
        ...


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """The end of a round.

    round: its index. swap_progress: the progress of the swap, the same number for both partners, or else of this
    replica.
    boundary_s: duration of the boundary. diverged: own weights were not finite.
    """

    round: int
    outcome: Outcome
    swap_progress: float
    boundary_s: float
    diverged: bool


class Rounds:
    """The sequence of rounds. `steps`: inner steps taken in the current round.

    follows_caller: the caller sets `progress`; inner steps and swaps do not change it. clock: seconds, the clock of the
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
        self.progress = 0.0  # fraction of the run's schedule; the learning rate follows it
        self.round = 0
        self.steps = 0
        self.is_open = False
        self._is_closing = False
        self._vectors = vectors
        self._outer_step = outer_step
        self._clock = clock
        self._boundary_s: float | None = None  # when the boundary was reached; None before
        self._until_s = 0.0

    @property
    def inner_steps(self) -> int:
        """The length of the current round."""
        return self.length.inner_steps

    @property
    def is_at_boundary(self) -> bool:
        """Whether the round waits for `poll`; no inner step may be closed until it has ended."""
        return self._boundary_s is not None

    def open(self, *, patience_s: float = 0.0, is_closing: bool = False) -> None:
        """Begin a round. is_closing: it has no inner steps, and its partners move to the midpoint.

        patience_s: for a closing round, see `Opening`.
        """
        self.apply_late()  # one that came after the last outer step would keep partners waiting
        self._is_closing = is_closing
        self.is_open = True
        step_rate = self.exchange.step_rate
        if not self.steps:  # a round that was begun before a restart keeps its length
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
        """Note an inner step. Returns True after the last one of the round: call `reach_boundary` next."""
        assert not self.is_at_boundary, "poll until the round has ended"
        self.steps += 1
        if not self.follows_caller:
            self.progress = next_progress(self.progress, self.spec.schedule_steps)
        self.exchange.step_rate.step(self._clock())
        self.apply_late()
        return self.steps >= self.inner_steps

    def reach_boundary(self, *, wait_s: float | None = None) -> None:
        """Stage the outer gradient. `poll` gives up after `wait_s`; None = `Spec.boundary_wait_s`."""
        self._boundary_s = self._clock()
        self.exchange.stage(self._vectors.outer_gradient)
        self._until_s = self._clock() + (self.spec.boundary_wait_s if wait_s is None else wait_s)

    @property
    def wait_left_s(self) -> float:
        """How much longer the boundary may last."""
        return max(0.0, self._until_s - self._clock())

    def poll(self) -> RoundEnd | None:
        """After the boundary: take the outer step once the round is over. Returns None until then."""
        outcome = self.exchange.poll(wait_s=self.wait_left_s)
        return None if outcome is None else self.finish(outcome)

    def finish(self, outcome: Outcome) -> RoundEnd:
        """Take the outer step with the outcome of the round, after any number of inner steps."""
        boundary_s = 0.0 if self._boundary_s is None else self._clock() - self._boundary_s
        link = outcome.link if isinstance(outcome, Alone) else outcome.received.link
        if link:
            self.length.note(link)
        self.apply_late()  # one that waited for the early part of this round
        outcome, diverged = self._outer_step.step(outcome, is_closing=self._is_closing)
        swapped_at = self.progress
        if not isinstance(outcome, Alone):
            if not (self._is_closing or self.follows_caller):
                received, steps = outcome.received, self.steps
                swapped_at = swap_progress(self.progress, received, inner_steps=steps, spec=self.spec)
                self.progress = progress_after(self.progress, received, inner_steps=steps, spec=self.spec)
            outcome.received.sections.clear()  # the payloads are as large as the model, and callers may keep results
        end = RoundEnd(self.round, outcome, swapped_at, boundary_s, diverged)
        self.round += 1
        self.steps = 0
        self.is_open = self._is_closing = False
        self._boundary_s = None
        return end

    def withdraw(self) -> RoundEnd | None:
        """Make sure that no partner waits for this peer. A round that has a partner, or is at its boundary, ends here.

        Returns None if there is no partner: the round continues when it is opened again.
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
        """The caller was interrupted at the boundary. The next step reaches it again; what arrived is not applied."""
        if self.is_at_boundary:
            self.exchange.poll(wait_s=0.0)
        self.is_open = self._is_closing = False
        self._boundary_s = None

    def restart(self, *, round_index: int, progress: float, steps: int = 0) -> None:
        """The vectors were replaced by those of another time or another peer, at this position."""
        self.round, self.progress, self.steps = round_index, progress, steps

    def apply_late(self) -> None:
        """Apply a late part that came after its boundary, if there is one and the vectors are not travelling."""
        correction = self.exchange.late(self.round)
        if correction:
            self._outer_step.correct(correction)
            self.exchange.corrected()
