"""Requests for a pause, the hours and the load at which a peer trains, and the load of other programs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.peer import pausing as pausing_module
from noloco_p2p.peer.pausing import (
    BUSY_SHARE,
    IN_USE,
    QUIET_S,
    FreeTime,
    MachineUse,
    Pausing,
    Reason,
    watch_machine,
)
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PAUSED_BY

NIGHT = Reason("hours", "it is night")
NOON = 12 * 60
BUSY, CALM = BUSY_SHARE + 0.01, BUSY_SHARE - 0.01
BURN = "print(flush=True)\nwhile True: pass"
BURN_IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
IDLE = "import sys; print(flush=True); sys.stdin.read()"
BURNT_S = 1.0


def test_a_pause_lasts_while_anybody_asks_for_it() -> None:
    both = Pausing()
    requested = both.requested
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


async def test_the_machine_is_watched_with_other_hours_than_always_and_a_failed_look_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pausing, told, words = Pausing(), iter([NIGHT, None, NIGHT]), list[str]()
    has_ended = asyncio.Event()

    def why_not(*_: object, **rest: object) -> Reason | None:
        words.append(pausing.word)
        if words[4:]:  # it has seen an error, and looks again
            has_ended.set()
        try:
            return next(told)
        except StopIteration:
            raise OSError("no such file") from None

    monkeypatch.setattr(FreeTime, "why_not", why_not)
    monkeypatch.setattr(pausing_module, "LOOK_S", 0.0)
    await watch_machine(PeerSettings(), pausing)  # returns at once, because this peer trains at any time
    task = asyncio.create_task(watch_machine(PeerSettings(when="09:00-17:00"), pausing))
    await has_ended.wait()
    await end_tasks([task])
    assert words[:4] == ["", "hours", "", "hours"]
    assert pausing.requested.is_set(), "it stays as it was"
    assert "could not be measured" in caplog.text


@pytest.mark.parametrize(
    ("settings", "minute", "others_share", "word"),
    [
        ({}, NOON, 1.0, ""),
        ({"when": "idle"}, NOON, None, ""),  # an unknown load does not stop training
        ({"when": "09:00-17:00"}, 9 * 60 - 1, None, "hours"),
        ({"when": "09:00-17:00"}, 9 * 60, None, ""),
        ({"when": "09:00-17:00"}, 17 * 60 - 1, None, ""),
        ({"when": "09:00-17:00"}, 17 * 60, None, "hours"),
        ({"when": "22:00-07:00"}, 21 * 60 + 59, None, "hours"),
        ({"when": "22:00-07:00"}, 0, 1.0, ""),
        ({"when": "22:00-07:00"}, 7 * 60, None, "hours"),
        ({"when": "idle"}, NOON, BUSY, "in use"),
        ({"when": "idle"}, NOON, CALM, ""),
    ],
)
def test_what_is_seen_at_once(settings: dict[str, Any], minute: int, others_share: float | None, word: str) -> None:
    reason = FreeTime(PeerSettings.load(settings)).why_not(minute=minute, others_share=others_share, now_s=5.0)
    assert (reason.word if reason else "") == word
    assert word in PAUSED_BY


@pytest.mark.parametrize("calm", [CALM, None])
def test_training_goes_on_after_two_minutes_of_quiet(calm: float | None) -> None:
    free_time, busy = FreeTime(PeerSettings.load({"when": "idle"})), BUSY

    def at(now_s: float, others_share: float | None) -> str:
        reason = free_time.why_not(minute=NOON, others_share=others_share, now_s=now_s)
        return reason.word if reason else ""

    assert at(0.0, calm) == ""
    assert at(5.0, busy) == "in use"
    assert at(5.0 + QUIET_S - 1.0, calm) == "in use"
    assert at(5.0 + QUIET_S, calm) == ""
    assert at(200.0, busy) == "in use"
    assert at(260.0, busy) == "in use"
    assert at(259.0 + QUIET_S, calm) == "in use", "counted from the last time"
    assert at(260.0 + QUIET_S, calm) == ""


@contextmanager
def process(program: str) -> Iterator[psutil.Process]:
    """Yield a process that is running; kill it and its children afterwards."""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout
        started.stdout.readline()
        seen = psutil.Process(started.pid)
        try:
            yield seen
        finally:
            for child in [*seen.children(recursive=True), seen]:
                child.kill()


def burn(tree: psutil.Process) -> None:
    """Wait until this process and its children have used the processor for a while."""

    def used_s() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in [tree, *tree.children(recursive=True)])

    until_s = used_s() + BURNT_S
    while used_s() < until_s:
        time.sleep(0.05)  # between two checks


@pytest.mark.parametrize("program", [BURN, BURN_IN_A_CHILD])
def test_what_other_programs_use_is_told_from_what_this_peer_uses(program: str) -> None:
    with process(program) as busy, process(IDLE) as calm:
        as_peer, as_other = MachineUse(root_pid=busy.pid), MachineUse(root_pid=calm.pid)
        first, began_s = as_peer.others_share(), time.monotonic()
        as_other.others_share()
        burn(busy)
        own, other = as_peer.others_share(), as_other.others_share()
        elapsed_s = time.monotonic() - began_s
    assert first is None, "there is nothing to compare with yet"
    assert own is not None
    assert other is not None
    burnt_share = BURNT_S / elapsed_s / (psutil.cpu_count() or 1)
    assert other - own > 0.8 * burnt_share
