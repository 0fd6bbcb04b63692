"""Run a proxy in front of the gRPC server, which listens on a Unix socket. Strangers connect to the proxy.

gRPC itself accepts connections in order of arrival, and reads 1 MiB at a time before the caller is authenticated. It
also lets a caller expand 14 KB of compressed headers to 100 MB (`Preamble`). The proxy therefore ends the TLS
connections, and looks at what callers send. A connection costs only a socket until its first byte arrives, and reaches
gRPC only after its TLS handshake, in which the caller proves its peer id (`session.py`). Until the caller has made a
call, the number of connections from its network is limited. After that, the caller's number of connections is limited,
not counting connections on which the server has accepted a request. If there are too many connections, the oldest one
is closed. Until a request is accepted, the number of bytes that a connection can send is limited, too. A refused call
ends its connection. If a connection asks where it comes from (`tcp.py`), the proxy answers and closes it.

The proxy connects to gRPC through a Unix socket because the kernel buffers little data there, only 0.2 MB in each
direction. A TCP connection on this machine would buffer about 4 MB that a slow link has not carried yet, and gRPC would
consider that data sent.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import socket
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from noloco_p2p.control import temporary_socket
from noloco_p2p.errors import CorruptPayload, Unreachable
from noloco_p2p.forks import kept_from_forks
from noloco_p2p.hosts import ip_of, is_wildcard, network_of
from noloco_p2p.net.session import caller_in
from noloco_p2p.owned_tasks import OwnedTasks, end_tasks
from noloco_p2p.tcp import ASK, BLOCK_BYTES, Splice, ready, seen_from, tune

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Hashable)

UNPROVEN_OF_ONE, UNPROVEN_IN_ALL = 16, 64  # per network (an IPv4 /24, an IPv6 /48 or one relay), and in total
UNPROVEN_S = 15.0  # from the connection to its first call, which takes four round trips
WAITING_OF_ONE, WAITING_IN_ALL = 16, 64  # per authenticated caller whose request has not been answered, and in total
UNACCEPTED_BYTES = 64 * 1024  # the bytes that a caller may send before the server has accepted its request
# The caller may send one more byte for each 16 bytes that it receives, because HTTP/2 acknowledges downloads.
ANSWERED_SHARE = 16
LAST_WORDS_S = 2.0  # the time for a refusal to reach its caller before the connection is closed
BACKLOG = 1024
PREFACE_BYTES, FRAME_HEADER_BYTES = 24, 9  # of HTTP/2
SETTINGS, ACK = 4, 1
HEADERS, PUSH_PROMISE, CONTINUATION = 1, 5, 9  # the frames that contain headers
NEW_S = 60.0  # a socket in a folder younger than this may not be listening yet
RETRY_S = 0.3  # the pause when this process has no file descriptors left


class Quota(Generic[M]):
    """A quota for members in groups: at most `of_one` members per group, and at most `in_all` in total.

    If there are too many, the oldest member of the largest group is removed.
    """

    def __init__(self, *, of_one: int, in_all: int) -> None:
        self._of_one = of_one
        self._in_all = in_all
        self._group_of: dict[M, str] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, member: M) -> bool:
        return member in self._group_of

    def enter(self, member: M, group: str) -> list[M]:
        """Add a member to a group, and return the members that are removed to make space."""
        self._group_of[member] = group
        sizes = Counter(self._group_of.values())
        if sizes[group] <= self._of_one and len(self) <= self._in_all:
            return []
        crowded = {group} if sizes[group] > self._of_one else {g for g in sizes if sizes[g] == max(sizes.values())}
        gone = next(each for each, its_group in self._group_of.items() if its_group in crowded)
        self.leave(gone)
        return [gone]

    def leave(self, member: M) -> None:
        """Remove a member, if it is one."""
        self._group_of.pop(member, None)


class Preamble:
    """The frames of a caller (RFC 9113) up to its acknowledgement of the server's settings.

    HTTP/2 compresses headers. With HPACK (RFC 7541), one byte can repeat a header of 4 KB that was sent before. A
    server can forbid this table, and limit the size of all headers together, but gRPC applies these settings only once
    the caller has acknowledged them. Until then, it keeps up to 16 MiB of headers for 14 KB that it has received, and
    builds a message about them that is equally long. gRPC's own callers acknowledge the settings before they send their
    first headers.
    """

    def __init__(self) -> None:
        self._num_skipped = PREFACE_BYTES  # the bytes until the next frame begins
        self._header = b""  # of the frame that begins
        self._is_over = False

    def admits(self, data: memoryview) -> bool:
        """Return whether the caller may send this data next."""
        while data and not self._is_over:
            if self._num_skipped:
                num_bytes = min(self._num_skipped, len(data))
                self._num_skipped -= num_bytes
            else:
                num_bytes = FRAME_HEADER_BYTES - len(self._header)
                self._header += data[:num_bytes]
            data = data[num_bytes:]
            if len(self._header) == FRAME_HEADER_BYTES:
                kind, flags = self._header[3:5]
                if kind in (HEADERS, PUSH_PROMISE, CONTINUATION):
                    return False
                self._is_over = kind == SETTINGS and bool(flags & ACK)
                self._num_skipped, self._header = int.from_bytes(self._header[:3]), b""
        return True


class Inbound:
    """A connection, from its first byte to its end, and everything that this peer knows about its caller.

    `address` says where it comes from, for the log. `group` is the network or the relay that counts for it until the
    caller has made a call. `peer_id` and `membership` are those of the caller, once it is authenticated. Without TLS,
    they stay empty.
    """

    def __init__(self, proxy: Proxy, *, number: int, address: str, group: str) -> None:
        self.address = address
        self.peer_id, self.membership = "", b""
        self.is_accepted = not proxy.tls
        self._proxy = proxy
        self._number = number
        self._group = group
        self._num_calls = 0
        self.is_turned_away = False
        self._deadline = asyncio.timeout(UNPROVEN_S if proxy.tls else None)
        self._serving: asyncio.Task[None] | None = None

    # reports of the server

    def began(self) -> None:
        """Record that a call is admitted."""
        self._num_calls += 1
        if self in self._proxy.unproven:
            self._wait()

    def turned_away(self) -> None:
        """Record that a call was refused. The connection closes once the caller has had time to read the reason."""
        if self._proxy.tls and not self.is_turned_away:
            self.is_turned_away = True
            self._limit(LAST_WORDS_S)

    def accepted(self) -> None:
        """Record that an offer, a connection or an upload was accepted, so that the call is no longer limited or
        dropped.
        """
        if not self.is_turned_away:
            self._leave_quotas()
            self.is_accepted = True
            self._limit(None)

    def ended(self) -> None:
        """Record that a call is over, so that its connection is limited again."""
        self._num_calls -= 1
        is_idle = not self._num_calls and not self.is_turned_away and self not in self._proxy.waiting
        if is_idle and self._is_open() and self._proxy.tls:
            self._wait()

    # its bytes

    def start(self, near: socket.socket) -> None:
        self._serving = self._proxy.tasks.start(self._serve(near))
        self._serving.add_done_callback(lambda _: self._over(near))  # called even if the task was never started
        if self._proxy.tls:
            _close(self._proxy.unproven.enter(self, self._group))

    def close(self) -> None:
        if self._serving:
            self._serving.cancel()

    async def _serve(self, near: socket.socket) -> None:
        """Carry the connection to the server and back until its end."""
        tls, behind = self._proxy.tls, self._proxy.behind
        try:
            async with self._deadline:
                await ready(near)
                if _answers(near):
                    return
                if tls:
                    near = await _shaken(near, tls)
                    self.peer_id, self.membership = caller_in(near.getpeercert(binary_form=True) or b"")
                far = connected(behind, own_path=behind.with_name(str(self._number)))
                self._splice = Splice(
                    near, far, may_take=self._may_take, admits=Preamble().admits if tls else lambda data: True
                )
                await self._splice.run()
        except (OSError, CorruptPayload) as error:  # includes TimeoutError
            log.debug("the connection from %s has ended: %s", self.address, error)
        finally:
            near.close()

    def _over(self, near: socket.socket) -> None:
        near.close()
        self._leave_quotas()
        self._proxy.forget(self._number)

    def _may_take(self) -> int:
        """Return how many more bytes the connection may send."""
        if self.is_accepted:
            return BLOCK_BYTES
        return UNACCEPTED_BYTES + self._splice.given_bytes // ANSWERED_SHARE - self._splice.taken_bytes

    def _wait(self) -> None:
        self._proxy.unproven.leave(self)
        self._limit(None)
        _close(self._proxy.waiting.enter(self, self.peer_id))

    def _limit(self, seconds: float | None) -> None:
        """Set the time limit for the rest of the connection."""
        if self._is_open() and not self._deadline.expired():
            self._deadline.reschedule(seconds and asyncio.get_running_loop().time() + seconds)

    def _is_open(self) -> bool:
        return self._serving is not None and not self._serving.done()

    def _leave_quotas(self) -> None:
        self._proxy.unproven.leave(self)
        self._proxy.waiting.leave(self)


def _close(connections: Iterable[Inbound]) -> None:
    for each in connections:
        each.close()


class Proxy:
    """A proxy for incoming connections.

    With `tls`, callers have to use TLS and prove who they are. Otherwise, all callers are accepted, which is meant for
    measurements.
    """

    def __init__(self, *, tls: ssl.SSLContext | None) -> None:
        self.tls = tls
        self.unproven = Quota[Inbound](of_one=UNPROVEN_OF_ONE, in_all=UNPROVEN_IN_ALL)
        self.waiting = Quota[Inbound](of_one=WAITING_OF_ONE, in_all=WAITING_IN_ALL)
        self.tasks = OwnedTasks("a connection of another peer")
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._folder: Path | None = None  # contains the Unix sockets
        self._inbound: dict[int, Inbound] = {}  # by number
        self._num_came = 0

    def listen(self, host: str, port: int) -> int:
        """Listen on the port, and return the actual port.

        Raises OSError if the port is in use, or if the host is not an address of this machine.
        """
        self._listener = _listening(host, port)
        place = temporary_socket("noloco-12345678/1234567890").parents[1]  # where the paths of sockets are short enough
        _remove_stale(place)
        self._folder = Path(tempfile.mkdtemp(prefix="noloco-", dir=place))  # no other user can enter this folder
        return self._listener.getsockname()[1]

    @property
    def behind(self) -> Path:
        """Return the path of the Unix socket on which gRPC listens."""
        assert self._folder is not None
        return self._folder / "grpc"

    def open(self) -> None:
        """Accept connections from now on. Call this on the event loop once gRPC is listening."""
        assert self._listener is not None
        self._accepting = asyncio.create_task(self._accept(self._listener), name="accept connections")

    async def shut(self) -> None:
        """Stop listening. Open connections stay open."""
        if self._accepting:
            await end_tasks([self._accepting])
        if self._listener:
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        await self.shut()
        await self.tasks.stop(grace_s=0.0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def take(self, near: socket.socket, relay: str = "") -> None:
        """Serve a connection that was accepted, that this machine opened, or that a relay brings."""
        try:
            if self._listener is None:
                raise ConnectionAbortedError("the server has stopped")
            number = self._num_came + 1
            if relay:
                near.setblocking(False)
                address, group = f"the relay {relay}", relay
            else:
                tune(near)
                host, port = near.getpeername()[:2]
                address, group = f"{ip_of(host)} port {port}", network_of(host)
        except OSError as error:
            log.debug("a connection was closed immediately: %s", error)
            near.close()
            return
        self._num_came = number
        self._inbound[number] = Inbound(self, number=number, address=address, group=group)
        self._inbound[number].start(near)

    def inbound(self, peer: str) -> Inbound:
        """Return the connection that gRPC calls `peer`. Raises Unreachable if it has ended, and else CorruptPayload."""
        number = _number(peer)
        if found := self._inbound.get(number):
            return found
        if 0 < number <= self._num_came:
            raise Unreachable("this connection has ended")
        raise CorruptPayload("this connection did not come through this peer's public port")

    def forget(self, number: int) -> None:
        del self._inbound[number]

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(listener)
            except ConnectionError:  # it is already closed
                continue
            except OSError as error:  # for example, temporarily out of file descriptors
                log.debug("could not accept a connection: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            self.take(near)


async def _shaken(near: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
    """Return the connection after the TLS handshake of its caller. Raises OSError if the handshake fails."""
    shaken = tls.wrap_socket(near, server_side=True, do_handshake_on_connect=False)
    try:
        while True:
            try:
                shaken.do_handshake()
                return shaken
            except ssl.SSLWantReadError:
                await ready(shaken)
    except BaseException:
        shaken.close()
        raise


def _answers(near: socket.socket) -> bool:
    """Answer a connection that asks where it comes from, and return whether it asked."""
    if near.family == socket.AF_UNIX:  # from a relay, which knows
        return False
    with suppress(OSError):  # the connection has ended, so the next read fails
        if near.recv(1, socket.MSG_PEEK) == ASK:
            near.recv(1)  # with an unread byte, closing would reset the connection and lose the answer
            near.send(seen_from(near))
            return True
    return False


def _number(peer: str) -> int:
    """Return NUMBER if gRPC names the connection unix:FOLDER/NUMBER, or -1 if its name has another form."""
    kind, _, path = peer.partition(":")
    number = path.rpartition("/")[2]
    return int(number) if kind == "unix" and number.isdecimal() else -1


def _remove_stale(place: Path) -> None:
    """Remove the folders of this user's peers that were killed: nobody listens on their sockets any more."""
    for path in place.glob("noloco-*/grpc"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            is_new = time.time() - path.stat().st_mtime < NEW_S
            if is_new or path.parent.lstat().st_uid != os.getuid():
                continue
            probe.setblocking(False)
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                shutil.rmtree(path.parent, ignore_errors=True)


def _listening(host: str, port: int) -> socket.socket:
    plain = host.strip("[]")
    if is_wildcard(host) and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is switched off
            listener = socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
            listener.setblocking(False)
            return kept_from_forks(listener)
    family, _, _, _, address = socket.getaddrinfo(plain, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return kept_from_forks(listener)


def connected(server: Path, *, own_path: Path) -> socket.socket:
    """Connect to the server on the Unix socket `server`, and return the connection.

    The connection is bound to `own_path`, by which the server identifies it. The file at `own_path` is removed right
    away. Raises OSError if the server does not accept the connection.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.bind(str(own_path))
        try:
            connection.connect(str(server))
        finally:
            own_path.unlink()
    except OSError:
        connection.close()
        raise
    return connection
