"""Runs p2pd, the libp2p daemon from hivemind's wheel, as a child process.

hivemind itself starts p2pd in the terminal's process group, where Ctrl-C kills it before the peer can announce that it
is leaving. Here, p2pd runs in a session of its own. It ends when its client has closed the connection, which also
happens when this process is killed, or FIRST_CLIENT_S after its start if no client came.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import psutil

from noloco_p2p.control import temporary_socket
from noloco_p2p.errors import DirectoryError
from noloco_p2p.hosts import is_wildcard
from noloco_p2p.swarm.addresses import announce_multiaddr, listen_multiaddr
from noloco_p2p.swarm.launch import WITHOUT_UDP, with_parent

logger = logging.getLogger(__name__)

START_S = 60.0  # an idle machine needs a tenth of a second
STOP_S = 3.0
EXIT_CODE_S = 1.0  # time to wait for the exit code of p2pd after the end of its output
FIRST_CLIENT_S = 30  # p2pd exits after this time without a client
SOCKET_PREFIX = "noloco-"
# The size limit for a request or an answer. p2pd buffers the whole message, and by default it would accept 4 MiB from
# every stream.
MAX_MESSAGE_BYTES = 256 * 1024
MEMORY = "128MiB"  # Above this, p2pd collects garbage continuously.
MAX_MEMORY_BYTES = 512 << 20  # Above this, p2pd is restarted. It uses 60 MiB when idle.


@dataclass(frozen=True, slots=True)
class ListenOn:
    """The address on which the daemon listens and the one it announces. If the port is 0, the system chooses one."""

    host: str
    port: int = 0
    announce_host: str | None = None
    announce_port: int = 0  # set if a router maps another port to this one

    def arguments(self) -> list[str]:
        arguments = [f"-hostAddrs={listen_multiaddr(self.host, self.port)}"]
        if self.announce_host:
            announced = [announce_multiaddr(self.announce_host, self.announce_port or self.port)]
            if not is_wildcard(self.host):
                announced.append(listen_multiaddr(self.host, self.port))
            arguments.append(f"-announceAddrs={','.join(announced)}")
        return arguments


class Daemon:
    """A p2pd process. Create it with `start()`, attach a client to `control_socket`, and always call `stop()`."""

    def __init__(self, process: asyncio.subprocess.Process, control_socket: str) -> None:
        self.control_socket = control_socket
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=5)
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read_output(), name="p2pd output")

    @classmethod
    async def start(cls, identity_path: Path, listen_on: ListenOn) -> Daemon:
        """Start p2pd, and return once it is ready.

        Raises DirectoryError if the port is taken, the binary is missing, or p2pd does not start in time.
        """
        if listen_on.port:
            probe_port(listen_on.host, listen_on.port)
        control_socket = str(temporary_socket(f"{SOCKET_PREFIX}{secrets.token_hex(8)}.sock"))
        arguments = _arguments(identity_path, listen_on, control_socket)
        command = with_parent(WITHOUT_UDP, str(_binary()), *arguments)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | {"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": MEMORY},
                start_new_session=True,
            )
        except OSError as error:
            raise DirectoryError(f"could not start p2pd: {error}; this machine may be out of memory") from error
        daemon = cls(process, control_socket)
        try:
            await daemon._wait_ready(listen_on)
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> str:
        """Wait until the process has ended, and return a description of how it ended."""
        code = await self._wait()
        if code is None:
            return f"exit code unknown: {self._said()}"
        return f"exit code {code}: {self._said()}" if code >= 0 else f"signal {-code}"

    async def stop(self) -> None:
        """End the process with SIGTERM, or with SIGKILL after STOP_S, and remove its socket."""
        try:
            self._signal("terminate")
            try:
                await asyncio.wait_for(self._wait(), STOP_S)
            except TimeoutError:
                self._signal("kill")
                await self._wait()
        finally:
            self._signal("kill")  # in case this call was cancelled
            self._reader.cancel()
            with suppress(FileNotFoundError):
                os.unlink(self.control_socket)
        await asyncio.wait({self._reader})

    async def _wait(self) -> int | None:
        """Wait until the process has ended. Returns its exit code, or None if the event loop does not report one.

        libuv uses SIGCHLD to notice that a child has ended. Some libraries break this by resetting all signal handlers,
        as Lightning does after training. The end of the child's output is therefore treated as its exit, too.
        """
        exits = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({exits, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({exits}, timeout=EXIT_CODE_S)
            return exits.result() if exits.done() else None
        finally:
            exits.cancel()

    def memory_bytes(self) -> int:
        """Return the resident memory of the process, or 0 if it has ended."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.Error:
            return 0

    def kill(self) -> None:
        self._signal("kill")

    def _signal(self, verb: str) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                getattr(self._process, verb)()

    async def _wait_ready(self, listen_on: ListenOn) -> None:
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({ready, self._reader}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._ready.is_set():
            return
        if not self._reader.done():
            raise DirectoryError(
                f"p2pd did not start within {START_S:.0f} s; the machine may be overloaded, so try again"
            )
        if "address already in use" in self._said():
            raise DirectoryError(_taken(listen_on.host, listen_on.port))
        raise DirectoryError(f"could not start p2pd: {self._said() or 'it printed nothing'}")

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # the line is longer than the buffer, and the rest of it follows
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            logger.debug("p2pd: %s", text)
            self._last_lines.append(text)
            if text.startswith("Peer ID:"):  # printed after the control socket was created
                self._ready.set()

    def _said(self) -> str:
        return " | ".join(self._last_lines)


def probe_port(host: str, port: int) -> int:
    """Check that a TCP port is free, and return it. If `port` is 0, return any free port.

    p2pd binds its port with SO_REUSEPORT, so two daemons on the same port would silently take each other's connections.
    Only a bind without that option detects this. Raises DirectoryError if the port is taken or the host is not an
    address of this machine.
    """
    plain_host = listen_multiaddr(host, port).split("/")[2]
    try:
        with socket.socket(socket.AF_INET6 if ":" in plain_host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
            probe.bind((plain_host, port))
            return probe.getsockname()[1]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise DirectoryError(_taken(host, port)) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise DirectoryError(
                f"{host} is not an address of this machine; "
                "use --listen 0.0.0.0:PORT to listen on all its network interfaces"
            ) from None
        raise DirectoryError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another address with --listen HOST:PORT"
        ) from None


def _taken(host: str, port: int) -> str:
    return (
        f"port {port} on {host} is already in use, perhaps by another peer; stop the program that uses it, "
        "or choose another port with --listen HOST:PORT (libp2p uses PORT+1; port 0 selects free ports)"
    )


def _binary() -> Path:
    path = Path(str(files("hivemind.hivemind_cli").joinpath("p2pd")))
    if not os.access(path, os.X_OK):
        raise DirectoryError(
            f"{path} is missing or not executable; run `pip install --force-reinstall hivemind` to reinstall hivemind"
        )
    return path


def _arguments(identity_path: Path, listen_on: ListenOn, control_socket: str) -> list[str]:
    """Return the flags of p2pd. The project uses only its connections, streams and requests.

    The DHT of p2pd is a client only: it looks up peers at plain hivemind nodes. AutoNAT and pubsub are off. The relay
    of p2pd stays on regardless of the flags, with libp2p's limits.
    """
    return [
        f"-listen=/unix{control_socket}",
        f"-id={identity_path}",
        *listen_on.arguments(),
        "-dhtClient=1",
        f"-persistentConnMaxMsgSize={MAX_MESSAGE_BYTES}",
        f"-idleTimeout={FIRST_CLIENT_S}s",
        "-b=0",  # no bootstraps, because unreachable ones would end the daemon; peers are dialled later
        "-connManager=1",
        "-tls=1",
        "-autonat=0",
        "-natPortMap=0",
        "-relay=0",
    ]
