from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from noloco_p2p import control
from noloco_p2p.cli import local, runs
from noloco_p2p.cli.app import run
from noloco_p2p.cli.join import _leave_on_signals
from noloco_p2p.cli.options import parse_duration
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import invite
from noloco_p2p.ticket import Ticket


class LeavingPeer:
    """A peer that has already been asked to leave, by `noloco leave` or because its key was copied."""

    def __init__(self) -> None:
        self.leave_requested = threading.Event()
        self.leave_requested.set()

    def request_leave(self) -> None:
        self.leave_requested.set()


@pytest.fixture
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers_as_before")
def test_the_second_signal_ends_at_once_and_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    _leave_on_signals(cast(Any, LeavingPeer()))
    signal.raise_signal(signal.SIGTERM)
    assert not codes, "the last checkpoint is being written"
    signal.raise_signal(signal.SIGTERM)
    assert codes == [143]


@pytest.mark.usefixtures("_handlers_as_before")
def test_who_leaves_while_libraries_are_imported_sees_no_error_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def import_libraries(*arguments: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise RecursionError("maximum recursion depth exceeded") from None

    monkeypatch.setattr("noloco_p2p.cli.join._train", import_libraries)
    ticket = Ticket("demo", "0" * 64).encode()
    assert run(["join", ticket, "--state-dir", str(tmp_path)]) == 130
    assert "Traceback" not in "".join(capfd.readouterr())


def test_who_was_asked_to_leave_has_left_when_its_lock_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "ask", lambda *_: {"pid": 4711})
    lock = control.hold(tmp_path)
    assert run(["leave", "--state-dir", str(tmp_path), "--timeout", "0.1"]) == 1
    assert "process 4711" in capsys.readouterr().out
    lock.close()
    assert run(["leave", "--state-dir", str(tmp_path)]) == 0


def test_who_was_asked_to_leave_has_left_when_its_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        stdin = process.stdin
        assert stdin
        monkeypatch.setattr(local, "ask", lambda *_: {"pid": process.pid})
        monkeypatch.setattr(local.time, "sleep", lambda _: stdin.close())
        assert run(["leave", "--state-dir", str(tmp_path)]) == 0
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_a_time_is_in_the_unit_that_it_says() -> None:
    times = ("90s", "30min", "12h", "7d")
    assert [parse_duration(text, flag="--for") for text in times] == [90.0, 1800.0, 43_200.0, 604_800.0]


def test_a_run_key_of_the_settings_is_for_its_own_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = Identity.load_or_create(tmp_path / "run.key")
    invitation = invite(key, expires_at_s=4e9, seed=bytes(32))
    other = invite(Identity.load_or_create(tmp_path / "other.key"), expires_at_s=4e9, seed=bytes(32))
    told = {
        "open": Ticket("demo", "0" * 64).encode(),
        "private": Ticket("demo", "0" * 64, (), invitation).encode(),
        "another": Ticket("demo", "0" * 64, (), other).encode(),
    }
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("NOLOCO_RUN_KEY", str(tmp_path / "run.key"))

    def ticket_of(kind: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(runs, "ask", lambda *_: {"ticket": told[kind]})
        code = run(["ticket", "--state-dir", str(tmp_path), *arguments])
        return code, capsys.readouterr().out.strip()

    assert ticket_of("open") == (0, told["open"])
    assert ticket_of("open", "--expires", "7d")[0] == 3
    code, made = ticket_of("private")
    assert (code, made != told["private"]) == (0, True)
    assert ticket_of("another") == (0, told["another"])
    assert ticket_of("another", "--expires", "7d")[0] == 3
