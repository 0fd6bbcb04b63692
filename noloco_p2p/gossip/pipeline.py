"""Coding ahead and checking behind: what a swap does with payloads besides moving them, off the event loop.

Both work in batches of a few chunks. A hop to another thread and back costs more than coding a chunk does, as the event
loop, the codec thread and the training thread pass one interpreter lock around.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor

from torch import Tensor

from noloco_p2p.codec import chunk_bounds, section_bytes
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import Chunk, Payload, chunk_digest
from noloco_p2p.gossip.outcome import SectionPlan
from noloco_p2p.gossip.payload_memory import PayloadMemory, Slab

BATCH_CHUNKS = 4  # 4 MiB of fp32; two batches each way are on their way at most


class Staged:
    """The coded outer gradient of this round, filled chunk by chunk at the boundary. Lives on the network thread."""

    def __init__(self) -> None:
        self.chunks: list[Payload] = []
        self._grown = asyncio.Event()

    def put(self, payload: Payload) -> None:
        self.chunks.append(payload)
        self._grown.set()

    async def get(self, start: int, stop: int) -> list[Payload]:
        """Waits until these chunks are staged; ends by cancellation only, as the boundary may be minutes away."""
        while len(self.chunks) < stop:
            self._grown.clear()
            await self._grown.wait()
        return self.chunks[start:stop]


async def code_ahead(
    plan: SectionPlan, source: Tensor | Staged, *, executor: Executor, memory: PayloadMemory
) -> AsyncGenerator[list[Chunk]]:
    """The chunks of a section in batches; the next batch is coded while the caller sends this one.

    `source`: a flat vector to code, or payloads that the training thread codes. Raises ValueError for a vector that is
    not finite.
    """
    bounds = chunk_bounds(plan.num_elements)
    starts = range(0, len(bounds), BATCH_CHUNKS)
    slab = memory.take(0 if isinstance(source, Staged) else section_bytes(plan.codec, plan.num_elements))

    async def batch(start: int) -> list[Chunk]:
        stop = min(start + BATCH_CHUNKS, len(bounds))
        if isinstance(source, Staged):
            return _wrap(plan, start, await source.get(start, stop))  # its digests take less than the hop would
        values = [source[a:b] for a, b in bounds[start:stop]]
        return await asyncio.get_running_loop().run_in_executor(executor, _code, plan, start, values, slab)

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
    """Checks chunks in batches while the next ones arrive, and appends their payloads to `kept`, in order.

    An error is raised by a later `add`, or by `finish`.
    """

    def __init__(self, plan: SectionPlan, kept: list[Payload], *, executor: Executor, memory: PayloadMemory) -> None:
        self._plan = plan
        self._kept = kept
        self._executor = executor
        self._slab = memory.take(section_bytes(plan.codec, plan.num_elements))
        self._batch: list[Chunk] = []
        self._checking: asyncio.Future[list[Payload]] | None = None

    async def add(self, chunk: Chunk) -> None:
        """Raises CorruptPayload for this or an earlier chunk. Waits when the check falls two batches behind."""
        self._batch.append(chunk)
        if len(self._batch) >= BATCH_CHUNKS:
            await self._flush()

    async def finish(self) -> None:
        """All chunks are checked when this returns. Raises CorruptPayload."""
        await self._flush()
        await self._settle()

    async def _flush(self) -> None:
        await self._settle()
        batch, self._batch = self._batch, []
        loop = asyncio.get_running_loop()
        self._checking = loop.run_in_executor(self._executor, _check, self._plan, batch, self._slab)

    async def _settle(self) -> None:
        if self._checking:
            self._kept.extend(await self._checking)
            self._checking = None


def _code(plan: SectionPlan, start: int, values: list[Tensor], slab: Slab) -> list[Chunk]:
    return _wrap(plan, start, [slab.code(plan.codec, chunk) for chunk in values])


def _wrap(plan: SectionPlan, start: int, payloads: Sequence[Payload]) -> list[Chunk]:
    return [Chunk(plan.name, start + index, payload, chunk_digest(payload)) for index, payload in enumerate(payloads)]


def _check(plan: SectionPlan, chunks: list[Chunk], slab: Slab) -> list[Payload]:
    """The payloads, in memory of ours. Raises CorruptPayload."""
    bounds, kept = chunk_bounds(plan.num_elements), []
    for chunk in chunks:
        if chunk_digest(chunk.payload) != chunk.digest:
            raise CorruptPayload(f"chunk {chunk.index} of {plan.name.name.lower()} is damaged")
        start, stop = bounds[chunk.index]
        fits = len(chunk.payload) == plan.codec.num_bytes(stop - start)
        payload = slab.keep(chunk.payload) if fits else chunk.payload
        plan.codec.check(payload, num_elements=stop - start)  # of the copy, as torch wants writable memory
        kept.append(payload)
    return kept
