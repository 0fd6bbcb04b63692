"""The Unix sockets behind the public port."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.control import fits_socket
from noloco_p2p.errors import CorruptPayload, Unreachable
from noloco_p2p.net.proxy import NEW_S, Proxy


def test_a_long_path_of_the_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems set TMPDIR to a folder of the job."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    proxy = Proxy(tls=None)
    proxy.listen("127.0.0.1", 0)
    assert fits_socket(proxy.behind.with_name("1234567890"))
    asyncio.run(proxy.close())
    assert not proxy.behind.parent.exists()


def test_the_folders_of_killed_peers_are_removed_and_those_of_live_and_new_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    listening: list[socket.socket] = []
    for name in ("killed", "live", "new"):
        folder = tmp_path / f"noloco-{name}"
        folder.mkdir()
        listening.append(socket.socket(socket.AF_UNIX))
        listening[-1].bind(str(folder / "grpc"))
        if name == "live":
            listening[-1].listen()
        if name != "new":
            os.utime(folder / "grpc", (0.0, time.time() - 2 * NEW_S))
    proxy = Proxy(tls=None)
    proxy.listen("127.0.0.1", 0)
    assert {path.name for path in tmp_path.iterdir()} == {"noloco-live", "noloco-new", proxy.behind.parent.name}
    asyncio.run(proxy.close())
    for each in listening:
        each.close()


async def test_a_caller_that_has_hung_up_is_told_from_one_that_bypasses_the_port() -> None:
    """gRPC may begin a call after its connection has ended."""
    proxy = Proxy(tls=None)
    proxy.listen("127.0.0.1", 0)
    near, far = socket.socketpair()
    far.close()
    proxy.take(near, relay="relay")
    assert proxy.inbound("unix:/folder/1")
    await proxy.tasks.stop(grace_s=PATIENCE_S)
    with pytest.raises(Unreachable, match="has ended"):
        proxy.inbound("unix:/folder/1")
    for bypassing in ("unix:/folder/2", "unix:", "ipv4:127.0.0.1:1"):
        with pytest.raises(CorruptPayload, match="public port"):
            proxy.inbound(bypassing)
    await proxy.close()
