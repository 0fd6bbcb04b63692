"""Requests for a pause, and the task that watches the machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.peer.free_time import IN_USE, FreeTime, Seen
from noloco_p2p.peer.pausing import Pausing, watch, watch_machine
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.node import end_tasks

NIGHT, DAY = Seen(0), Seen(12 * 60)
SPARING = PeerSettings(when="09:00-17:00")


def test_a_pause_lasts_while_anybody_asks_for_it() -> None:
    requested = threading.Event()
    both = Pausing(requested)
    assert (both.word, both.sentence, requested.is_set()) == ("", "", False)
    both.heed(IN_USE)
    assert (both.word, requested.is_set()) == ("in use", True)
    assert both.sentence == f"{IN_USE.sentence}; training will resume automatically"
    both.ask()
    assert (both.word, both.is_asked) == ("asked", True)
    both.heed(None)
    assert (both.word, requested.is_set()) == ("asked", True), "the user is not overruled"
    both.heed(IN_USE)
    both.resume()
    assert (both.word, requested.is_set()) == ("in use", True), "nor is the machine"
    both.heed(None)
    assert (both.word, requested.is_set()) == ("", False)


def test_the_script_of_a_user_may_set_the_event_itself() -> None:
    requested = threading.Event()
    requested.set()
    assert Pausing(requested).word == "asked"


def test_the_task_pauses_and_goes_on_with_what_is_seen_and_survives_a_failed_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requested, words = threading.Event(), list[str]()

    def looks() -> Iterator[Seen]:
        yield NIGHT
        words.append(both.word)
        yield DAY
        words.append(both.word)
        yield NIGHT

    both, seen = Pausing(requested), looks()

    def look() -> Seen:
        found = next(seen, None)
        if found is None:
            words.append(both.word)
            ended.set()
            raise OSError("no such file")
        return found

    ended = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(watch(FreeTime(SPARING), both, look, every_s=0.0))
        await asyncio.to_thread(ended.wait, PATIENCE_S)
        await end_tasks([task])

    asyncio.run(run())
    assert words[:3] == ["hours", "", "hours"]
    assert requested.is_set(), "it stays as it was"
    assert "could not be measured" in caplog.text


async def _tasks(settings: PeerSettings) -> int:
    tasks = watch_machine(settings, Pausing(threading.Event()))
    await end_tasks(tasks)
    return len(tasks)


def test_nothing_looks_at_a_machine_that_trains_at_any_time() -> None:
    assert asyncio.run(_tasks(PeerSettings())) == 0
    assert asyncio.run(_tasks(SPARING)) == 1
