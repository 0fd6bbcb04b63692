"""Run asyncio tasks that end with their owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

log = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.2


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all of them have ended.

    A task can lose a cancellation if the call that it awaits completes at the same moment. This happens with
    asyncio.wait_for in Python 3.11 and in hivemind's own loops, so the cancellation is repeated.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


class OwnedTasks:
    """A set of tasks that end with their owner.

    An unexpected error in one task is logged and does not affect the others. `what` describes the tasks in the log.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def stop(self, *, grace_s: float) -> None:
        """Give the tasks `grace_s` seconds to end, then cancel the rest and wait for them."""
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        await end_tasks(tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("%s ended with an unexpected error", self._what, exc_info=error)
