"""Provides a virtual clock for coroutines, and an executor without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sized
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TICK_S = 1e-9  # the time by which timers are late


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose `time()` starts at 0 and jumps to the next timer when all coroutines are waiting.

    Code takes no virtual time except when it sleeps. The same coroutines always produce the same order of events.
    Raises RuntimeError if all coroutines are waiting and no timer is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        # A timer must never fire early. Otherwise, its code would see that its time has not come and wait again, and
        # because nothing else moves the clock, it would wait forever.
        self._clock_resolution = 0.0
        self._selector = self  # `BaseEventLoop` waits by calling `select` of this object

    def time(self) -> float:
        return self._now_s

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all coroutines are waiting, and no timer is left to wake one")
        if timeout > 0 or not self._is_busy():
            self._now_s += timeout + TICK_S
        return []

    def _is_busy(self) -> bool:
        """Return whether a coroutine can run now."""
        ready: Sized = getattr(self, "_ready")  # noqa: B009 - the type stubs lack it
        return len(ready) > 0

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing, because without sockets there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing, because no other thread has to wake the loop."""


class InlineExecutor(Executor):
    """Runs each call at once in the thread that submits it, so that work such as encoding takes no virtual time."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock, as `asyncio.run` does on a real one."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
