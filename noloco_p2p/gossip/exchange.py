"""This module is the interface between training and the network.

Training makes these four calls in each round, and none of them raises an exception if a partner fails:

open(state)  ->  inner steps, polling late()  ->  stage(gradient)  ->  poll() or collect()  ->  apply  ->  open(...)

Use `LoopExchange` to train on the network's event loop, and `ThreadedExchange` to train in another thread.
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

SILENT = Alone("the network thread is not responding")
NETWORK_ANSWER_S = 5.0  # extra time for the network thread to answer, beyond the requested wait


class Exchange(Protocol):
    """The network interface for training.

    No method waits for a partner, and no method raises an exception if a partner fails.
    """

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
        """Begin a round: start matchmaking, and send the early part in the background. The call does not block.

        `state` holds the slow weights (and the outer momentum, if it is swapped) as flat fp32 vectors on the CPU. They
        must not change until the round ends, except by a correction from `late`. Sections are encoded while they are
        being sent.

        `steps_done` is the number of inner steps of this round that were taken before a restart. `inner_steps` is the
        length of the round; None keeps the previous length. `shortest_round_s` is the duration of the shortest round
        that this peer can keep up with, and is announced to other peers. `patience_s` is for closing rounds; see
        `Opening`.
        """
        ...

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        """Encode the outer gradient at the boundary, chunk by chunk on its device, and pass it to the network.

        `chunks()` yields the chunks in order. `chunks` is not called if no partner can be found in this round or if
        swaps have no late part. A gradient with non-finite values is not sent, so the round keeps at most its early
        part.
        """
        ...

    def poll(self, *, wait_s: float) -> Outcome | None:
        """End the round and return its outcome, or return None if something may still arrive within `wait_s` seconds.

        Call it after `stage`. If it returns None, call it again with the remaining time. If `wait_s` is 0, the round
        always ends.
        """
        ...

    def withdraw(self) -> Outcome:
        """End the round before its boundary and return its outcome. Uncommitted parts are discarded."""
        ...

    def late(self, round_index: int) -> Correction | None:
        """Return a late part that arrived after the boundary of its round. This call is cheap.

        Only late parts of rounds before `round_index` are returned.

        It returns None while the slow weights and momentum are being sent, because they must not change then. Call
        `corrected` after applying the correction.
        """
        ...

    def corrected(self) -> None:
        """Report that the correction from `late` has been applied, so that the vectors can be sent again."""
        ...

    def forget(self) -> None:
        """Report, between rounds, that the vectors have been replaced.

        This drops late parts that belong to the old vectors.
        """
        ...


class LoopExchange:
    """An `Exchange` for callers on the event loop of `driver`."""

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
            log.error("cannot send this peer's outer gradient: %s", error)
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
    """An `Exchange` for a training thread. No method blocks past its deadline, even if the network thread hangs."""

    owner: object = None  # the caller that is training with this exchange; another caller can take over

    def __init__(self, spec: Spec, driver: RoundDriver, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(spec, driver)
        self._loop = loop

    @property
    def is_closed(self) -> bool:
        """Return whether the network thread has ended because the peer was closed."""
        return self._loop.is_closed()

    def collect(self, wait_s: float) -> Outcome:
        """End the round and return its outcome, after waiting up to `wait_s` seconds for a swap to finish."""
        given_up = threading.Event()

        async def collect() -> Outcome:
            return SILENT if given_up.is_set() else await self._driver.collect(wait_s)

        return self._wait_for(collect(), SILENT, given_up, wait_s=wait_s)

    def _tell(self, function: Callable[[*As], None], *arguments: *As) -> None:
        """Call a function on the network thread without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _ask(self, function: Callable[[], T], otherwise: T, *, even_late: bool = False) -> T:
        """Call a function on the network thread. Return its result, or `otherwise` if the thread has stopped or hangs.

        If `even_late` is true, a thread that hung still calls the function when it resumes after the deadline. Most
        calls must not run that late, because training has already continued without them.
        """
        given_up = threading.Event()

        async def call() -> T:
            return otherwise if given_up.is_set() and not even_late else function()

        return self._wait_for(call(), otherwise, given_up)

    def _wait_for(
        self, coroutine: Coroutine[Any, Any, T], otherwise: T, given_up: threading.Event, *, wait_s: float = 0.0
    ) -> T:
        """Run a coroutine on the network thread. Return its result, or `otherwise` if the thread has stopped or hangs.

        Training must continue without the network.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            return otherwise
        try:
            return future.result(wait_s + NETWORK_ANSWER_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            given_up.set()  # set first, because a task that is cancelled before it begins still runs its first step
            future.cancel()
            log.error("the network thread is not responding; training continues without it")
            return otherwise
