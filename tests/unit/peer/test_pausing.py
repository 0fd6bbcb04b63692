"""Requests for a pause, and the task that watches the machine."""

from __future__ import annotations

import asyncio
import threading

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.peer.pausing import IN_USE, Pausing, Reason, watch, watch_machine
from noloco_p2p.settings import PeerSettings

NIGHT = Reason("hours", "it is night")


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
    requested, words, ended = threading.Event(), list[str](), threading.Event()
    both, told = Pausing(requested), iter([NIGHT, None, NIGHT])

    def why_not() -> Reason | None:
        words.append(both.word)
        try:
            return next(told)
        except StopIteration:
            if words[4:]:  # the task has seen an error, and looks again
                ended.set()
            raise OSError("no such file") from None

    async def run() -> None:
        task = asyncio.create_task(watch(why_not, both, every_s=0.0))
        await asyncio.to_thread(ended.wait, PATIENCE_S)
        await end_tasks([task])

    asyncio.run(run())
    assert words[:4] == ["", "hours", "", "hours"]
    assert requested.is_set(), "it stays as it was"
    assert "could not be measured" in caplog.text


async def _tasks(settings: PeerSettings) -> int:
    tasks = watch_machine(settings, Pausing(threading.Event()))
    await end_tasks(tasks)
    return len(tasks)


def test_nothing_looks_at_a_machine_that_trains_at_any_time() -> None:
    assert asyncio.run(_tasks(PeerSettings())) == 0
    assert asyncio.run(_tasks(PeerSettings(when="09:00-17:00"))) == 1
