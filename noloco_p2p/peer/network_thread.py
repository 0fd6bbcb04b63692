"""Run the network of a peer on its own thread with one event loop (uvloop), next to the thread that trains."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from noloco_p2p.errors import Left, SettingsError

T = TypeVar("T")

START_TIMEOUT_S = 120.0  # including the import of hivemind from a slow disk
STOP_TIMEOUT_S = 20.0
NOT_RUNNING = "this peer is not running: it was closed, for example at the end of its `with` block"
LOOK_S = 0.1  # how often a long call checks whether this peer must leave


class NetworkThread:
    """A thread with an event loop (uvloop). `call` runs a coroutine there and waits for its result, until `stop`."""

    def __init__(self) -> None:
        self.has_stopped = False
        self.loop: asyncio.AbstractEventLoop
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="noloco-network", daemon=True)
        self._thread.start()
        self._started.wait()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, *, leaving: threading.Event | None = None) -> T:
        """Run a coroutine on the thread and return its result.

        Raises any error of the coroutine, TimeoutError after `timeout_s`, Left soon after `leaving` is set, and
        SettingsError if the thread has stopped.
        """
        if self.has_stopped:
            coroutine.close()
            raise SettingsError(NOT_RUNNING)
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        until_s = time.monotonic() + timeout_s
        try:
            while leaving and time.monotonic() + LOOK_S < until_s:
                if leaving.is_set():
                    raise Left("asked to leave before training began")
                concurrent.futures.wait([future], LOOK_S)
                if future.done():
                    break
            return future.result(max(0.0, until_s - time.monotonic()))
        except (concurrent.futures.TimeoutError, KeyboardInterrupt, Left):
            future.cancel()
            raise

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the thread, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        self.has_stopped = True
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
