"""A swap over real gRPC and a long link uses several connections, and closes each of them cleanly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
import torch
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs
from harness.link_proxy import LinkProxy
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.specs import FP32
from harness.swapping import Swapping, random_vector, swap_all, wait_until

from noloco_p2p.errors import PeerError, Refused, Unreachable
from noloco_p2p.gossip.exchange import Committed
from noloco_p2p.gossip.frames import (
    Accept,
    FetchItem,
    FetchWant,
    Hello,
    Offer,
    PeerStatus,
    Ready,
    RefuseCode,
    Standing,
)
from noloco_p2p.gossip.seams import Candidate, Deadlines, FrameStream
from noloco_p2p.gossip.units import Slice
from noloco_p2p.net import client, convert, options
from noloco_p2p.net.client import CONNECTION_METHOD, FAR_CONNECTIONS, SWAP_METHOD
from noloco_p2p.net.connection import SERVICE, Connector
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.swap_stream import LEAVE, MAX_CONNECTIONS
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.spec import OuterSpec, RunSpec
from noloco_p2p.testing.links import HOME_FIBRE, LinkProfile
from noloco_p2p.testing.peers import MemoryPeer

SPEC = RunSpec(name="lanes", codec=FP32, outer=OuterSpec(wait=True))
SHORT = Deadlines(dial_s=2.0, offer_s=2.0, status_s=0.5, progress_s=3.0, farewell_s=0.2)


@pytest.fixture(autouse=True)
def _server_that_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the limits that close abandoned connections after eight seconds, which would hide a leak."""
    limits = ("grpc.max_connection_idle_ms", "grpc.max_connection_age_ms")
    monkeypatch.setattr(options, "SERVER", [option for option in options.SERVER if option[0] not in limits])


@dataclass(frozen=True, slots=True)
class Bench:
    """Two peers; only `caller` knows an address, so it makes every offer, over `link`."""

    swarm: LoopbackSwarm
    caller: MemoryPeer
    acceptor: MemoryPeer
    link: LinkProxy

    def swapping(self, num_elements: int) -> list[Swapping]:
        """Let both peers swap vectors of this size."""
        peers = (self.acceptor, self.caller)
        return [Swapping(peer, random_vector(seed, num_elements)) for seed, peer in enumerate(peers)]

    def swap(self, num_elements: int) -> tuple[list[Committed], float]:
        """Swap vectors once. Returns the swaps of both peers, and the slower rate of both in Mbit/s."""
        peers, began_s = self.swapping(num_elements), time.monotonic()
        swaps = swap_all(peers)
        seconds = time.monotonic() - began_s
        return swaps, min(peer.counts.bytes_received for peer in peers) * 8e-6 / seconds


@contextmanager
def bench(*, mbit_s: float, own_rates: bool, far_s: float = -1.0, spec: RunSpec = SPEC) -> Iterator[Bench]:
    """Yield two peers. Without a session, a dial measures a round trip of 0 s, which is far if `far_s` is negative."""
    profile = LinkProfile("test", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=2, jitter_ms=0)
    with pytest.MonkeyPatch.context() as patch, LoopbackSwarm(spec, deadlines=SHORT) as swarm:
        patch.setattr(client, "FAR_S", far_s)
        caller, acceptor = swarm.peer("caller"), swarm.peer("acceptor")
        link = LinkProxy(swarm.addresses["acceptor"], profile, own_rates=own_rates)
        on_loop(swarm, link.start())
        swarm.addresses["caller"] = ""
        swarm.addresses["acceptor"] = link.address
        try:
            yield Bench(swarm, caller, acceptor, link)
        finally:
            on_loop(swarm, link.stop())


def on_loop(swarm: LoopbackSwarm, coroutine: object) -> None:
    asyncio.run_coroutine_threadsafe(coroutine, swarm.loop).result(PATIENCE_S)  # pyright: ignore[reportArgumentType]


def close_of(bench: Bench) -> None:
    """Wait until all connections have closed by themselves."""
    wait_until(lambda: bench.link.num_open == 0)


def test_when_each_connection_is_slow_a_swap_gets_several_times_the_rate_of_one() -> None:
    # Long against the 4 MB that the kernel buffers for each new connection, which a shorter swap would measure.
    with bench(mbit_s=10, own_rates=True) as there:  # a slow processor could not use several with 20
        assert there.swap(15_000_000)[1] > 2 * 10
        assert there.link.num_connections == FAR_CONNECTIONS
        close_of(there)


def test_when_the_link_is_full_more_connections_do_no_harm() -> None:
    rates = list[float]()
    for far_s in (PATIENCE_S, -1.0):
        with bench(mbit_s=40, own_rates=False, far_s=far_s) as there:
            rates.append(there.swap(3_000_000)[1])
            close_of(there)
    one, several = rates
    assert several > 0.6 * one


def test_what_comes_over_many_connections_is_what_was_sent() -> None:
    with bench(mbit_s=20, own_rates=True) as there:
        swaps, _ = there.swap(6_000_000)
        assert there.link.num_connections > 2
    ours, theirs = (swap.halves.values for swap in swaps)
    mine, yours = (random_vector(seed, 6_000_000) for seed in (0, 1))
    assert torch.equal(ours, yours * 0.5 - mine * 0.5)
    assert torch.equal(theirs, -ours)


def test_a_swap_with_a_close_partner_takes_one_connection() -> None:
    with bench(mbit_s=1000, own_rates=True, far_s=PATIENCE_S) as there:
        there.swap(300_000)
        assert there.link.num_connections == 1


