"""Connect to other peers: dial them, authenticate them, call them, and describe failures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import CorruptPayload, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.frames import Refuse
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.hosts import is_host, is_port
from noloco_p2p.net import convert, options
from noloco_p2p.net.session import Session
from noloco_p2p.net.swap_stream import call_cancelled
from noloco_p2p.net.throttle import UNLIMITED, Limits
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

SERVICE = "noloco_p2p.wire.v1.Peer"
REFUSE_KEY = "noloco-refuse-bin"
MEMBERSHIP_KEY = "noloco-membership-bin"
LIFTS_BAN = "`noloco ban PEER --lift` lifts the ban"


def nobody_is_banned(peer_id: str) -> str:
    return ""


def own_ban(peer: str, why: str) -> Refused:
    """Return why this peer calls no peer that it has banned. The code BANNED means that the other one did it."""
    refused = Refused(f"it is {why}", peer=peer, retry_after_s=60.0)
    refused.advice = (LIFTS_BAN, LIFTS_BAN)
    return refused


class CallerWire:
    """A call on its own connection.

    The connection ends when the last reference to the call is dropped. `close` therefore drops its reference, and the
    tracebacks of errors raised here do not refer to the call. Otherwise, a stored error would keep the connection open
    until the next garbage collection.
    """

    def __init__(self, peer: str, channel: grpc.aio.Channel, method: str, limits: Limits) -> None:
        self.round_trip_s = 0.0
        self._peer = peer
        self._channel: grpc.aio.Channel | None = channel
        self._call: Any = channel.stream_stream(f"/{SERVICE}/{method}")()
        self._limits = limits

    async def admitted(self) -> bytes:
        """Wait until the called peer has admitted the call, and return its membership, which is empty in a public run.

        Raises Refused or another PeerError if it does not admit the call.
        """
        began_s = time.monotonic()
        metadata = await self._do(lambda call: call.initial_metadata())
        self.round_trip_s = time.monotonic() - began_s
        for key, value in metadata or ():
            if key == MEMBERSHIP_KEY and isinstance(value, bytes):
                return value
        await self.read()
        raise CorruptPayload("it answered a call without having admitted it", peer=self._peer)

    async def write(self, data: bytes) -> None:
        await self._limits.sending(len(data))
        await self._do(lambda call: call.write(data))

    async def read(self) -> bytes | None:
        message = await self._do(lambda call: call.read())
        if message is EOF:
            return None
        await self._limits.receiving(len(message))
        return message

    async def finish(self) -> None:
        with contextlib.suppress(PeerError):
            await self._do(lambda call: call.done_writing())

    async def close(self) -> None:
        (call, self._call), (channel, self._channel) = (self._call, None), (self._channel, None)
        if channel is not None:
            call.cancel()
            await channel.close()

    async def _do(self, action: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run `action` on the call. Raises PeerError if the call has ended."""
        fault: PeerError | asyncio.CancelledError = Unreachable("the stream is closed", peer=self._peer)
        if self._call is not None:
            try:
                return await action(self._call)
            except grpc.aio.AioRpcError as error:
                fault = translate(error, self._peer)
            except (grpc.aio.UsageError, asyncio.InvalidStateError):  # a write after the end of the call raises these
                pass
            except asyncio.CancelledError:
                fault = call_cancelled(self._peer)
        raise fault


