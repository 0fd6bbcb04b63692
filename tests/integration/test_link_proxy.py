"""The link proxy on real sockets shapes, counts, cuts and stalls as its methods say, and swaps run through it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import torch
from harness.link_proxy import LinkProxy
from harness.loopback import LoopbackSwarm
from harness.patience import AT_ONCE_S, PATIENCE_S
from harness.swapping import Swapping, apply_until, random_vector

from noloco_p2p.gossip.seams import Deadlines
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.links import HOME_FIBRE, LinkProfile

NUM_TRIES = 5
PERFECT = LinkProfile("perfect", down_mbit_s=10_000, up_mbit_s=10_000, delay_ms=0, jitter_ms=0)


class Peer:
    """The server behind the proxy, with handlers that echo, swallow or send data, and the number of bytes received."""

    def __init__(self) -> None:
        self.received = 0

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.received += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def swallow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.received += len(data)
        writer.write(b"!")
        writer.close()

    async def pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_bytes = int(await reader.readline())
        writer.write(bytes(num_bytes))
        await writer.drain()
        writer.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@asynccontextmanager
async def linked(
    profile: LinkProfile, handler: Handler
) -> AsyncIterator[tuple[LinkProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server, LinkProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", profile) as link:
        reader, writer = await dial(link)
        try:
            yield link, reader, writer
        finally:
            writer.transport.abort()


async def dial(link: LinkProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = link.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader, *, within_s: float = PATIENCE_S) -> bool:
    """Return whether the connection has ended; False when nothing arrives in time."""
    try:
        return await asyncio.wait_for(reader.read(1), within_s) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


async def once(measure: Callable[[], Coroutine[None, None, float]], *, below: float) -> None:
    """Repeat a measurement: a busy machine delays one or two of them, a wrong link delays all."""
    for _ in range(NUM_TRIES - 1):
        if await measure() < below:
            return
    assert await measure() < below


async def test_everything_comes_through_unchanged_and_is_counted() -> None:
    data = bytes(range(256)) * 1000
    async with linked(PERFECT, Peer().echo) as (link, reader, writer):
        writer.write(data)
        writer.write_eof()
        assert await reader.read(-1) == data
        assert (link.down_bytes, link.up_bytes, link.num_connections) == (len(data), len(data), 1)


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_the_rate_is_that_of_the_profile(direction: str) -> None:
    """1 MB at 20 Mbit/s takes at least 0.4 s, and little more."""
    num_bytes, mbit_s = 1_000_000, 20.0
    slow = {f"{direction}_mbit_s": mbit_s}
    profile = LinkProfile("slow", **{"down_mbit_s": 1e4, "up_mbit_s": 1e4, **slow}, delay_ms=0, jitter_ms=0)

    async def seconds_for_all() -> float:
        peer = Peer()
        async with linked(profile, peer.swallow if direction == "down" else peer.pour) as (_, reader, writer):
            began_s = time.monotonic()
            writer.write(bytes(num_bytes) if direction == "down" else b"%d\n" % num_bytes)
            writer.write_eof()
            answer = await reader.read(-1)
            seconds = time.monotonic() - began_s
            assert (peer.received or len(answer)) == num_bytes
            assert num_bytes * 8 / 1e6 / seconds < 1.03 * mbit_s
            return seconds

    await once(seconds_for_all, below=num_bytes * 8 / 1e6 / (0.97 * mbit_s / 2))


async def test_a_round_trip_takes_twice_the_delay() -> None:
    async def round_trip_s() -> float:
        async with linked(LinkProfile("far", 1e4, 1e4, delay_ms=60, jitter_ms=20), Peer().echo) as (_, reader, writer):
            began_s = time.monotonic()
            writer.write(b"?")
            assert await reader.readexactly(1) == b"?"
            seconds = time.monotonic() - began_s
            assert seconds >= 0.12
            return seconds

    await once(round_trip_s, below=0.16 + 0.2)


async def test_after_a_cut_both_sides_are_gone_and_nobody_gets_through_until_it_is_restored() -> None:
    async with linked(PERFECT, Peer().echo) as (link, reader, writer):
        writer.write(b"?")
        await reader.readexactly(1)
        link.cut()
        assert await ended(reader)
        second_reader, second_writer = await dial(link)
        assert await ended(second_reader)
        second_writer.transport.abort()
        link.restore()
        third_reader, third_writer = await dial(link)
        third_writer.write(b"?")
        assert await third_reader.readexactly(1) == b"?"
        third_writer.transport.abort()


async def test_a_stall_holds_everything_back_and_loses_nothing() -> None:
    async with linked(PERFECT, Peer().echo) as (link, reader, writer):
        writer.write(b"1")
        await reader.readexactly(1)
        link.stall()
        writer.write(b"2")
        assert not await ended(reader, within_s=0.1), "nobody is told"
        assert link.down_bytes == 1
        link.restore()
        assert await reader.readexactly(1) == b"2"


# swaps over a link


SHORT = Deadlines(dial_s=2.0, offer_s=2.0, status_s=0.5, progress_s=1.0, farewell_s=0.1)


class Links:
    """The links of all peers, which the thread of the test cuts or stalls."""

    def __init__(self, swarm: LoopbackSwarm, profile: LinkProfile) -> None:
        self._swarm = swarm
        self._links = {name: LinkProxy(address, profile) for name, address in swarm.addresses.items()}

    def start(self) -> None:
        for name, link in self._links.items():
            asyncio.run_coroutine_threadsafe(link.start(), self._swarm.loop).result(PATIENCE_S)
            self._swarm.addresses[name] = link.address

    def stop(self) -> None:
        for link in self._links.values():
            asyncio.run_coroutine_threadsafe(link.stop(), self._swarm.loop).result(PATIENCE_S)

    def break_(self, fault: str) -> None:
        for link in self._links.values():
            self._swarm.loop.call_soon_threadsafe(link.cut if fault == "cut" else link.stall)


@contextmanager
def peers_with_links(profile: LinkProfile) -> Iterator[tuple[Links, list[Swapping]]]:
    """Yield two peers and their links; each peer reaches the other through the other's link."""
    with LoopbackSwarm(RunSpec(name="link"), deadlines=SHORT) as swarm:
        peers = [swarm.peer("a"), swarm.peer("b")]
        links = Links(swarm, profile)
        links.start()
        yield links, [Swapping(peer, random_vector(seed, 3_000_000)) for seed, peer in enumerate(peers)]
        links.stop()


def test_swaps_commit_over_a_home_link() -> None:
    with peers_with_links(HOME_FIBRE) as (_, peers):
        apply_until(lambda: all(len(peer.swaps) > 2 for peer in peers), peers)


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_link_that_breaks_or_freezes_in_a_swap_ends_it_alike_on_both_sides(fault: str) -> None:
    slow = LinkProfile("slow", down_mbit_s=20, up_mbit_s=20, delay_ms=5, jitter_ms=5)
    with peers_with_links(slow) as (links, peers):
        total = peers[0].vector + peers[1].vector
        apply_until(lambda: all(len(peer.swaps) > 2 for peer in peers), peers)
        links.break_(fault)
        began_s = time.monotonic()
        for peer in peers:
            peer.settle()
        assert time.monotonic() - began_s < AT_ONCE_S
        assert len(peers[0].swaps) == len(peers[1].swaps)
        assert torch.allclose(peers[0].vector + peers[1].vector, total, atol=1e-4)
