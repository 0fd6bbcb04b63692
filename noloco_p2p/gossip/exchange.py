"""The interface between training and the network: four calls per round, none of which raises for a partner's fault.

open(state)  ->  inner steps, polling late()  ->  stage(gradient)  ->  poll() or collect()  ->  apply  ->  open(...)

`LoopExchange` is for training on the event loop of the network, `ThreadedExchange` for training on another thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar, TypeVarTuple

from torch import Tensor

from noloco_p2p.codec import section_bytes
from noloco_p2p.gossip.frames import Part, SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, Outcome
from noloco_p2p.gossip.rate_estimators import StepRate
from noloco_p2p.gossip.round_driver import RoundDriver
from noloco_p2p.gossip.round_events import Opening
from noloco_p2p.gossip.sections import SectionPlan, section_plans
from noloco_p2p.spec import Spec

log = logging.getLogger(__name__)
As = TypeVarTuple("As")
T = TypeVar("T")

SILENT = Alone("the network thread does not answer")
NETWORK_ANSWER_S = 5.0  # extra time for the network thread to answer, beyond the requested wait


class Exchange(Protocol):
    """What a round needs of the network. No method waits for a partner, and none raises for a partner's fault."""

    @property
    def step_rate(self) -> StepRate: ...

    def open(
        self,
        round_index: int,
        *,
        progress: float,
        state: dict[SectionName, Tensor],
        steps_done: int = 0,
        inner_steps: int | None = None,
        shortest_round_s: float | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """Begin a round: start matchmaking, and send the early part in the background.

        `steps_done`: its inner steps that were taken before a restart. `inner_steps`: its length; None = as the last
        one. `shortest_round_s`: the shortest round that this peer can keep up with, which others are told.
        `patience_s`: for a closing round, see `Opening`. `state`: slow weights, and momentum if it is swapped, flat
        fp32 vectors on the CPU that do not change until the round ends, except by a correction from `late`. Sections
        are coded as they are sent. Returns at once.
        """
        ...

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        """At the boundary: code the outer gradient chunk by chunk on its device, and hand it over.

        `chunks()` yields it in order. It is not called when no partner can be found in this round, or when swaps have
        no late part. A gradient that is not finite is not sent: the swap stays half.
        """
        ...

    def poll(self, *, wait_s: float) -> Outcome | None:
        """After `stage`: return the outcome, which ends the round, once nothing more can arrive within `wait_s` from
        now.

        None = ask again, with less of `wait_s` left. With 0 it always ends the round.
        """
        ...

    def withdraw(self) -> Outcome:
        """End the round before its boundary, as `poll` does at it. Parts that are not committed now never will be."""
        ...

    def late(self, round_index: int) -> Correction | None:
        """Return a late part of a round before `round_index` that arrived after its boundary; cheap to call.

        Returns None while slow weights and momentum travel, because they must not change then. Call `corrected` once it
        is applied.
        """
        ...

    def corrected(self) -> None:
        """The correction from `late` has been applied: the vectors may be sent again."""
        ...

    def forget(self) -> None:
        """Between rounds: the vectors were replaced. Late parts for the old ones are no longer applied."""
        ...


class LoopExchange:
    """An `Exchange` whose caller runs on the event loop of `driver`."""

    def __init__(self, spec: Spec, driver: RoundDriver) -> None:
        self._spec = spec
        self._driver = driver
        self._plans: tuple[SectionPlan, ...] = ()

    @property
    def step_rate(self) -> StepRate:
        return self._driver.step_rate

    def open(
        self,
        round_index: int,
        *,
        progress: float,
        state: dict[SectionName, Tensor],
        steps_done: int = 0,
        inner_steps: int | None = None,
        shortest_round_s: float | None = None,
        patience_s: float = 0.0,
    ) -> None:
        spec = self._spec
        self._plans = plans = section_plans(
            spec.codec,
            swap_momentum=spec.outer.sends_momentum,
            num_elements=state[SectionName.SLOW_WEIGHTS].numel(),
        )
        self.step_rate.open_round(
            self._driver.now_s(), steps_done=steps_done, inner_steps=inner_steps, shortest_round_s=shortest_round_s
        )
        total_steps, longest_round = spec.schedule_steps, spec.outer.longest_round
        opening = Opening(round_index, progress, total_steps, longest_round, state, patience_s)
        self._ask(lambda: self._driver.open(opening, plans), None, even_late=True)

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        may_swap, plan = self._ask(self._driver.reach_boundary, False), self._plans[-1]
        if not may_swap or plan.part is not Part.LATE:
            return
        slab = self._driver.memory.take(section_bytes(plan.codec, plan.num_elements))
        try:
            for values in chunks():
                self._tell(self._driver.stage, slab.code(plan.codec, values))
        except ValueError as error:
            log.error("the outer gradient of this peer cannot be sent: %s", error)
            self._tell(self._driver.cannot_stage, str(error))

    def poll(self, *, wait_s: float) -> Outcome | None:
        return self._ask(lambda: self._driver.poll(wait_s), SILENT)

    def withdraw(self) -> Outcome:
        return self._ask(self._driver.withdraw, SILENT)

    def late(self, round_index: int) -> Correction | None:
        return self._ask(lambda: self._driver.take_correction(round_index), None) if self._driver.corrections else None

    def corrected(self) -> None:
        self._tell(self._driver.corrected)

    def forget(self) -> None:
        self._ask(self._driver.forget, None, even_late=True)

    def _tell(self, function: Callable[[*As], None], *arguments: *As) -> None:
        function(*arguments)

    def _ask(self, function: Callable[[], T], otherwise: T, *, even_late: bool = False) -> T:
        return function()


class ThreadedExchange(LoopExchange):
    """The training thread's side. No method blocks past its deadline, even if the network thread hangs."""

    owner: object = None  # the caller that trains with it; another one may take it over

    def __init__(self, spec: Spec, driver: RoundDriver, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(spec, driver)
        self._loop = loop

    @property
    def is_closed(self) -> bool:
        """Whether the network thread has ended, because the peer was closed."""
        return self._loop.is_closed()

    def collect(self, wait_s: float) -> Outcome:
        """`poll`, and wait: block while there is a swap, or a chance of one, but never longer than `wait_s`."""
        given_up = threading.Event()

        async def collect() -> Outcome:
            return SILENT if given_up.is_set() else await self._driver.collect(wait_s)

        return self._wait_for(collect(), SILENT, given_up, wait_s=wait_s)

    def _tell(self, function: Callable[[*As], None], *arguments: *As) -> None:
        """Call a function on the network thread without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _ask(self, function: Callable[[], T], otherwise: T, *, even_late: bool = False) -> T:
        """Call a function on the network thread, which answers at once; `otherwise` when it has stopped or hangs.

        even_late: run the call even if a hanging thread answers later. Any other call would then act on a round
        that has moved
        on without it; `open` finds the round unended, and ends it.
        """
        given_up = threading.Event()

        async def call() -> T:
            return otherwise if given_up.is_set() and not even_late else function()

        return self._wait_for(call(), otherwise, given_up)

    def _wait_for(
        self, coroutine: Coroutine[Any, Any, T], otherwise: T, given_up: threading.Event, *, wait_s: float = 0.0
    ) -> T:
        """Run on the network thread; `otherwise` when it has stopped or hangs, because training must continue without
        it.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return otherwise
        try:
            return future.result(wait_s + NETWORK_ANSWER_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            given_up.set()  # first: a task that is cancelled before it has begun still runs its first step
            future.cancel()
            log.error("the network thread does not answer; training continues alone")
            return otherwise