class Connector:
    """A dialler that opens one connection per call.

    Without a session, connections are plain and unauthenticated. This is for measurements and tests on one machine.
    """

    def __init__(
        self,
        session: Session | None = None,
        limits: Limits = UNLIMITED,
        *,
        why_banned: Callable[[str], str] = nobody_is_banned,
        guard: DialGuard | None = None,
    ) -> None:
        self._guard = guard or DialGuard()
        self._session = session
        self._why_banned = why_banned
        self._limits = limits
        self._options = [*options.CLIENT, *limits.options()]

    async def call(self, candidate: Candidate, method: str, *, timeout_s: float) -> CallerWire:
        """Call a method of SERVICE on a new connection, and return when the peer has admitted the call.

        Raises PeerError, and fails at once if the connection is refused. If the peer seems to be on the local network,
        it gets half of the time to answer there.
        """
        if candidate.nearby:
            timeout_s /= 2
            with contextlib.suppress(Unreachable, TimedOut):
                nearby = replace(candidate, address=candidate.nearby, nearby="")
                return await self.call(nearby, method, timeout_s=timeout_s)
        peer = candidate.peer_id
        if why := self._why_banned(peer):
            raise own_ban(peer, why)
        host, port = split_address(candidate)
        address = await self._guard.way(peer, host)
        channel, wire = self._channel(candidate, grpc_target(address, port)), None
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected(channel, candidate)
                self._guard.reached(peer, address)
                wire = CallerWire(peer, channel, method, self._limits)
                membership = await wire.admitted()
            if self._session:
                self._session.check_membership(membership, peer)
            return wire
        except BaseException as error:
            await (wire or channel).close()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"{candidate.address} did not answer within {timeout_s:.1f} s", peer=peer) from None
            raise

    def _channel(self, candidate: Candidate, target: str) -> grpc.aio.Channel:
        if self._session is None:
            return grpc.aio.insecure_channel(target, options=self._options)
        return grpc.aio.secure_channel(
            target,
            self._session.channel_credentials(candidate),
            options=[*self._options, ("grpc.ssl_target_name_override", candidate.peer_id)],
        )

    async def _connected(self, channel: grpc.aio.Channel, candidate: Candidate) -> None:
        """Wait until the channel is connected. A refused connection fails at once, so that another candidate can be
        tried.
        """
        ready, failing = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
        state = channel.get_state(try_to_connect=True)
        while state is not ready:
            if state is failing:
                sentence = f"could not connect to {candidate.address}: no peer is listening there{self._perhaps()}"
                raise Unreachable(sentence, peer=candidate.peer_id)
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    def _perhaps(self) -> str:
        """Name other possible causes of a failure, because TLS does not say why it failed."""
        if self._session is None:
            return ""
        private = (
            "one of the two peers is not invited to this private run"
            if self._session.invitation
            else "its run is private"
        )
        return f", or the peer's session key does not match its record, or {private}"


def split_address(candidate: Candidate) -> tuple[str, str]:
    """Return the (host, port) at which the candidate claims to be reachable. Raises Unreachable if it is not a valid
    address.
    """
    host, _, port = candidate.address.rpartition(":")
    if not is_host(host) or not is_port(port):
        raise Unreachable(f"{candidate.address!r} is not a valid peer address", peer=candidate.peer_id)
    return host, port


def grpc_target(address: str, port: str) -> str:
    """Format an IP address and a port as a gRPC target.

    gRPC would also accept many other forms, and resolve names itself.
    """
    return f"ipv6:[{address}]:{port}" if ":" in address else f"ipv4:{address}:{port}"


def translate(error: grpc.aio.AioRpcError, peer: str) -> PeerError:
    """Convert a gRPC error to an error of this project."""
    for key, value in error.trailing_metadata() or ():
        if key == REFUSE_KEY and isinstance(value, bytes):
            return _refused_in(value, peer)
    details = convert.text(error.details() or error.code().name)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or "ping timeout" in details:
        return TimedOut(f"it did not answer in time: {details}", peer=peer)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CorruptPayload(f"a message was too large: {details}", peer=peer)
    return Unreachable(f"the connection failed: {details}", peer=peer)


def refused(message: pb.Refuse, peer: str) -> Refused:
    refuse = convert.from_wire(Refuse, message)
    return Refused(refuse.sentence, peer=peer, code=refuse.code.name, retry_after_s=refuse.retry_after_s)


def _refused_in(value: bytes, peer: str) -> PeerError:
    try:
        return refused(pb.Refuse.FromString(value), peer)
    except DecodeError:
        return CorruptPayload("its refusal is not a valid protocol message", peer=peer)
    except CorruptPayload as error:
        return error
