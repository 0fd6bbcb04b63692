"""A terminal or a pipe may go before the peer that writes to it. Training continues, or ends with a checkpoint."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness.patience import PATIENCE_S
from harness.processes import TICKET_LINE, _environment, small_spec, until, write_spec

from noloco_p2p.telemetry.events import read_events


def command(folder: Path) -> list[str]:
    own = ["--state-dir", str(folder), "--listen", "127.0.0.1:0", "--threads", "1", "--device", "cpu"]
    spec = write_spec(small_spec("lost"), folder)
    return [sys.executable, "-m", "noloco_p2p", "join", str(spec), *own, "--report-every-s", "0.2"]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [each for path in folder.glob("runs/*/events.jsonl") for each in read_events(path) if each["event"] == kind]


def read_until_ticket(descriptor: int) -> None:
    text = b""
    while TICKET_LINE.encode() not in text:
        data = os.read(descriptor, 4096)
        assert data, text.decode()
        text += data


def check_end(folder: Path, status: int) -> None:
    """Check that the peer has left in order."""
    assert status == 0
    [stopped] = events(folder, "stopped")
    assert stopped["step"] > 0
    assert stopped["step"] in [saved["step"] for saved in events(folder, "saved")]


def test_training_continues_without_the_reader_of_its_output(tmp_path: Path) -> None:
    """As in `noloco join ... 2>&1 | head`. A hangup then ends it, and a second one does not hurry it."""
    with subprocess.Popen(
        command(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment({}),
        start_new_session=True,
    ) as peer:
        try:
            assert peer.stdout
            read_until_ticket(peer.stdout.fileno())
            peer.stdout.close()
            before = len(events(tmp_path, "report"))
            until(lambda: len(events(tmp_path, "report")) > before + 3, what="reports after the pipe is closed")
            peer.send_signal(signal.SIGHUP)
            peer.send_signal(signal.SIGHUP)
            check_end(tmp_path, peer.wait(PATIENCE_S))
        finally:
            peer.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="terminals of other systems close in other ways")
def test_a_terminal_that_closes_asks_the_peer_to_leave(tmp_path: Path) -> None:
    arguments, environment = command(tmp_path), _environment({})
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(arguments[0], arguments, environment)
    try:
        read_until_ticket(terminal)
        until(lambda: events(tmp_path, "report"), what="a report")
        os.close(terminal)
        ended = until(lambda: done if (done := os.waitpid(pid, os.WNOHANG))[0] else None, what="the end of the peer")
        check_end(tmp_path, os.waitstatus_to_exitcode(ended[1]))
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


FULL_DISK = """
import sys
from noloco_p2p.cli.app import run
from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.checkpoint import Checkpoints

def begin(*args, **rest):
    raise CheckpointError("no space left on device")

Checkpoints.begin = begin
sys.exit(run(sys.argv[1:]))
"""


def test_a_run_without_a_checkpoint_has_failed(tmp_path: Path) -> None:
    arguments = [*command(tmp_path)[3:], "--max-steps", "2"]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *arguments],
        env=_environment({}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no space left on device" in done.stderr
    assert "left without a final checkpoint because of the error above" in done.stdout
