"""Talk to a running peer through its local control socket, as `noloco status`, `noloco leave` and similar commands do.

Each request and each answer is one line of JSON. The socket is in the state folder, and only its owner can open it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from noloco_p2p.errors import SettingsError
from noloco_p2p.forks import kept_from_forks

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024
LONGEST_SOCKET_PATH = 100  # bytes; Linux allows 107, macOS 103
ANSWER_TIMEOUT_S = 5.0

Handler = Callable[[], Mapping[str, Any]]


def socket_path(state_dir: Path) -> Path:
    """Return the path of the control socket.

    It is in the state folder, or in the temporary folder if the state folder's path is too long for a socket.
    """
    path = state_dir / "control.sock"
    if fits_socket(path):
        return path
    return temporary_socket(f"noloco-{blake3(os.fsencode(state_dir)).hexdigest()[:16]}.sock")


def temporary_socket(name: str) -> Path:
    """Return a path in the temporary folder, or in /tmp if the temporary folder's path is too long for a socket."""
    path = Path(tempfile.gettempdir(), name)
    return path if fits_socket(path) else Path("/tmp", name)


def fits_socket(path: Path) -> bool:
    return len(os.fsencode(path)) <= LONGEST_SOCKET_PATH


def _check_owner(path: Path) -> None:
    """Raise SettingsError if the socket belongs to another user. Anybody can create files in the temporary folder."""
    with suppress(FileNotFoundError):
        if path.lstat().st_uid not in (os.getuid(), 0):
            raise SettingsError(f"{path}: this control socket belongs to another user")


def _reply(handler: Handler | None, *, known: Iterable[str]) -> bytes:
    if handler is None:
        return json.dumps({"error": f"unknown verb; the known verbs are {', '.join(known)}"}).encode()
    try:
        return json.dumps(handler()).encode()
    except Exception as error:  # a client would otherwise learn only that nobody answers
        log.exception("a request at the control socket failed")
        return json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode()


@asynccontextmanager
async def answering(state_dir: Path, verbs: Mapping[str, Handler]) -> AsyncIterator[None]:
    """Answer the given verbs at the control socket, on the event loop of the network thread.

    Raises SettingsError if the folder cannot hold a socket.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                handler = verbs.get(json.loads(await reader.readline()).get("verb"))
                writer.write(_reply(handler, known=verbs) + b"\n")
                await writer.drain()
        except (TimeoutError, ValueError, TypeError, AttributeError, ConnectionError):
            pass  # the client sent a malformed request, or closed the connection
        finally:
            writer.close()

    path = socket_path(state_dir)
    try:
        path.unlink(missing_ok=True)  # left by a killed peer; a live one would hold the lock on the folder
        server = await asyncio.start_unix_server(answer, path=path, limit=MAX_LINE_BYTES)
        path.chmod(0o600)
    except OSError as error:
        raise SettingsError(f"{path}: cannot create the control socket: {error}; use another --state-dir") from None
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ask(state_dir: Path, verb: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any] | None:
    """Send a verb to the peer that is running in `state_dir`, and return its answer, or None if no peer is running
    there.

    Raises SettingsError if the peer does not answer.
    """
    path = socket_path(state_dir)
    _check_owner(path)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"verb": verb}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                line = answer.readline(MAX_LINE_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except (TimeoutError, OSError) as error:
            raise SettingsError(f"the peer in {state_dir} is not answering on its control socket: {error}") from None
    try:
        reply = json.loads(line)
    except ValueError:
        raise SettingsError(f"the peer in {state_dir} closed its control socket without answering") from None
    if "failed" in reply:
        raise SettingsError(f"the peer in {state_dir} cannot answer: {reply['failed']}")
    return reply


def hold(state_dir: Path) -> IO[bytes]:
    """Lock the state folder, so that only one peer, and thus only one peer per identity, runs in it on this machine.

    The lock ends when the result is closed, and the kernel releases it when the process dies. Raises SettingsError if
    another peer holds it.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = kept_from_forks(os.fdopen(os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b"))
    except OSError as error:
        raise SettingsError(f"{state_dir} cannot be used as the state folder: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise SettingsError(
            f"another peer is running in {state_dir}; stop it with `noloco leave`, or use another --state-dir"
        ) from None
    return lock


def is_held(state_dir: Path) -> bool:
    """Return whether any process, including this one, holds the lock of the state folder now."""
    try:
        with (state_dir / "lock").open("r+b") as probe:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
