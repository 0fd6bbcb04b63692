"""A swap over real gRPC and a long link uses several connections, and closes each of them cleanly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio
import pytest
import torch
import uvloop
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs
from harness.link_proxy import LinkProxy
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.rounds import Vectors, end_round, one_round, open_round, together, wait_until

from noloco_p2p.errors import PeerError, Refused, Unreachable
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import (
    Accept,
    Boundary,
    FetchItem,
    FetchWant,
    Hello,
    Offer,
    Part,
    PeerStatus,
    Ready,
    RefuseCode,
    SectionName,
)
from noloco_p2p.gossip.outcome import Alone, Outcome, Swapped
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.net import client, convert, framing, options
from noloco_p2p.net.caller import CONNECTION_METHOD, SWAP_METHOD, connect
from noloco_p2p.net.client import FAR_CONNECTIONS, FAR_S
from noloco_p2p.net.connection import Connector
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.swap_stream import FEATURE, LEAVE, MAX_CONNECTIONS
from noloco_p2p.net.throttle import UNLIMITED
from noloco_p2p.net.wire.v1 import peer_pb2 as pb
from noloco_p2p.spec import CodecSpec, RunSpec
from noloco_p2p.testing.links import HOME_FIBRE, LinkProfile
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

SPEC = RunSpec(name="lanes", codec=CodecSpec(slow_weights="int8", outer_momentum="int8", outer_gradient="int8"))
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

    def swap(self, vectors: list[Vectors], *, round_index: int) -> tuple[list[Outcome], float]:
        began_s, peers = time.monotonic(), [self.acceptor, self.caller]
        for peer, own in zip(peers, vectors, strict=True):
            open_round(peer, own, round_index=round_index)
        wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in peers))
        ends = [partial(end_round, *both, wait_s=PATIENCE_S) for both in zip(peers, vectors, strict=True)]
        return together(*ends), time.monotonic() - began_s


@contextmanager
def bench(*, mbit_s: float, own_rates: bool, far_s: float = -1.0) -> Iterator[Bench]:
    """Yield two peers. Without a session, a dial measures a round trip of 0 s, which is far if `far_s` is negative."""
    profile = LinkProfile("test", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=2, jitter_ms=0)
    with pytest.MonkeyPatch.context() as patch, LoopbackSwarm(SPEC, deadlines=SHORT) as swarm:
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


def vectors(num_elements: int) -> list[Vectors]:
    return [Vectors.random(seed, num_elements=num_elements) for seed in (1, 2)]


def mbit_s(outcome: Outcome, seconds: float) -> float:
    assert isinstance(outcome, Swapped), outcome
    return outcome.received.bytes_received * 8e-6 / seconds


def close_of(bench: Bench) -> None:
    """Wait until all connections have closed by themselves."""
    wait_until(lambda: bench.link.num_open == 0)


def test_when_each_connection_is_slow_a_swap_gets_several_times_the_rate_of_one() -> None:
    # Long against the 4 MB that the kernel buffers for each new connection, which a shorter swap would measure.
    rate_mbit_s, both = 20.0, vectors(20_000_000)
    with bench(mbit_s=rate_mbit_s, own_rates=True) as there:
        outcomes, seconds = there.swap(both, round_index=0)
        assert min(mbit_s(outcome, seconds) for outcome in outcomes) > 2 * rate_mbit_s
        assert there.link.num_connections == FAR_CONNECTIONS
        close_of(there)


def test_when_the_link_is_full_more_connections_do_no_harm() -> None:
    with bench(mbit_s=40, own_rates=False) as there:
        outcomes, seconds = there.swap(vectors(4_000_000), round_index=0)
        assert min(mbit_s(outcome, seconds) for outcome in outcomes) > 0.5 * 40
        close_of(there)


def test_what_comes_over_many_connections_is_what_was_sent() -> None:
    both = vectors(8_000_000)
    with bench(mbit_s=20, own_rates=True) as there:
        outcomes, _ = there.swap(both, round_index=0)
        assert there.link.num_connections > 2
        ours, theirs = (half_differences(outcome) for outcome in outcomes)
        with MemorySwarm(SPEC) as memory:
            twins = [
                half_differences(twin)
                for twin in one_round([memory.peer("a"), memory.peer("b")], both, wait_s=PATIENCE_S)
            ]
    for got, twin in zip((ours, theirs), twins, strict=True):
        assert all(torch.equal(got[name], twin[name]) for name in twin)


def half_differences(outcome: Outcome) -> dict[SectionName, torch.Tensor]:
    assert isinstance(outcome, Swapped), outcome
    return {
        name: torch.cat([pair.half_difference(index) for index in range(len(pair.own))])
        for name, pair in outcome.received.sections.items()
    }


def test_a_swap_with_a_close_partner_takes_one_connection() -> None:
    with bench(mbit_s=1000, own_rates=True, far_s=FAR_S) as there:
        there.swap(vectors(300_000), round_index=0)
        assert there.link.num_connections == 1


@pytest.mark.parametrize("fault", ["cut", "stop"])
def test_a_swap_that_breaks_on_many_connections_ends_alike_on_both_sides(fault: str) -> None:
    both = vectors(30_000_000)
    with bench(mbit_s=20, own_rates=True) as there:
        peers = [there.acceptor, there.caller]
        for peer, own in zip(peers, both, strict=True):
            open_round(peer, own)
        wait_until(lambda: there.link.num_connections > 2)
        if fault == "cut":
            there.swarm.loop.call_soon_threadsafe(there.link.cut)
        else:
            on_loop(there.swarm, there.caller.driver.stop())
        wait_until(lambda: all(peer.driver.phase is not RoundPhase.SWAPPING for peer in peers))
        close_of(there)
        outcomes = together(*(partial(end_round, *each, wait_s=1.0) for each in zip(peers, both, strict=True)))
        assert [type(outcome) for outcome in outcomes] == [Alone, Alone]


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
            await stream.send(Accept(hello("acceptor"), BOUNDARY))
            await stream.receive(PATIENCE_S)
        except PeerError as error:
            self.faults.append(error)

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        raise NotImplementedError

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise NotImplementedError


BOUNDARY = Boundary(0, None, None, 0.0)
SWAP_ID = bytes(range(16))


def hello(peer_id: str, *, run_name: str = SPEC.name) -> Hello:
    return Hello(peer_id, run_name, SPEC.digest(), features=(FEATURE,))


def join(peer_id: str = "caller", swap_id: bytes = SWAP_ID, *, run_name: str = SPEC.name) -> bytes:
    message = pb.Join(hello=convert.hello_to_wire(hello(peer_id, run_name=run_name)), swap_id=swap_id)
    return pb.Frame(join=message).SerializeToString()


@asynccontextmanager
async def one_swap() -> AsyncGenerator[tuple[Holding, str, Any]]:
    """Yield a service, its address, and the call of an accepted swap."""
    service = Holding()
    server = GrpcServer(service)
    await server.start("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    async with own_channel(address) as channel:
        call = channel.stream_stream(SWAP_METHOD)()
        await call.write(framing.encode(Offer(hello("caller"), SWAP_ID, BOUNDARY)))
        assert isinstance(framing.decode(await read(call))[0], Accept)
        yield service, address, call
    await server.stop(0.0)


def own_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options.CLIENT)


async def ask(channel: grpc.aio.Channel, first_words: bytes) -> tuple[Any, pb.Frame]:
    call = channel.stream_stream(CONNECTION_METHOD)()
    await call.write(first_words)
    return call, pb.Frame.FromString(await read(call))


async def read(call: Any) -> Any:
    return await asyncio.wait_for(call.read(), PATIENCE_S)


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE_S))


@pytest.mark.parametrize(
    ("first_words", "sentence"),
    [
        (join(swap_id=bytes(16)), "no swap with this id"),
        (join(swap_id=b""), "no swap with this id"),
        (join("somebody else"), "no swap with this id"),
        (join(run_name="another"), "another run"),
        (framing.encode(Ready(Part.EARLY)), "must begin with a Join"),
        (b"\xff\xff", "not a valid protocol message"),
    ],
    ids=["unknown id", "no id", "another peer", "another run", "no join", "garbage"],
)
def test_a_connection_that_belongs_to_no_swap_is_refused_with_a_sentence(first_words: bytes, sentence: str) -> None:
    async def main() -> None:
        async with one_swap() as (service, address, _), own_channel(address) as channel:
            _, answer = await ask(channel, first_words)
            assert sentence in answer.refuse.sentence
            _, answer = await ask(channel, join())
            assert answer.HasField("join"), "the swap is not harmed"
            assert not service.faults

    run(main)


def test_a_swap_has_so_many_connections_and_no_more_and_none_when_it_is_over() -> None:
    async def main() -> None:
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

    run(main)


def test_a_connection_ends_with_its_wire_while_somebody_keeps_what_was_cancelled_on_it() -> None:
    """This happens when a swap ends while it opens a connection: its stream keeps the task, and the task its error."""

    async def main() -> None:
        server = GrpcServer(Holding())
        await server.start("127.0.0.1", 0)
        async with LinkProxy(f"127.0.0.1:{server.port}", HOME_FIBRE) as link:
            there = Candidate("acceptor", link.address)
            wire = await connect(Connector(), there, CONNECTION_METHOD, timeout_s=PATIENCE_S, limits=UNLIMITED)
            reading = asyncio.create_task(wire.read())
            await asyncio.sleep(0.1)
            reading.cancel()
            await asyncio.wait({reading})
            await wire.close()
            await asyncio.to_thread(wait_until, lambda: link.num_open == 0)
            assert reading.cancelled()
        await server.stop(0.0)

    run(main)
