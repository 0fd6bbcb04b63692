"""Run a proxy in front of the gRPC server, which listens on a Unix socket. Strangers connect to the proxy.

gRPC itself accepts connections in order of arrival, and reads 1 MiB at a time before the caller is authenticated. It
also lets a caller without a name expand 14 KB of compressed headers to 100 MB (`preamble.py`). The proxy therefore ends
the TLS connections, and looks at what callers send. A connection costs only a socket until its first byte arrives, and
reaches gRPC only after its TLS handshake. Until the caller has authenticated itself, the
number of connections from its network is limited. After that, the caller's number of connections is limited, not
counting connections on which the server has accepted a request. If there are too many connections, the oldest one is
closed. Until a request is accepted, the number of bytes that a connection can send is limited, too. A refused call ends
its connection. If a connection asks where it comes from (`tcp.py`), the proxy answers and closes it.

The proxy connects to gRPC through a Unix socket because the kernel buffers little data there, only 0.2 MB in each
direction. A TCP connection on this machine would buffer about 4 MB that a slow link has not carried yet, and gRPC would
consider that data sent.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.hosts import ip_of, is_wildcard, network_of
from noloco_p2p.net.handshake import not_proven
from noloco_p2p.net.preamble import Preamble
from noloco_p2p.splice import BLOCK_BYTES, Splice, connected
from noloco_p2p.tcp import ASK, seen_from, tune

log = logging.getLogger(__name__)

UNPROVEN_OF_ONE, UNPROVEN_IN_ALL = 16, 64  # per network (an IPv4 /24, an IPv6 /48 or one relay), and in total
UNPROVEN_S = 15.0  # the greeting takes three or four round trips
WAITING_OF_ONE, WAITING_IN_ALL = 16, 64  # per authenticated caller whose request has not been answered, and in total
UNACCEPTED_BYTES = 64 * 1024  # the bytes that a caller may send before the server has accepted its request
# The caller may send one more byte for each 16 bytes that it receives, because HTTP/2 acknowledges downloads.
ANSWERED_SHARE = 16
GREETINGS_OF_ONE = 2  # per connection, which serves one call
LAST_WORDS_S = 2.0  # the time for a refusal to reach its caller before the connection is closed
BACKLOG = 1024
TAKEN_AT_ONCE = 64  # connections that are accepted before other callbacks of the event loop run
RETRY_S = 0.3  # the pause when this process has no file descriptors left


class Inbound:
    """A connection, from its first byte to its end."""

    def __init__(self, near: socket.socket, address: str) -> None:
        self.near = near
        self.address = address  # in gRPC's form, ipv4:HOST:PORT
        self.splice: Splice | None = None
        self.num_greetings = self.num_calls = 0
        self.caller = ""  # peer id, once it is authenticated
        self.is_accepted = self.is_turned_away = False
        self.deadline: asyncio.TimerHandle | None = None

    def may_take(self) -> int:
        """Return how many more bytes the connection may send."""
        if self.is_accepted or self.splice is None:
            return BLOCK_BYTES
        return UNACCEPTED_BYTES + self.splice.given_bytes // ANSWERED_SHARE - self.splice.taken_bytes


class Quota:
    """A quota for numbered members in groups: at most `of_one` members per group, and at most `in_all` in total.

    If there are too many, the oldest member of the largest group is removed.
    """

    def __init__(self, *, of_one: int, in_all: int) -> None:
        self._of_one = of_one
        self._in_all = in_all
        self._group_of: OrderedDict[int, str] = OrderedDict()  # in the order of arrival
        self._groups: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, member: int) -> bool:
        return member in self._group_of

    def enter(self, member: int, group: str) -> list[int]:
        """Add a member to a group, and return the members that are removed to make space."""
        self._group_of[member] = group
        self._groups.setdefault(group, OrderedDict())[member] = None
        gone = [next(iter(self._groups[group]))] if len(self._groups[group]) > self._of_one else []
        if not gone and len(self) > self._in_all:
            gone = [self._first_of_the_largest()]
        for each in gone:
            self.leave(each)
        return gone

    def leave(self, member: int) -> None:
        """Remove the member with this number, if there is one."""
        group = self._group_of.pop(member, None)
        if group is not None:
            del self._groups[group][member]
            if not self._groups[group]:
                del self._groups[group]

    def _first_of_the_largest(self) -> int:
        largest = max(map(len, self._groups.values()))
        return next(member for member, group in self._group_of.items() if len(self._groups[group]) == largest)


class Proxy:
    """A proxy for incoming connections.

    With `tls`, callers have to use TLS and prove who they are. Otherwise, all callers are accepted, which is meant for
    measurements. For each local port from which tunnelled calls arrive, `tunnelled` contains the relay that forwards
    them.
    """

    def __init__(self, *, tls: ssl.SSLContext | None, tunnelled: Mapping[int, str]) -> None:
        self._tls = tls
        self._tunnelled = tunnelled
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder: Path | None = None  # contains the Unix sockets
        self._inbound: dict[int, Inbound] = {}  # by number
        self._num_came = 0
        self._unproven = Quota(of_one=UNPROVEN_OF_ONE, in_all=UNPROVEN_IN_ALL)
        self._waiting = Quota(of_one=WAITING_OF_ONE, in_all=WAITING_IN_ALL)

    def listen(self, host: str, port: int) -> int:
        """Listen on the port, and return the actual port.

        Raises OSError if the port is in use, or if the host is not an address of this machine.
        """
        self._listener = _listening(host, port)
        self._folder = Path(tempfile.mkdtemp(prefix="noloco-"))  # no other user can enter this folder
        return self._listener.getsockname()[1]

    @property
    def behind(self) -> Path:
        """Return the path of the Unix socket on which gRPC listens."""
        assert self._folder is not None
        return self._folder / "grpc"

    def open(self) -> None:
        """Accept connections from now on. Call this on the event loop once gRPC is listening."""
        assert self._listener is not None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._take)

    def shut(self) -> None:
        """Stop listening. Open connections stay open."""
        if self._listener is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def take(self, near: socket.socket) -> None:
        """Serve a connection that this machine opened for a peer that calls it."""
        try:
            if self._listener is not None:
                self._enter(near, near.getpeername())
                return
        except OSError as error:
            log.debug("a connection was closed immediately: %s", error)
        near.close()

    def close(self) -> None:
        self.shut()
        for number in list(self._inbound):
            self._drop(number)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # reports of the server, where `peer` is gRPC's name for the connection

    def address(self, peer: str) -> str:
        """Return the real address of the caller, in gRPC's form.

        Raises CorruptPayload for a caller that bypassed the proxy, and Refused for a caller that was already turned
        away.
        """
        inbound = self._inbound_of(peer)
        if inbound.is_turned_away:
            raise not_proven("an earlier call on this connection was refused")
        return inbound.address

    def greeted(self, peer: str) -> None:
        """Count a greeting. Raises Refused if there were too many greetings on this connection."""
        inbound = self._inbound_of(peer)
        inbound.num_greetings += 1
        if inbound.num_greetings > GREETINGS_OF_ONE:
            raise not_proven(f"received more than {GREETINGS_OF_ONE} greetings on one connection")

    def proven(self, peer: str, caller: str) -> None:
        """Record that the caller is authenticated. Raises Refused if another peer was authenticated on the same
        connection.
        """
        inbound, number = self._inbound_of(peer), _number(peer)
        if inbound.caller not in ("", caller):
            raise not_proven("another peer has already been authenticated on this connection")
        inbound.caller = caller
        inbound.num_calls += 1
        if number in self._unproven:
            self._unproven.leave(number)
            self._wait(number, caller)

    def turned_away(self, peer: str) -> None:
        """Record that a call was refused.

        Nothing more is read, and the connection closes once the caller has had time to read the reason.
        """
        number = _number(peer)
        inbound = self._inbound.get(number)
        if inbound is None or inbound.is_turned_away or not self._tls:
            return
        assert inbound.splice is not None
        assert self._loop is not None
        inbound.is_turned_away = True
        inbound.splice.stop_taking()
        self._end_deadline(number)
        inbound.deadline = self._loop.call_later(LAST_WORDS_S, self._drop, number)

    def accepted(self, peer: str) -> None:
        """Record that an offer, a connection or an upload was accepted, so that the call is no longer limited or
        dropped.
        """
        number = _number(peer)
        if number in self._inbound and not self._inbound[number].is_turned_away:
            self._unproven.leave(number)
            self._waiting.leave(number)
            self._inbound[number].is_accepted = True
            self._end_deadline(number)

    def ended(self, peer: str) -> None:
        """Record that a call of an authenticated peer is over, so that its connection is limited again."""
        number = _number(peer)
        inbound = self._inbound.get(number)
        if inbound is None or not self._tls:
            return
        inbound.num_calls -= 1
        if not inbound.num_calls and not inbound.is_turned_away and number not in self._waiting:
            self._wait(number, inbound.caller)

    def _inbound_of(self, peer: str) -> Inbound:
        inbound = self._inbound.get(_number(peer))
        if inbound is None:
            raise CorruptPayload("this connection did not come through this peer's public port")
        return inbound

    # connections

    def _take(self) -> None:
        for _ in range(TAKEN_AT_ONCE):
            if self._listener is None:
                return
            try:
                near, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # it is already closed
                continue
            except OSError as error:
                log.debug("could not accept a connection: %s", error)
                self._pause(self._listener)
                return
            try:
                self._enter(near, address)
            except OSError as error:  # it is already closed
                log.debug("a connection was closed immediately: %s", error)
                near.close()

    def _pause(self, listener: socket.socket) -> None:
        assert self._loop is not None
        self._loop.remove_reader(listener)
        self._loop.call_later(RETRY_S, self._go_on)

    def _go_on(self) -> None:
        if self._listener is not None and self._loop is not None:
            self._loop.add_reader(self._listener, self._take)

    def _enter(self, near: socket.socket, address: Any) -> None:
        assert self._loop is not None
        tune(near)
        host, port = address[:2]
        self._num_came += 1
        number = self._num_came
        inbound = self._inbound[number] = Inbound(near, named(host, port))
        self._loop.add_reader(near, self._first_byte, number)
        if not self._tls:
            inbound.is_accepted = True
            return
        inbound.deadline = self._loop.call_later(UNPROVEN_S, self._drop, number)
        relay = self._tunnelled.get(port) if _is_own(near) else None
        for each in self._unproven.enter(number, relay or network_of(host)):
            self._drop(each)

    def _first_byte(self, number: int) -> None:
        assert self._loop is not None
        inbound = self._inbound[number]
        self._loop.remove_reader(inbound.near)
        if _answers(inbound.near):
            self._drop(number)
        elif self._tls:
            try:
                near = self._tls.wrap_socket(inbound.near, server_side=True, do_handshake_on_connect=False)
            except OSError:  # it is already closed
                inbound.near.close()
                self._forget(number)
                return
            inbound.near = near
            self._loop.add_reader(near, self._shake_hands, number, near)
        else:
            self._open(number)

    def _shake_hands(self, number: int, near: ssl.SSLSocket) -> None:
        assert self._loop is not None
        try:
            near.do_handshake()
        except ssl.SSLWantReadError:
            return
        except OSError as error:
            log.debug("a TLS handshake failed: %s", error)
            self._drop(number)
            return
        self._loop.remove_reader(near)
        self._open(number)

    def _open(self, number: int) -> None:
        """Connect a caller to the server."""
        inbound = self._inbound[number]
        try:
            inbound.splice = Splice(
                inbound.near,
                connected(self.behind, own_path=self.behind.with_name(str(number))),
                may_take=inbound.may_take,
                admits=Preamble().admits if self._tls else lambda data: True,
                on_end=lambda: self._forget(number),
            )
        except OSError as error:
            log.debug("could not forward a connection: %s", error)
            inbound.near.close()
            self._forget(number)

    def _wait(self, number: int, caller: str) -> None:
        self._end_deadline(number)
        for each in self._waiting.enter(number, caller):
            self._drop(each)

    def _drop(self, number: int) -> None:
        inbound = self._inbound[number]
        if inbound.splice is not None:
            inbound.splice.close()
            return
        if self._loop is not None:
            self._loop.remove_reader(inbound.near)
        inbound.near.close()
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._end_deadline(number)
        del self._inbound[number]
        self._unproven.leave(number)
        self._waiting.leave(number)

    def _end_deadline(self, number: int) -> None:
        if deadline := self._inbound[number].deadline:
            deadline.cancel()


def named(host: str, port: int) -> str:
    """Return the address in gRPC's form, such as ipv4:192.0.2.7:29500."""
    address = ip_of(host)
    return f"ipv4:{address}:{port}" if address.version == 4 else f"ipv6:[{host}]:{port}"


def _answers(near: socket.socket) -> bool:
    """Answer a connection that asks where it comes from, and return whether it asked."""
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


def _is_own(near: socket.socket) -> bool:
    """Return whether both ends of a connection are on this machine."""
    return near.getpeername()[0] == near.getsockname()[0]


def _listening(host: str, port: int) -> socket.socket:
    plain = host.strip("[]")
    if is_wildcard(host) and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 is switched off
            listener = socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
            listener.setblocking(False)
            return listener
    family, _, _, _, address = socket.getaddrinfo(plain, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener
