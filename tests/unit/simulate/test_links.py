"""Links on the virtual clock: the duration and order of frames, and the effect of a break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from noloco_p2p.errors import Unreachable
from noloco_p2p.gossip.frames import Chunk, FetchItem, FetchWant, Frame, Hello, PeerStatus, Ready, Received
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.testing.links import Link, LinkProfile
from noloco_p2p.testing.memory import BREAKS_WITHIN, FRAME_BYTES, MemoryNetwork, MemoryTransport

SLOW_UP = LinkProfile("slow-up", down_mbit_s=80, up_mbit_s=8, delay_ms=100, jitter_ms=0)  # 1 MB/s up, 10 MB/s down
CHUNK_BYTES = 1_000_000 - FRAME_BYTES


class Listener:
    """A Service that records frames with the time of their arrival."""

    def __init__(self) -> None:
        self.came: list[tuple[float, Frame]] = []
        self.ended_s: float | None = None

    def admit(self, hello: Hello) -> None:
        """Admit every caller."""

    async def on_swap(self, stream: FrameStream) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                frame = await stream.receive(3600.0)
                self.came.append((loop.time(), frame))
        except Unreachable:
            self.ended_s = loop.time()

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        raise NotImplementedError

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise NotImplementedError


def chunk(index: int) -> Chunk:
    return Chunk(bytes([index]) * CHUNK_BYTES)


def made(*, lose: float = 0.0) -> tuple[MemoryNetwork, MemoryTransport, Listener]:
    network, listener = MemoryNetwork(lose=lose), Listener()
    for number, name in enumerate("ab"):
        network.links[name] = Link.of(SLOW_UP, seed=number)
    network.add("b", listener)
    return network, MemoryTransport(network, lambda: Hello("a", "run", "digest")), listener


async def call(transport: MemoryTransport) -> FrameStream:
    return await transport.open_swap(Candidate("b", address="b"), timeout_s=5.0)


def test_a_chunk_takes_both_links_and_both_delays() -> None:
    async def main() -> None:
        _, transport, listener = made()
        stream = await call(transport)
        assert asyncio.get_running_loop().time() == pytest.approx(0.4)  # there and back over two links of 0.1 s
        await stream.send(chunk(0))
        await asyncio.sleep(10.0)
        assert listener.came[0][0] == pytest.approx(0.4 + 1.0 + 0.1 + 0.1 + 0.1)

    run_virtual(main())


def test_frames_come_in_order_and_the_sender_feels_the_link() -> None:
    async def main() -> None:
        _, transport, listener = made()
        stream = await call(transport)
        frames = [chunk(0), Received(), chunk(1), Ready()]
        for frame in frames:
            await stream.send(frame)
        assert asyncio.get_running_loop().time() > 2.0, "two megabytes at one a second"
        await stream.close()
        await asyncio.sleep(10.0)
        assert [frame for _, frame in listener.came] == frames, "what was sent before the end arrives"
        assert listener.ended_s is not None
        with pytest.raises(Unreachable):
            await stream.send(chunk(2))

    run_virtual(main())


def test_a_vanished_peer_breaks_its_streams_and_cannot_be_called() -> None:
    async def main() -> None:
        network, transport, listener = made()
        stream = await call(transport)
        network.vanish("b")
        with pytest.raises(Unreachable):
            await stream.receive(5.0)
        with pytest.raises(Unreachable):
            await call(transport)
        await asyncio.sleep(1.0)
        assert listener.ended_s is not None

    run_virtual(main())


def test_a_lost_call_breaks_within_a_swap() -> None:
    async def main() -> None:
        _, transport, _ = made(lose=1.0)
        stream = await call(transport)

        async def send_all() -> None:
            for _ in range(BREAKS_WITHIN):
                await stream.send(Ready())

        with pytest.raises(Unreachable):
            await send_all()

    run_virtual(main())
