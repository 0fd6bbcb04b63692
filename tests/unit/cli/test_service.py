"""`noloco service` makes a unit that systemd accepts, and never puts a ticket on a command line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from noloco_p2p.cli import service
from noloco_p2p.cli.app import run
from noloco_p2p.ticket import Ticket

TICKET = Ticket("demo", "0" * 64).encode()


def test_it_prints_a_unit_that_systemd_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my state 100%"
    assert run(["service", TICKET, "--print", "--state-dir", str(folder)]) == 0
    unit = capsys.readouterr().out
    quoted = str(folder).replace("%", "%%")
    command = f'{sys.executable} -m noloco_p2p join "@{quoted}/service.ticket" --state-dir "{quoted}"'
    assert f"ExecStart={command}\n" in unit
    assert not folder.exists(), "nothing is changed"
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd here to read the unit")
    (tmp_path / "noloco.service").write_text(unit)
    verify = ["systemd-analyze", "verify", "--user", str(tmp_path / "noloco.service")]
    done = subprocess.run(verify, capture_output=True, text=True, check=False, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")


def test_it_installs_and_starts_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[tuple[str, ...]] = []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(service, "_systemctl", lambda *arguments: done.append(arguments))
    assert run(["service", f"join {TICKET}.", "--state-dir", str(tmp_path / "state")]) == 0
    assert done[1:] == [("daemon-reload",), ("enable", service.NAME), ("restart", service.NAME)]
    unit = (tmp_path / "config" / "systemd" / "user" / service.NAME).read_text()
    assert "noloco1" not in unit
    ticket = tmp_path / "state" / "service.ticket"
    assert (ticket.read_text(), ticket.stat().st_mode & 0o777) == (f"{TICKET}\n", 0o600)
    assert "noloco status" in capsys.readouterr().out


def test_a_machine_without_systemd_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["service", TICKET, "--state-dir", str(tmp_path / "state")]) == 1
    assert "this machine has no systemd" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def put_systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let the shell script be the only program on the path."""
    program = folder / "systemctl"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_systemd_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_systemctl(tmp_path, monkeypatch, "exec /bin/sleep 600\n")
    monkeypatch.setattr(service, "ANSWER_S", 0.1)
    assert run(["service", TICKET, "--state-dir", str(tmp_path / "state")]) == 1
    assert "did not end within" in capsys.readouterr().err


def test_a_user_without_a_session_gets_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_systemctl(tmp_path, monkeypatch, "echo 'Failed to connect to bus: No medium found' >&2\nexit 1\n")
    assert run(["service", TICKET, "--state-dir", str(tmp_path / "state")]) == 1
    assert "No medium found; without a session of this user" in capsys.readouterr().err
