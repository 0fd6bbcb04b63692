"""A proxy in front of the gRPC server, to which strangers connect; the server listens on a Unix socket of this user.

gRPC alone accepts connections in order of arrival, and reads 1 MiB at a time before the caller is authenticated. Here a
connection costs only a socket until its first byte arrives. Until the caller has authenticated, the connections of
its network are limited, and after that those of the caller, except while the server has accepted something; the oldest
one makes room. Until something is accepted, the bytes that a connection may send are limited. A refused call ends its
connection.
A connection that asks where it comes from (tcp.py) is answered here, and ends.

The socket behind the proxy is a Unix socket because the kernel holds little for it: 0.2 MB each way. Over TCP on this
machine it takes some 4 MB that a slow line has not carried, and gRPC believes that they are sent.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.hosts import ip_of, is_wildcard, network_of
from noloco_p2p.net.handshake import not_proven
from noloco_p2p.splice import BLOCK_BYTES, Splice, connected
from noloco_p2p.tcp import ASK, seen_from, tune

log = logging.getLogger(__name__)

UNPROVEN_OF_ONE, UNPROVEN_IN_ALL = 16, 64  # of one network: a /24 of IPv4, a /48 of IPv6, or one relay
UNPROVEN_S = 15.0  # the greeting takes three or four round trips
WAITING_OF_ONE, WAITING_IN_ALL = 16, 64  # of one authenticated caller whose offer or question is not answered yet
UNACCEPTED_BYTES = 64 * 1024  # that a connection may send until the server has accepted something
ANSWERED_SHARE = 16  # one more byte may come in for each 16 bytes sent, because HTTP/2 acknowledges a long download
GREETINGS_OF_ONE = 2  # on one connection, which is for one call
LAST_WORDS_S = 2.0  # for a refusal to reach its caller, before the connection is closed
BACKLOG = 1024
TAKEN_AT_ONCE = 64  # connections, before other callbacks of the loop run
RETRY_S = 0.3  # when this process has no file descriptor left


class Inbound:
    """One connection, from its first byte to its end."""

    def __init__(self, near: socket.socket, address: str) -> None:
        self.near = near
        self.address = address  # in gRPC's form, ipv4:HOST:PORT
        self.splice: Splice | None = None
        self.num_greetings = self.num_calls = 0
        self.caller = ""  # peer id, once it is authenticated
        self.is_accepted = self.is_turned_away = False
        self.deadline: asyncio.TimerHandle | None = None

    def may_take(self) -> int:
        """Bytes."""
        if self.is_accepted or self.splice is None:
            return BLOCK_BYTES
        return UNACCEPTED_BYTES + self.splice.given_bytes // ANSWERED_SHARE - self.splice.taken_bytes


class Quota:
    """Members by number, each in a group: at most `of_one` per group and `in_all` in total.

    If there are too many, the oldest of the largest group is removed.
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
        """Add a member. Returns those that are removed for it."""
        self._group_of[member] = group
        self._groups.setdefault(group, OrderedDict())[member] = None
        gone = [next(iter(self._groups[group]))] if len(self._groups[group]) > self._of_one else []
        if not gone and len(self) > self._in_all:
            gone = [self._first_of_the_largest()]
        for each in gone:
            self.leave(each)
        return gone

    def leave(self, member: int) -> None:
        """Remove a member; does nothing if it is not one."""
        group = self._group_of.pop(member, None)
        if group is not None:
            del self._groups[group][member]
            if not self._groups[group]:
                del self._groups[group]

    def _first_of_the_largest(self) -> int:
        largest = max(map(len, self._groups.values()))
        return next(member for member, group in self._group_of.items() if len(self._groups[group]) == largest)


