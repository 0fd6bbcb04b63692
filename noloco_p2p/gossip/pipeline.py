"""Coding ahead and checking behind: what a swap does with payloads besides moving them, off the event loop.

Both work in batches of a few chunks. A hop to another thread and back costs more than coding a chunk does, as the event
loop, the codec thread and the training thread pass one interpreter lock around.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec import chunk_range
from noloco_p2p.codec.modulo import Bounds
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import CHUNK_DIGEST_BYTES, Chunk, Payload
from noloco_p2p.gossip.sections import Coding

BATCH_CHUNKS = 4  # 4 MiB of fp32; two batches each way are on their way at most


class Staged:
    """The coded outer gradient of this round, filled chunk by chunk at the boundary. Lives on the network thread."""

    def __init__(self) -> None:
        self.chunks: list[Payload | None] = []
        self._grown = asyncio.Event()

    def put(self, payload: bytes) -> None:
        self.chunks.append(payload)
        self._grown.set()

    async def get(self, indices: Sequence[int]) -> list[Payload]:
        """Waits until these chunks are staged; ends by cancellation only, as the boundary may be minutes away."""
        while len(self.chunks) <= indices[-1]:
            self._grown.clear()
            await self._grown.wait()
        return [payload for index in indices if (payload := self.chunks[index]) is not None]


async def code_ahead(
    coding: Coding, indices: Sequence[int], source: Tensor | Staged, executor: Executor
) -> AsyncGenerator[list[Chunk]]:
    """These chunks of a section in batches; the next batch is coded while the caller sends this one.

    `source`: a flat vector to code, or payloads that the training thread codes. Raises ValueError for a vector that is
    not finite.
    """
    batches = _batches(indices)

    async def batch() -> list[Chunk] | None:
        mine = next(batches, None)
        if mine is None:
            return None
        payloads = await source.get(mine) if isinstance(source, Staged) else source
        return await asyncio.get_running_loop().run_in_executor(executor, _code, coding, mine, payloads)

    coming = asyncio.create_task(batch())
    try:
        while (chunks := await coming) is not None:
            coming = asyncio.create_task(batch())
            yield chunks
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Beside:
    """What modulo coding needs on the receiving side: the own vector, unchanged since it was coded, and its bounds."""

    values: Tensor
    bounds: Bounds


class CheckBehind:
    """Checks chunks in batches while the next ones arrive. An error is raised by a later `add`, or by `finish`.

    kept: what `Coding.half_difference` takes as the partner's side, in order. broken: chunks whose bound did not hold,
    to be sent again without modulo; empty in `kept`.
    """

    def __init__(self, coding: Coding, executor: Executor, beside: Beside | None = None) -> None:
        self.kept: list[Payload] = []
        self.broken: list[int] = []
        self._coding = coding
        self._executor = executor
        self._beside = beside
        self._batch: list[Chunk] = []
        self._checking: asyncio.Future[list[Payload | None]] | None = None
        self._indices: list[int] = []

    async def add(self, chunk: Chunk) -> None:
        """Raises CorruptPayload for this or an earlier chunk. Waits when the check falls two batches behind."""
        self._batch.append(chunk)
        if len(self._batch) >= BATCH_CHUNKS:
            await self._flush()

    async def finish(self) -> None:
        """All chunks are checked when this returns. Raises CorruptPayload."""
        await self._flush()
        await self._collect()

    async def _flush(self) -> None:
        await self._collect()
        batch, self._batch = self._batch, []
        self._indices = [chunk.index for chunk in batch]
        loop = asyncio.get_running_loop()
        self._checking = loop.run_in_executor(self._executor, _check, self._coding, batch, self._beside)

    async def _collect(self) -> None:
        if self._checking is None:
            return
        for index, payload in zip(self._indices, await self._checking, strict=True):
            if payload is None:
                self.broken.append(index)
            self.kept.append(payload or b"")


def _batches(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    return (indices[start : start + BATCH_CHUNKS] for start in range(0, len(indices), BATCH_CHUNKS))


def _code(coding: Coding, indices: Sequence[int], source: Tensor | list[Payload]) -> list[Chunk]:
    """`source`: the vector, or the payloads of these chunks."""
    name = coding.plan.name
    if isinstance(source, list):
        payloads = source
    else:
        payloads = [coding.encode(source[slice(*chunk_range(len(source), index))], index) for index in indices]
    return [Chunk(name, index, payload, digest_of(payload)) for index, payload in zip(indices, payloads, strict=True)]


def _check(coding: Coding, chunks: list[Chunk], beside: Beside | None) -> list[Payload | None]:
    """What is kept of each chunk; None for one that modulo coding could not carry."""
    return [_checked(coding, chunk, beside) for chunk in chunks]


def _checked(coding: Coding, chunk: Chunk, beside: Beside | None) -> Payload | None:
    if digest_of(chunk.payload) != chunk.digest:
        raise CorruptPayload(f"chunk {chunk.index} of {coding.plan.name.name.lower()} is damaged")
    num_elements = coding.num_elements(chunk.index)
    if beside is None:
        coding.plan.codec.check(chunk.payload, num_elements=num_elements)
        return chunk.payload
    own = beside.values[slice(*chunk_range(len(beside.values), chunk.index))]
    if on_grid := coding.modulo(chunk.index):
        codec, grid = on_grid
        differences = codec.differences(own, chunk.payload, grid=grid, chunk_index=chunk.index)
        if differences is None:
            return None
        kept, half = differences, coding.half_difference(None, differences, chunk.index)
    else:
        kept = chunk.payload
        half = coding.plan.codec.decode(chunk.payload, num_elements=num_elements).sub_(own).mul_(0.5)
    beside.bounds.update(chunk.index, half_difference=half, values=own)
    return kept


def digest_of(payload: Payload) -> bytes:
    return blake3(payload).digest(CHUNK_DIGEST_BYTES)