@pytest.mark.parametrize("fault", ["cut", "stop"])
def test_a_swap_that_breaks_on_many_connections_ends_alike_on_both_sides(fault: str) -> None:
    with bench(mbit_s=20, own_rates=True, spec=RunSpec(name="lanes", codec=FP32)) as there:
        peers = there.swapping(20_000_000)
        wait_until(lambda: peers[0].counts.bytes_received and there.link.num_connections > 2)
        if fault == "cut":
            there.swarm.loop.call_soon_threadsafe(there.link.cut)
        else:
            on_loop(there.swarm, there.caller.service.stop())
        close_of(there)
        for peer in peers:
            peer.settle()
        # A peer that stops between the two last frames of a swap does not commit what its partner may commit.
        acceptor, caller = (len(peer.swaps) for peer in peers)
        assert acceptor - caller in ((0, 1) if fault == "stop" else (0,))
        assert peers[0].counts.failures


# a connection that is opened by hand


class Holding:
    """A Service that accepts any offer and then waits."""

    def __init__(self) -> None:
        self.faults: list[PeerError] = []

    def admit(self, hello: Hello) -> None:
        if hello.run_name != SPEC.name:
            raise Refused("another run", code=RefuseCode.OTHER_RUN.name)

    async def on_swap(self, stream: FrameStream) -> None:
        try:
            await stream.receive(PATIENCE_S)
            await stream.send(Accept(hello("acceptor"), STANDING, Slice(0, 1)))
            await stream.receive(PATIENCE_S)
        except PeerError as error:
            self.faults.append(error)

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        raise NotImplementedError

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise NotImplementedError


STANDING = Standing(0.0, 1.0, 0.0)
SWAP_ID = bytes(range(16))


def hello(peer_id: str, *, run_name: str = SPEC.name) -> Hello:
    return Hello(peer_id, run_name, SPEC.digest())


def join(peer_id: str = "caller", swap_id: bytes = SWAP_ID, *, run_name: str = SPEC.name) -> bytes:
    message = pb.Join(hello=convert.to_wire(hello(peer_id, run_name=run_name)), swap_id=swap_id)
    return pb.Frame(join=message).SerializeToString()


@asynccontextmanager
async def one_swap() -> AsyncGenerator[tuple[Holding, str, Any]]:
    """Yield a service, its address, and the call of an accepted swap."""
    service = Holding()
    server = GrpcServer(service)
    await server.start("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    async with own_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{SWAP_METHOD}")()
        await call.write(convert.encode(Offer(hello("caller"), SWAP_ID, STANDING, b"\x01", 1), sequence=1))
        assert isinstance(convert.decode(await read(call))[0], Accept)
        yield service, address, call
    await server.stop(0.0)


def own_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options.CLIENT)


async def ask(channel: grpc.aio.Channel, first_words: bytes) -> tuple[Any, pb.Frame]:
    call = channel.stream_stream(f"/{SERVICE}/{CONNECTION_METHOD}")()
    await call.write(first_words)
    return call, pb.Frame.FromString(await read(call))


async def read(call: Any) -> Any:
    return await asyncio.wait_for(call.read(), PATIENCE_S)


@pytest.mark.parametrize(
    ("first_words", "sentence"),
    [
        (join(swap_id=bytes(16)), "no swap with this id"),
        (join(swap_id=b""), "no swap with this id"),
        (join("somebody else"), "no swap with this id"),
        (join(run_name="another"), "another run"),
        (convert.encode(Ready(), sequence=1), "must begin with a Join"),
        (b"\xff\xff", "not a valid protocol message"),
    ],
    ids=["unknown id", "no id", "another peer", "another run", "no join", "garbage"],
)
async def test_a_connection_that_belongs_to_no_swap_is_refused_with_a_sentence(
    first_words: bytes, sentence: str
) -> None:
    async with one_swap() as (service, address, _), own_channel(address) as channel:
        _, answer = await ask(channel, first_words)
        assert sentence in answer.refuse.sentence
        _, answer = await ask(channel, join())
        assert answer.HasField("join"), "the swap is not harmed"
        assert not service.faults


async def test_a_swap_has_so_many_connections_and_no_more_and_none_when_it_is_over() -> None:
    async with one_swap() as (service, address, call), AsyncExitStack() as channels:

        async def ask_for_a_connection() -> tuple[Any, pb.Frame]:
            return await ask(await channels.enter_async_context(own_channel(address)), join())

        calls = [await ask_for_a_connection() for _ in range(MAX_CONNECTIONS - 1)]
        assert all(answer.HasField("join") for _, answer in calls)
        _, answer = await ask_for_a_connection()
        assert f"{MAX_CONNECTIONS} connections" in answer.refuse.sentence
        await calls[0][0].write(LEAVE)
        assert await read(calls[0][0]) is EOF
        _, answer = await ask_for_a_connection()
        assert answer.HasField("join"), "one was left"
        calls[1][0].cancel()
        assert await read(call) is EOF, "the swap ends, and says so on its other connections"
        _, answer = await ask_for_a_connection()
        assert "no swap with this id" in answer.refuse.sentence
        assert [type(fault) for fault in service.faults] == [Unreachable]


async def test_a_connection_ends_with_its_wire_while_somebody_keeps_what_was_cancelled_on_it() -> None:
    """This happens when a swap ends while it opens a connection: its stream keeps the task, and the task its error."""
    server = GrpcServer(Holding())
    await server.start("127.0.0.1", 0)
    async with LinkProxy(f"127.0.0.1:{server.port}", HOME_FIBRE) as link:
        there = Candidate("acceptor", link.address)
        wire = await Connector().call(there, CONNECTION_METHOD, timeout_s=PATIENCE_S)
        reading = asyncio.create_task(wire.read())
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.wait({reading})
        await wire.close()
        await asyncio.to_thread(wait_until, lambda: link.num_open == 0)
        assert reading.cancelled()
    await server.stop(0.0)