class Proxy:
    """`asks`: whether callers have to prove who they are; if not, all are accepted as they come, for measurements.

    `tunnelled`: ports of this machine from which calls come by a tunnel -> the relay they come from.
    """

    def __init__(self, *, asks: bool, tunnelled: Mapping[int, str]) -> None:
        self._asks = asks
        self._tunnelled = tunnelled
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder: Path | None = None  # of the Unix sockets
        self._inbound: dict[int, Inbound] = {}  # by number
        self._num_came = 0
        self._unproven = Quota(of_one=UNPROVEN_OF_ONE, in_all=UNPROVEN_IN_ALL)
        self._waiting = Quota(of_one=WAITING_OF_ONE, in_all=WAITING_IN_ALL)

    def listen(self, host: str, port: int) -> int:
        """Return the actual port. Raises OSError when it is taken, or the host is not an address of this machine."""
        self._listener = _listening(host, port)
        self._folder = Path(tempfile.mkdtemp(prefix="noloco-"))  # nobody else may enter
        return self._listener.getsockname()[1]

    @property
    def behind(self) -> Path:
        """The Unix socket on which gRPC listens."""
        assert self._folder is not None
        return self._folder / "grpc"

    def open(self) -> None:
        """Accept connections from now on; called on the event loop once gRPC listens."""
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
            log.debug("a connection ended at once: %s", error)
        near.close()

    def close(self) -> None:
        self.shut()
        for number in list(self._inbound):
            self._drop(number)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # reports of the server, by gRPC's name of the connection

    def address(self, peer: str) -> str:
        """The real address of the caller, in gRPC's form.

        Raises CorruptPayload for a caller that bypassed the proxy, and Refused for one that was already turned away.
        """
        inbound = self._inbound_of(peer)
        if inbound.is_turned_away:
            raise not_proven("a call on this connection was turned away")
        return inbound.address

    def greeted(self, peer: str) -> None:
        """Raises Refused when a connection greets too often."""
        inbound = self._inbound_of(peer)
        inbound.num_greetings += 1
        if inbound.num_greetings > GREETINGS_OF_ONE:
            raise not_proven(f"more than {GREETINGS_OF_ONE} greetings arrived on one connection")

    def proven(self, peer: str, caller: str) -> None:
        """The caller is authenticated. Raises Refused when another peer was authenticated on the same connection."""
        inbound, number = self._inbound_of(peer), _number(peer)
        if inbound.caller not in ("", caller):
            raise not_proven("this connection belongs to another peer")
        inbound.caller = caller
        inbound.num_calls += 1
        if number in self._unproven:
            self._unproven.leave(number)
            self._wait(number, caller)

    def turned_away(self, peer: str) -> None:
        """A call was refused: read nothing more, and close the connection once the caller could read the reason."""
        number = _number(peer)
        inbound = self._inbound.get(number)
        if inbound is None or inbound.is_turned_away or not self._asks:
            return
        assert inbound.splice is not None
        assert self._loop is not None
        inbound.is_turned_away = True
        inbound.splice.stop_taking()
        self._end_deadline(number)
        inbound.deadline = self._loop.call_later(LAST_WORDS_S, self._drop, number)

    def accepted(self, peer: str) -> None:
        """An offer, a connection or an upload was accepted: the call is no longer limited or dropped."""
        number = _number(peer)
        if number in self._inbound and not self._inbound[number].is_turned_away:
            self._unproven.leave(number)
            self._waiting.leave(number)
            self._inbound[number].is_accepted = True
            self._end_deadline(number)

    def ended(self, peer: str) -> None:
        """A call of an authenticated peer is over: its connection is limited again, as if nothing had been accepted."""
        number = _number(peer)
        inbound = self._inbound.get(number)
        if inbound is None or not self._asks:
            return
        inbound.num_calls -= 1
        if not inbound.num_calls and not inbound.is_turned_away and number not in self._waiting:
            self._wait(number, inbound.caller)

    def _inbound_of(self, peer: str) -> Inbound:
        inbound = self._inbound.get(_number(peer))
        if inbound is None:
            raise CorruptPayload("this connection did not arrive at the port of this peer")
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
                log.debug("a connection could not be taken: %s", error)
                self._pause(self._listener)
                return
            try:
                self._enter(near, address)
            except OSError as error:  # it is already closed
                log.debug("a connection ended at once: %s", error)
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
        if not self._asks:
            inbound.is_accepted = True
            return
        inbound.deadline = self._loop.call_later(UNPROVEN_S, self._drop, number)
        relay = self._tunnelled.get(port) if _is_own(near) else None
        for each in self._unproven.enter(number, relay or network_of(host)):
            self._drop(each)

    def _first_byte(self, number: int) -> None:
        """Open its connection to the server."""
        assert self._loop is not None
        inbound = self._inbound[number]
        self._loop.remove_reader(inbound.near)
        if _answers(inbound.near):
            self._drop(number)
            return
        try:
            inbound.splice = Splice(
                inbound.near,
                connected(self.behind, own_path=self.behind.with_name(str(number))),
                may_take=inbound.may_take,
                on_end=lambda: self._forget(number),
            )
        except OSError as error:
            log.debug("a connection could not be passed on: %s", error)
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
    """The address in gRPC's form: ipv4:192.0.2.7:29500."""
    address = ip_of(host)
    return f"ipv4:{address}:{port}" if address.version == 4 else f"ipv6:[{host}]:{port}"


def _answers(near: socket.socket) -> bool:
    """Answer a connection that asks where it comes from, and return whether it did."""
    with suppress(OSError):  # it has ended: the next read of it fails
        if near.recv(1, socket.MSG_PEEK) == ASK:
            near.recv(1)  # with an unread byte, closing would reset it and lose the answer
            near.send(seen_from(near))
            return True
    return False


def _number(peer: str) -> int:
    """Of a connection that gRPC names unix:FOLDER/NUMBER; -1 for any other name."""
    kind, _, path = peer.partition(":")
    number = path.rpartition("/")[2]
    return int(number) if kind == "unix" and number.isdecimal() else -1


def _is_own(near: socket.socket) -> bool:
    """Whether both ends are on this machine."""
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
