"""Coding ahead and checking behind: what a swap does with payloads besides moving them, off the event loop.

Both work in batches of a few chunks. A hop to another thread and back costs more than coding a chunk does, as the event
loop, the codec thread and the training thread pass one interpreter lock around.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor

from torch import Tensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import Chunk, Payload, chunk_digest
from noloco_p2p.gossip.outcome import SectionPlan

BATCH_CHUNKS = 4  # 4 MiB of fp32; two batches each way are on their way at most


class Staged:
    """The coded outer gradient of this round, filled chunk by chunk at the boundary. Lives on the network thread."""

    def __init__(self) -> None:
        self.chunks: list[Payload] = []
        self._grown = asyncio.Event()

    def put(self, payload: bytes) -> None:
        self.chunks.append(payload)
        self._grown.set()

    async def get(self, start: int, stop: int) -> list[Payload]:
        """Waits until these chunks are staged; ends by cancellation only, as the boundary may be minutes away."""
        while len(self.chunks) < stop:
            self._grown.clear()
            await self._grown.wait()
        return self.chunks[start:stop]


async def code_ahead(plan: SectionPlan, source: Tensor | Staged, executor: Executor) -> AsyncGenerator[list[Chunk]]:
    """The chunks of a section in batches; the next batch is coded while the caller sends this one.

    `source`: a flat vector to code, or payloads that the training thread codes. Raises ValueError for a vector that is
    not finite.
    """
    bounds = chunk_bounds(plan.num_elements)
    starts = range(0, len(bounds), BATCH_CHUNKS)

    async def batch(start: int) -> list[Chunk]:
        stop = min(start + BATCH_CHUNKS, len(bounds))
        loop = asyncio.get_running_loop()
        if isinstance(source, Staged):
            return await loop.run_in_executor(executor, _wrap, plan, start, await source.get(start, stop))
        return await loop.run_in_executor(executor, _code, plan, start, [source[a:b] for a, b in bounds[start:stop]])

    coming = asyncio.create_task(batch(0))
    try:
        for start in starts:
            chunks = await coming
            if start + BATCH_CHUNKS < len(bounds):
                coming = asyncio.create_task(batch(start + BATCH_CHUNKS))
            yield chunks
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


class CheckBehind:
    """Checks chunks in batches while the next ones arrive. An error is raised by a later `add`, or by `finish`."""

    def __init__(self, plan: SectionPlan, executor: Executor) -> None:
        self._plan = plan
        self._executor = executor
        self._batch: list[Chunk] = []
        self._checking: asyncio.Future[None] | None = None

    async def add(self, chunk: Chunk) -> None:
        """Raises CorruptPayload for this or an earlier chunk. Waits when the check falls two batches behind."""
        self._batch.append(chunk)
        if len(self._batch) >= BATCH_CHUNKS:
            await self._flush()

    async def finish(self) -> None:
        """All chunks are checked when this returns. Raises CorruptPayload."""
        await self._flush()
        if self._checking:
            await self._checking

    async def _flush(self) -> None:
        if self._checking:
            await self._checking
        batch, self._batch = self._batch, []
        self._checking = asyncio.get_running_loop().run_in_executor(self._executor, _check, self._plan, batch)


def _code(plan: SectionPlan, start: int, values: list[Tensor]) -> list[Chunk]:
    return _wrap(plan, start, [plan.codec.encode(chunk) for chunk in values])


def _wrap(plan: SectionPlan, start: int, payloads: Sequence[Payload]) -> list[Chunk]:
    return [Chunk(plan.name, start + index, payload, chunk_digest(payload)) for index, payload in enumerate(payloads)]


def _check(plan: SectionPlan, chunks: list[Chunk]) -> None:
    bounds = chunk_bounds(plan.num_elements)
    for chunk in chunks:
        if chunk_digest(chunk.payload) != chunk.digest:
            raise CorruptPayload(f"chunk {chunk.index} of {plan.name.name.lower()} is damaged")
        start, stop = bounds[chunk.index]
        plan.codec.check(chunk.payload, num_elements=stop - start)
