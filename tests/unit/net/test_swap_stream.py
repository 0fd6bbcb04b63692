"""Frames over several connections arrive in order, once, and in bounded memory, also when a connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from harness.patience import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.errors import CorruptPayload, TimedOut, Unreachable
from noloco_p2p.gossip.frames import Accept, Chunk, Hello, Offer, Ready, Standing
from noloco_p2p.gossip.units import Slice
from noloco_p2p.net import convert
from noloco_p2p.net.swap_stream import LEAVE, WINDOW_FRAMES, Order, SwapStream

HELLO = Hello("peer", "run", "digest")
STANDING = Standing(0.0, 1.0, 0.0)
OFFER = Offer(HELLO, b"id", STANDING, b"\x01", 1)
ACCEPT = Accept(HELLO, STANDING, Slice(0, 1))


class Pipe:
    """One direction of a wire in memory. `delays` gives the turns of the loop that each message takes to arrive."""

    def __init__(self, delays: list[int]) -> None:
        self.messages: asyncio.Queue[bytes | Unreachable | None] = asyncio.Queue(2)
        self._delays = delays
        self._num_written = 0

    async def put(self, message: bytes | Unreachable | None) -> None:
        self._num_written += 1
        for _ in range(self._delays[self._num_written % len(self._delays)] if self._delays else 0):
            await asyncio.sleep(0)
        await self.messages.put(message)


class MemoryWire:
    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self.is_closed = False

    @classmethod
    def pair(cls, delays: list[int]) -> tuple[MemoryWire, MemoryWire]:
        forth, back = Pipe(delays), Pipe(delays[::-1])
        return cls(back, forth), cls(forth, back)

    async def write(self, data: bytes) -> None:
        await self.outgoing.put(data)

    async def read(self) -> bytes | None:
        message = await self.incoming.messages.get()
        if isinstance(message, Unreachable):
            raise message
        return message

    async def finish(self) -> None:
        await self.outgoing.put(None)

    async def close(self) -> None:
        """End the pending reads, as the end of a call does."""
        self.is_closed = True
        messages = self.incoming.messages
        while not messages.empty():
            messages.get_nowait()
        messages.put_nowait(None)


class Stream(SwapStream):
    """A stream that records the offers that its peers agree on."""

    def __init__(self, first: MemoryWire) -> None:
        self.agreed: list[Offer] = []
        super().__init__(first, peer="peer", proven="peer", is_caller=False, on_accepted=self.agreed.append)


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def chunk(index: int) -> Chunk:
    return Chunk(index.to_bytes(8, "little"))


def number_of(chunk: Chunk) -> int:
    return int.from_bytes(chunk.payload, "little")


def linked(connections: list[list[int]]) -> tuple[Stream, Stream, list[tuple[MemoryWire, MemoryWire]]]:
    wires = [MemoryWire.pair(delays) for delays in connections]
    here, there = Stream(wires[0][0]), Stream(wires[0][1])
    for ours, theirs in wires[1:]:
        here.add(ours)
        there.add(theirs)
    return here, there, wires


@given(
    connections=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=7), min_size=1, max_size=8),
    num_frames=st.integers(0, 60),
    reader_delays=st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_frames_come_in_the_order_sent_whatever_the_connections_do(
    connections: list[list[int]], num_frames: int, reader_delays: list[int]
) -> None:
    most_held = 0

    async def send(stream: Stream) -> None:
        for index in range(num_frames):
            await stream.send(chunk(index))

    async def receive(stream: Stream) -> list[int]:
        nonlocal most_held
        indices = []
        for number in range(num_frames):
            for _ in range(reader_delays[number % len(reader_delays)]):
                await asyncio.sleep(0)
                most_held = max(most_held, len(stream._order))
            frame = await stream.receive(PATIENCE_S)
            assert isinstance(frame, Chunk)
            indices.append(number_of(frame))
        return indices

    async def main() -> None:
        here, there, _ = linked(connections)
        _, _, received, back = await asyncio.gather(send(here), send(there), receive(there), receive(here))
        assert received == back == list(range(num_frames))
        with pytest.raises(TimedOut):
            await there.receive(0.001)
        await asyncio.gather(here.close(), there.close())

    run(main)
    assert most_held <= WINDOW_FRAMES * len(connections)


@given(st.permutations(range(1, 30)))
def test_every_number_comes_out_once(numbers: list[int]) -> None:
    order, taken = Order(), []
    for number in numbers:
        order.put(number, chunk(number))
        while frame := order.take():
            assert isinstance(frame, Chunk)
            taken.append(number_of(frame))
        with pytest.raises(CorruptPayload, match="twice"):
            order.put(number, chunk(number))
    assert taken == list(range(1, 30))
    assert len(order) == 0


@pytest.mark.parametrize("num_connections", [1, 3, 8])
def test_a_reader_that_does_not_read_stops_the_sender(num_connections: int) -> None:
    """The receiver holds back its window and one frame for each reader; the wires hold a few more."""

    async def main() -> None:
        here, there, _ = linked([[0]] * num_connections)
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await here.send(chunk(sent))
                sent += 1

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send(), 0.1)
        queued_and_in_write = 3 * num_connections
        assert len(there._order) == WINDOW_FRAMES * num_connections
        assert sent <= WINDOW_FRAMES * num_connections + num_connections + queued_and_in_write
        for index in range(sent):
            frame = await there.receive(PATIENCE_S)
            assert isinstance(frame, Chunk)
            assert number_of(frame) == index
        await asyncio.gather(here.close(), there.close())

    run(main)


def test_a_connection_that_dies_ends_the_stream_behind_what_is_here() -> None:
    async def main() -> None:
        here, there, wires = linked([[0], [0]])
        await here.send(chunk(0))
        assert await there.receive(PATIENCE_S) == chunk(0)
        await wires[0][0].outgoing.put(convert.encode(chunk(1), sequence=2))
        await wires[0][0].outgoing.put(convert.encode(chunk(3), sequence=4))  # 3 was on the connection that dies
        await wires[1][0].outgoing.put(Unreachable("cut", peer="peer"))
        assert await there.receive(PATIENCE_S) == chunk(1)
        with pytest.raises(Unreachable, match="cut"):
            await there.receive(PATIENCE_S)
        with pytest.raises(Unreachable, match="cut"):
            await there.send(chunk(0))
        await there.close()
        assert all(theirs.is_closed for _, theirs in wires)
        await here.close()

    run(main)


def test_a_connection_that_is_left_takes_nothing_with_it() -> None:
    async def main() -> None:
        here, there, wires = linked([[0], [0]])
        await wires[1][0].outgoing.put(convert.encode(chunk(0), sequence=1))
        await wires[1][0].outgoing.put(LEAVE)
        assert await there.receive(PATIENCE_S) == chunk(0)
        await wires[0][0].outgoing.put(convert.encode(chunk(1), sequence=2))
        assert await there.receive(PATIENCE_S) == chunk(1)
        assert wires[1][1].is_closed
        assert there.num_connections == 1
        await there.close()
        await here.close()

    run(main)


@pytest.mark.parametrize("sequence", [0, 1, 2**63])
def test_numbers_that_cannot_be_are_refused_or_waited_for(sequence: int) -> None:
    """A number that was used (or implied) is refused; a frame far ahead is held back and stops its connection."""

    async def main() -> None:
        here, there, wires = linked([[0], [0]])
        for index in range(2):
            await wires[0][0].outgoing.put(convert.encode(chunk(index), sequence=index + 1))
            assert await there.receive(PATIENCE_S) == chunk(index)
        await wires[1][0].outgoing.put(convert.encode(chunk(2), sequence=sequence))
        with pytest.raises(TimedOut if sequence > 2 else CorruptPayload):
            await there.receive(0.05)
        await there.close()
        await here.close()

    run(main)


def test_connections_are_agreed_by_an_offer_and_its_answer() -> None:
    async def main() -> None:
        here, there, _ = linked([[0]])
        await here.send(OFFER)
        await there.receive(PATIENCE_S)
        assert there.agreed == here.agreed == []
        await there.send(ACCEPT)
        await here.receive(PATIENCE_S)
        assert there.agreed == here.agreed == [OFFER]
        await here.close()
        await there.close()

    run(main)


def test_a_caller_cannot_accept_its_own_offer() -> None:
    async def main() -> None:
        here, there, _ = linked([[0]])
        await here.send(OFFER)
        await here.send(ACCEPT)
        await there.receive(PATIENCE_S)
        await there.receive(PATIENCE_S)
        assert there.agreed == here.agreed == []
        await there.send(ACCEPT)
        assert there.agreed == [OFFER]
        await here.close()
        await there.close()

    run(main)


def test_a_send_that_is_cancelled_harms_neither_the_frame_nor_the_next() -> None:
    """Giving up a swap cancels its sender; the last frame must still arrive."""

    async def main() -> None:
        here, there, _ = linked([[5]])
        sending = asyncio.create_task(here.send(chunk(0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await here.send(Ready())
        assert [await there.receive(PATIENCE_S) for _ in range(2)] == [chunk(0), Ready()]
        await here.close()
        await there.close()

    run(main)
