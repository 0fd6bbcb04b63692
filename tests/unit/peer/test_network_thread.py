"""Every call from the main thread to the network thread ends, in one way or another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.errors import Left
from noloco_p2p.peer.network_thread import NetworkThread


@pytest.fixture
def thread() -> Iterator[NetworkThread]:
    thread = NetworkThread()
    yield thread
    thread.stop()


class Slow:
    """A long call, such as a fetch, which records how it ended."""

    def __init__(self) -> None:
        self.began, self.cancelled = threading.Event(), threading.Event()

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.sleep(2 * PATIENCE_S)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_whoever_is_asked_to_leave_does_not_wait_for_what_is_long(thread: NetworkThread) -> None:
    slow, leaving = Slow(), threading.Event()
    asker = threading.Thread(target=lambda: slow.began.wait(PATIENCE_S) and leaving.set())
    asker.start()
    with pytest.raises(Left):
        thread.call(slow.run(), PATIENCE_S, leaving=leaving)
    assert slow.cancelled.wait(PATIENCE_S)
    asker.join()


@pytest.mark.parametrize("leaving", [None, threading.Event()])
def test_a_call_ends_at_its_deadline(thread: NetworkThread, leaving: threading.Event | None) -> None:
    slow = Slow()
    with pytest.raises(TimeoutError):
        thread.call(slow.run(), 0.3, leaving=leaving)
    assert slow.cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("leaving", [None, threading.Event()])
def test_a_call_gives_what_its_coroutine_gives(thread: NetworkThread, leaving: threading.Event | None) -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ValueError("no")

    assert thread.call(answer(), PATIENCE_S, leaving=leaving) == 42
    with pytest.raises(ValueError, match="no"):
        thread.call(fail(), PATIENCE_S, leaving=leaving)
