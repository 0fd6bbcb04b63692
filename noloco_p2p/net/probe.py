"""Ask another peer to dial back, to learn whether it can reach this peer and by how much the clocks differ.

Nobody can make a peer dial a stranger. A peer dials only the address that the call came from, on a few ports, and only
a few times per minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import grpc
import grpc.aio

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import CorruptPayload, Refused
from noloco_p2p.gossip import frames
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.hosts import is_public, network_of
from noloco_p2p.net import convert
from noloco_p2p.net.connection import Connector, check_parsed, refused, translate
from noloco_p2p.net.session import Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.net.wire.v1.peer_pb2_grpc import PeerStub
from noloco_p2p.rates import Rates

MAX_PORTS = 4
DIAL_S = 4.0
PORTS_A_MINUTE_OF_ONE = 16  # for one peer, which has two ports
PORTS_A_MINUTE = 48  # for all peers of one network


async def _dial(host: str, port: int) -> str:
    """Return "" if a connection could be made, and otherwise a message that does not depend on the cause."""
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # includes TimeoutError
        return f"no connection within {DIAL_S:.0f} s"
    writer.close()
    return ""


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe by another peer.

    `reached` maps each port to "", or to the reason why it cannot be reached.
    """

    observed_host: str
    reached: dict[int, str]
    clock_offset_s: float  # its clock minus ours, give or take `round_trip_s` / 2
    round_trip_s: float


class Prober:
    """The peer that answers probes. `tunnelled` and `only_public` have the same meaning as in `GrpcServer`.

    `dial` tries one port of a host, and returns "", or the reason why the port cannot be reached.
    """

    def __init__(
        self,
        *,
        tunnelled: Mapping[int, str],
        only_public: bool,
        clock: Callable[[], float] = time.monotonic,
        dial: Callable[[str, int], Awaitable[str]] = _dial,
    ) -> None:
        self._dial = dial
        self._tunnelled = tunnelled
        self._only_public = only_public
        self._of_one = Rates.a_minute(PORTS_A_MINUTE_OF_ONE, clock=clock)
        self._of_network = Rates.a_minute(PORTS_A_MINUTE, clock=clock)

    async def probe(self, request: pb.ProbeRequest, caller: str, peer_id: str) -> pb.ProbeReply:
        """Answer a probe. `caller` is gRPC's name for the network address.

        Raises CorruptPayload for an invalid request, and Refused if requests are too frequent.
        """
        if not request.ports:  # the caller only asks for the time
            return pb.ProbeReply(observed_host=caller_host(caller), time_s=time.time())
        if caller.rpartition(":")[2] in map(str, self._tunnelled):
            raise CorruptPayload("a caller behind a tunnel cannot be dialled")
        host = caller_host(caller)
        if self._only_public and not is_public(host):
            raise CorruptPayload("in a public swarm, callers from private networks are not dialled")
        num_ports = len(request.ports)
        if num_ports > MAX_PORTS or not all(0 < port < 65_536 for port in request.ports):
            raise CorruptPayload(f"a request may contain at most {MAX_PORTS} ports, each from 1 to 65535")
        is_too_often = Refused(
            "I dial back only a few times per minute", code=frames.RefuseCode.BUSY.name, retry_after_s=60.0
        )
        if not self._of_one.take(peer_id, num_ports):
            raise is_too_often
        if not self._of_network.take(network_of(host), num_ports):
            self._of_one.give_back(peer_id, num_ports)  # nothing is dialled
            raise is_too_often
        told_s = time.time()
        sentences = await asyncio.gather(*(self._dial(host, port) for port in request.ports))
        ports = [
            pb.PortProbe(port=port, is_reached=not sentence, sentence=sentence)
            for port, sentence in zip(request.ports, sentences, strict=True)
        ]
        return pb.ProbeReply(observed_host=host, ports=ports, time_s=told_s)


async def ask(
    candidate: Candidate,
    hello: frames.Hello,
    ports: list[int],
    *,
    timeout_s: float,
    session: Session | None = None,
    guard: DialGuard | None = None,
) -> Probed:
    """Ask a peer to dial back. Raises PeerError."""
    request = pb.ProbeRequest(hello=convert.hello_to_wire(hello), ports=ports)
    # A reply arrives only after the dials. So an empty request is sent first, to compare the clocks.
    empty = pb.ProbeRequest(hello=convert.hello_to_wire(hello))
    connector = Connector(session, guard=guard)
    clock, began_wall_s, round_trip_s = await _asked(connector, candidate, empty, timeout_s)
    reply, _, _ = await _asked(connector, candidate, request, timeout_s)
    for answer in (clock, reply):
        check_parsed(answer, candidate.peer_id)
        if answer.HasField("refuse"):
            raise refused(answer.refuse, candidate.peer_id)
    answers = [answer for answer in reply.ports[:MAX_PORTS] if answer.port in ports]
    reached = {each.port: "" if each.is_reached else _reason(each.sentence) for each in answers}
    offset_s = convert.finite(clock.time_s) - (began_wall_s + round_trip_s / 2)
    return Probed(convert.text(reply.observed_host)[:100], reached, offset_s, round_trip_s)


def _reason(sentence: str) -> str:
    return convert.text(sentence)[:200] or "no reason given"


async def _asked(
    connector: Connector, candidate: Candidate, request: pb.ProbeRequest, timeout_s: float
) -> tuple[pb.ProbeReply, float, float]:
    """Return the answer, the time of the request, and the response time.

    Each request has its own connection, because a proof is valid for one call.
    """
    async with connector.dialled(candidate, timeout_s=timeout_s) as connection:
        began_s, began_wall_s = time.monotonic(), time.time()
        try:
            reply = await PeerStub(connection.channel).Probe(request, timeout=timeout_s, metadata=connection.metadata)
        except grpc.aio.AioRpcError as error:
            raise translate(error, candidate.peer_id) from None
    return reply, began_wall_s, time.monotonic() - began_s


def caller_host(caller: str) -> str:
    """Return the host in gRPC's name for a caller, such as ipv4:1.2.3.4:5, ipv6:[::1]:5 or ipv6:%5B::1%5D:5.

    Raises CorruptPayload for anything else.
    """
    kind, _, rest = unquote(caller).partition(":")
    host = rest.rpartition(":")[0].strip("[]")
    if kind not in ("ipv4", "ipv6") or not host:
        raise CorruptPayload(f"the address {caller!r} cannot be dialled")
    return host
