"""A peer of several processes, one for each GPU (here on the CPU), leaves, resumes and exits like any other peer."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from harness.processes import PeerProcess, noloco, small_spec, write_spec

pytestmark = pytest.mark.slow


def ranks(peer: PeerProcess) -> list[psutil.Process]:
    """Return the processes of a peer, rank 0 first."""
    children = psutil.Process(peer.process.pid).children()
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def test_a_peer_of_two_processes_leaves_resumes_by_torchrun_too_and_tells_of_one_that_was_killed(
    tmp_path: Path,
) -> None:
    spec_file = write_spec(small_spec("gpus", train__batch_size=5), tmp_path)
    with PeerProcess(spec_file, tmp_path / "peer", "--gpus", "2") as peer:
        peer.event("report")
        processes = ranks(peer)
        assert len(processes) == 2
        peer.send(signal.SIGTERM)
        assert peer.wait() == 0
        assert peer.text.splitlines()[-1] == "left; run the same command to resume"
        assert "Traceback" not in peer.text
        assert not any(process.is_running() for process in processes)
        stopped = peer.event("stopped")

    with PeerProcess(spec_file, tmp_path / "peer", ranks=2) as peer:
        peer.event("report")
        assert peer.event("started")["resumed_at"] == stopped["step"]
        assert noloco("leave", "--state-dir", tmp_path / "peer").returncode == 0
        assert peer.wait() == 0
        assert "left; run the same command to resume" in peer.text
        assert "Traceback" not in peer.text
        stopped = peer.event("stopped")

    with PeerProcess(spec_file, tmp_path / "peer", "--gpus", "2") as peer:
        peer.event("report")
        assert peer.event("started")["resumed_at"] == stopped["step"]
        processes = ranks(peer)
        processes[1].kill()
        assert peer.wait() == 1
        assert "noloco: another process of this peer has ended" in peer.text
        assert "rank 1 was terminated by signal 9" in peer.text
        assert "Traceback" not in peer.text
        assert not any(process.is_running() for process in processes)
