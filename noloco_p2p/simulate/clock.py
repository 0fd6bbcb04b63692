"""A virtual clock: an event loop without sockets whose time jumps to the next timer; and a threadless executor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sized
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TICK_S = 1e-9  # by which timers are late


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` begins at 0 and advances only when all coroutines wait: then to the next timer.

    Code takes no time except when it sleeps. The same coroutines give the same order of events every time. Raises
    RuntimeError when all coroutines wait and no timer is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        # A timer must not fire early, even slightly: code that finds that its time has not come waits again, and since
        # nothing else moves the clock, it would wait forever.
        self._clock_resolution = 0.0
        self._selector = self  # `BaseEventLoop` waits by calling its `select`

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all coroutines wait, and no timer is left to wake one")
        if timeout > 0 or not self._is_busy():
            self._now_s += timeout + TICK_S
        return []

    def _is_busy(self) -> bool:
        """Whether a coroutine can run now."""
        ready: Sized = getattr(self, "_ready")  # noqa: B009 - of BaseEventLoop, which stubs do not show
        return len(ready) > 0

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets, so there are no events."""

    def _write_to_self(self) -> None:
        """No other thread calls, so nothing needs to be woken."""


class InlineExecutor(Executor):
    """Runs a call at once, where it is submitted: coding a vector takes no virtual time."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
