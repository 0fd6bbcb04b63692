from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p import control
from noloco_p2p.control import answering, ask, hold, is_held, socket_path
from noloco_p2p.errors import SettingsError


def served(folder: Path, verb: str, **verbs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer that a client in another thread gets from a server with these verbs."""

    async def main() -> dict[str, Any] | None:
        async with answering(folder, {name: lambda reply=reply: reply for name, reply in verbs.items()}):
            return await asyncio.to_thread(ask, folder, verb)

    return asyncio.run(main())


def test_a_verb_is_answered_and_the_socket_is_gone_afterwards(tmp_path: Path) -> None:
    assert served(tmp_path, "status", status={"round": 3}) == {"round": 3}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("temporary", ["", "long" * 30])
@pytest.mark.parametrize("name", ["long" * 30, "ü" * 50])
def test_a_long_path_has_its_socket_elsewhere(
    name: str, temporary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if temporary:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
    folder = tmp_path / name
    folder.mkdir()
    assert len(os.fsencode(socket_path(folder))) <= control.LONGEST_SOCKET_PATH
    assert socket_path(folder) != socket_path(tmp_path / f"{name}!")
    assert served(folder, "status", status={"round": 3}) == {"round": 3}


def test_an_unknown_verb_is_told_what_is_known(tmp_path: Path) -> None:
    assert served(tmp_path, "dance", status={}, leave={}) == {
        "error": "unknown verb; the known verbs are status, leave"
    }


def test_a_request_that_fails_is_told_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with answering(tmp_path, {"status": lambda: {"loss": object()}}):
            await asyncio.to_thread(ask, tmp_path, "status")

    with pytest.raises(SettingsError, match="cannot answer: TypeError: Object of type object"):
        asyncio.run(main())
    assert "a request at the control socket failed" in caplog.text


def test_the_socket_of_a_killed_peer_is_nobody_and_is_replaced(tmp_path: Path) -> None:
    assert ask(tmp_path, "status") is None
    assert ask(tmp_path / "nowhere", "status") is None
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path(tmp_path)))
    assert ask(tmp_path, "status") is None
    assert served(tmp_path, "status", status={"alive": True}) == {"alive": True}


def test_a_peer_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(socket_path(tmp_path)))
        frozen.listen()
        with pytest.raises(SettingsError, match=f"the peer in {tmp_path} is not answering"):
            ask(tmp_path, "status", timeout_s=0.1)


def test_nonsense_harms_nobody(tmp_path: Path) -> None:
    async def main() -> dict[str, Any] | None:
        async with answering(tmp_path, {"status": lambda: {"fine": True}}):
            assert stat.S_IMODE(socket_path(tmp_path).stat().st_mode) == 0o600, "only the owner can ask"
            for line in (b"hello\n", b"[]\n", b"", b'{"verb": {}}\n', b"x" * 100_000 + b"\n"):
                reader, writer = await asyncio.open_unix_connection(socket_path(tmp_path))
                writer.write(line)
                writer.write_eof()
                await reader.read()
                writer.close()
            return await asyncio.to_thread(ask, tmp_path, "status")

    assert asyncio.run(main()) == {"fine": True}


def test_one_peer_per_folder_and_the_kernel_frees_the_lock_of_a_dead_one(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    acquire_and_die = f"""
import os, pathlib, noloco_p2p.control as control
folder = pathlib.Path({str(tmp_path)!r})
lock = control.hold(folder)
os._exit(control.is_held(folder))
"""
    assert subprocess.run([sys.executable, "-c", acquire_and_die], timeout=PATIENCE_S, check=False).returncode == 1
    with hold(tmp_path):
        assert is_held(tmp_path)
        with pytest.raises(SettingsError, match=f"another peer is running in {tmp_path}"):
            hold(tmp_path)
    assert not is_held(tmp_path)


LEFT_BEHIND = """
import os, socket, sys, time
from pathlib import Path
from noloco_p2p.control import hold
from noloco_p2p.net.proxy import _listening
lock = hold(Path(sys.argv[1]))
listener = _listening("127.0.0.1", 0)
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b"forked")
    time.sleep(60)
os.read(reader, 6)
print(listener.getsockname()[1], flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_forks_of_a_killed_peer_hold_neither_its_folder_nor_its_port(tmp_path: Path) -> None:
    """A DataLoader with workers forks, and its workers live on for some seconds."""
    with subprocess.Popen(
        [sys.executable, "-c", LEFT_BEHIND, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as killed:
        try:
            assert killed.stdout
            port = int(killed.stdout.readline())
            assert killed.wait(PATIENCE_S) == -9
            hold(tmp_path).close()
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            os.killpg(killed.pid, 9)
