"""p2pd starts and restarts on a machine that lacks resources or holds leftovers of other processes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.identities import identity_of
from harness.patience import PATIENCE_S

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm import daemon, node
from noloco_p2p.swarm.daemon import ListenOn, probe_port
from noloco_p2p.swarm.directory import SwarmDirectory
from noloco_p2p.swarm.node import SwarmNode

TOO_MANY = OSError(24, "Too many open files")


def test_a_shortage_of_descriptors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> socket.socket:
        raise TOO_MANY

    monkeypatch.setattr(daemon.socket, "socket", none_left)
    with pytest.raises(DirectoryError, match="Too many open files"):
        probe_port("127.0.0.1", 0)


def test_the_watchdog_tries_again_whatever_was_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "RESTART_PAUSES_S", (0.0,))
    faults: list[Exception] = [TOO_MANY, DirectoryError("the port is taken")]

    class Short(SwarmNode):
        async def _bring_up(self) -> None:
            if faults:
                raise faults.pop(0)

    asyncio.run(Short(Path("key"), "peer", ListenOn("127.0.0.1"), is_client=False, guard=DialGuard())._restart())
    assert not faults


def test_a_node_without_its_relay_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    async def up(self: SwarmNode) -> None: ...

    async def handle_streams(self: SwarmNode, *_: object) -> None:
        raise DirectoryError("asking p2pd to forward streams: no answer")

    async def stop(self: SwarmNode) -> None:
        stopped.append(True)

    async def start() -> Any:
        return await SwarmDirectory(
            identity_path=tmp_path, identity=identity_of("me"), listen_host="", listen_port=0, spec_digest=None
        ).start()

    for method in (handle_streams, stop):
        monkeypatch.setattr(SwarmNode, method.__name__, method)
    monkeypatch.setattr(SwarmNode, "start", up)
    with pytest.raises(DirectoryError, match="no answer"):
        asyncio.run(start())
    assert stopped


WITHOUT_SIGCHLD = """
import asyncio, signal, uvloop
from noloco_p2p.swarm.daemon import Daemon

async def main():
    processes = [await asyncio.create_subprocess_exec("sleep", "900", stdout=asyncio.subprocess.PIPE) for _ in "ab"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stopped, killed = (Daemon(process, "no socket") for process in processes)
    await stopped.stop()
    killed.kill()
    print(await killed.ended())
    await killed.stop()

uvloop.run(main())
"""


def test_the_end_of_a_daemon_is_noticed_without_sigchld() -> None:
    """Lightning resets all signal handlers after a training, so libuv learns of no child's end."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_SIGCHLD], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "exit code unknown: \n", "")
