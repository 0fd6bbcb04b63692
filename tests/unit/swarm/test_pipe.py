"""A connection over paths that break at every possible place brings every byte once."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable

import pytest

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.swarm.pipe import ACK, CHUNK_BYTES, DATA, FRAME, Pipe
from noloco_p2p.testing.patience import PATIENCE_S

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pair() -> tuple[Ends, Ends]:
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


async def cut_after(num_bytes: int, source: Ends, target: Ends) -> None:
    """Passes so many bytes on, then breaks the path."""
    while num_bytes > 0 and (data := await source[0].read(min(num_bytes, 10_000))):
        target[1].write(data)
        await target[1].drain()
        num_bytes -= len(data)


async def over_paths(near: Pipe, far: Pipe, *, lengths: list[int]) -> int:
    """Carry over paths of these lengths, and a last one without a cut; gives the number of paths."""
    for number, length in enumerate([*lengths, 1 << 40]):
        near_path, near_middle = await pair()
        far_middle, far_path = await pair()
        middle = [cut_after(length, near_middle, far_middle), cut_after(length, far_middle, near_middle)]
        cutting = [asyncio.create_task(job) for job in middle]
        carrying: list[Awaitable[None]] = [
            near.carry(*near_path, peer_received=far.received),
            far.carry(*far_path, peer_received=near.received),
        ]
        both = asyncio.gather(*carrying, return_exceptions=True)
        await asyncio.wait({*cutting, both}, return_when=asyncio.FIRST_COMPLETED)
        for _, writer in (near_middle, far_middle):
            writer.close()
        await both
        for task in cutting:
            task.cancel()
        if near.is_done or far.is_done:  # what the other one misses is the last acknowledgement, at most
            return number + 1
    raise AssertionError("the last path was cut")


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_comes_once_whatever_breaks(seed: int) -> None:
    rng = random.Random(seed)
    there, back = rng.randbytes(3_000_000), rng.randbytes(1_000_000)
    lengths = [rng.choice([0, 5, 20, rng.randrange(100_000), rng.randrange(2_000_000)]) for _ in range(8)]

    async def main() -> tuple[bytes, bytes]:
        (caller, near_local), (callee, far_local) = await pair(), await pair()
        near, far = Pipe(*near_local), Pipe(*far_local)

        async def say(ends: Ends, data: bytes) -> bytes:
            ends[1].write(data)
            ends[1].write_eof()
            return await ends[0].read(-1)

        said = asyncio.gather(say(caller, there), say(callee, back))
        assert await over_paths(near, far, lengths=lengths) >= 2
        heard = await said
        for pipe in (near, far):
            pipe.close()
        for _, writer in (caller, callee):
            writer.close()
        return heard[1], heard[0]

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE_S)) == (there, back)


@pytest.mark.parametrize(
    "frame", [FRAME.pack(ACK, 5), FRAME.pack(DATA, CHUNK_BYTES + 1), FRAME.pack(DATA, 0), FRAME.pack(77, 0)]
)
def test_what_cannot_be_is_refused(frame: bytes) -> None:
    async def main() -> None:
        local, (_, caller) = await pair()
        path, (_, stranger) = await pair()
        pipe = Pipe(*local)
        stranger.write(frame)
        try:
            with pytest.raises(CorruptPayload, match="a tunnel"):
                await pipe.carry(*path, peer_received=0)
        finally:
            pipe.close()
            caller.close()
            stranger.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_a_path_that_sends_and_never_reads_is_told_no_more_than_it_takes() -> None:
    """Each frame is acknowledged, but not by a frame of its own while the last one is not taken."""

    async def main() -> None:
        local, (listener, caller) = await pair()
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        path, (_, stranger) = await asyncio.open_connection(sock=near), await asyncio.open_connection(sock=far)
        pipe, num_frames = Pipe(*local), 20_000
        carrying = asyncio.create_task(pipe.carry(*path, peer_received=0))
        stranger.write((FRAME.pack(DATA, 1) + b"x") * num_frames)
        assert await listener.readexactly(num_frames) == b"x" * num_frames
        assert path[1].transport.get_write_buffer_size() <= 64 * 1024 + FRAME.size
        carrying.cancel()
        await asyncio.wait({carrying})
        pipe.close()
        caller.close()
        stranger.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
