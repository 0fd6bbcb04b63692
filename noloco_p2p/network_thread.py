"""The network thread of a peer: one event loop (uvloop) beside the thread that trains."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

STOP_TIMEOUT_S = 20.0


class NetworkThread:
    """One event loop (uvloop) in one thread; `call` runs a coroutine there and waits for its result."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="noloco-network", daemon=True)
        self._thread.start()
        self._started.wait()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Raises what the coroutine raises, and TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    def _main(self) -> None:
        self.loop = uvloop.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._started.set)
        try:
            self.loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
