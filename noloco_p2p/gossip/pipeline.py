"""This module encodes a swap's chunks ahead of sending and checks received chunks, both off the event loop.

Both tasks work in batches of a few chunks, because switching to another thread and back takes longer than encoding one
chunk. Switching is slow because the event loop, the codec thread and the training thread share the interpreter lock
(GIL).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from torch import Tensor

from noloco_p2p.codec import Scratch, chunk_range
from noloco_p2p.codec.modulo import Bounds
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.gossip.frames import Chunk, Payload, chunk_digest
from noloco_p2p.gossip.payload_memory import Slab
from noloco_p2p.gossip.sections import Coding, Squares

BATCH_CHUNKS = 4  # 4 MiB of fp32; at most two batches are in flight in each direction

# the payload that is kept for a chunk, and whether the chunk is intact (False if modulo coding failed)
Checked = tuple[Payload, bool]


class Staged:
    """The encoded outer gradient of this round. The network thread fills it chunk by chunk at the boundary."""

    def __init__(self) -> None:
        self.chunks: list[Payload | None] = []
        self._grown = asyncio.Event()

    def put(self, payload: Payload) -> None:
        self.chunks.append(payload)
        self._grown.set()

    async def get(self, indices: Sequence[int]) -> list[Payload]:
        """Wait until these chunks are staged, and return them.

        The wait has no timeout, because the boundary may be minutes away.
        """
        while len(self.chunks) <= indices[-1]:
            self._grown.clear()
            await self._grown.wait()
        return [payload for index in indices if (payload := self.chunks[index]) is not None]


async def code_ahead(
    coding: Coding,
    indices: Sequence[int],
    source: Tensor | Staged,
    *,
    executor: Executor,
    slab: Slab,
    squares: Squares,
) -> AsyncGenerator[list[Chunk]]:
    """Yield these chunks of a section in batches. The next batch is encoded while the caller sends the current one.

    `source` is a flat vector to encode, or payloads that the training thread encodes. The squared norms of such
    payloads are added to `squares.own`. Raises ValueError if the vector has non-finite values.
    """
    batches, scratch = _batches(indices), Scratch()

    async def batch() -> list[Chunk] | None:
        mine = next(batches, None)
        if mine is None:
            return None
        if isinstance(source, Staged):
            work = (_measure_own, coding, mine, await source.get(mine), squares, scratch)
            return await asyncio.get_running_loop().run_in_executor(executor, *work)
        return await asyncio.get_running_loop().run_in_executor(executor, _code, coding, mine, source, slab)

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
    """The receiver's data for modulo decoding: its own vector, unchanged since it was encoded, and the bounds.

    If further bits of failed chunks are arriving, `earlier` holds the partner's previous payloads of these chunks.
    """

    values: Tensor
    bounds: Bounds
    earlier: Sequence[Payload]


class CheckBehind:
    """Checks chunks in batches while the next ones arrive. Errors are raised by a later `add` or by `finish`.

    `kept` lists the partner's payloads for `Coding.half_difference`, in chunk order; they are stored in `slab`.
    `broken` lists the chunks in which modulo coding failed. If more bits of such a chunk follow, `kept` holds all
    payloads of the chunk that have arrived so far. If the chunk is sent again without modulo coding, `kept` holds an
    empty payload for it.

    If `squares` is given, the squared norms of all chunks are added to `squares.partner`.
    """

    def __init__(
        self,
        coding: Coding,
        *,
        executor: Executor,
        slab: Slab,
        beside: Beside | None = None,
        squares: Squares | None = None,
    ) -> None:
        self.kept: list[Payload] = []
        self.broken: list[int] = []
        self._squares = squares
        self._scratch = Scratch()
        self._coding = coding
        self._executor = executor
        self._slab = slab
        self._beside = beside
        self._batch: list[Chunk] = []
        self._checking: asyncio.Future[list[Checked]] | None = None
        self._indices: list[int] = []

    async def add(self, chunk: Chunk) -> None:
        """Add a chunk, and wait if checking falls two batches behind. Raises CorruptPayload if a chunk is invalid."""
        self._batch.append(chunk)
        if len(self._batch) >= BATCH_CHUNKS:
            await self._flush()

    async def finish(self) -> None:
        """Wait until all chunks are checked. Raises CorruptPayload if one of them is invalid."""
        await self._flush()
        await self._settle()

    async def _flush(self) -> None:
        await self._settle()
        batch, self._batch = self._batch, []
        self._indices = [chunk.index for chunk in batch]
        self._checking = asyncio.get_running_loop().run_in_executor(self._executor, self._check, batch)

    def _check(self, chunks: list[Chunk]) -> list[Checked]:
        checked = [_checked(self._coding, chunk, self._slab, self._beside) for chunk in chunks]
        if self._squares is not None:
            for chunk, (payload, _) in zip(chunks, checked, strict=True):
                self._squares.partner += self._coding.square(payload, chunk.index, scratch=self._scratch)
        return checked

    async def _settle(self) -> None:
        if self._checking is None:
            return
        checking, self._checking = self._checking, None
        for index, (payload, is_whole) in zip(self._indices, await checking, strict=True):
            if not is_whole:
                self.broken.append(index)
            self.kept.append(payload)


def _batches(indices: Sequence[int]) -> Iterator[Sequence[int]]:
    return (indices[start : start + BATCH_CHUNKS] for start in range(0, len(indices), BATCH_CHUNKS))


def _code(coding: Coding, indices: Sequence[int], source: Tensor, slab: Slab) -> list[Chunk]:
    payloads = [_coded(coding, index, source[slice(*chunk_range(len(source), index))], slab) for index in indices]
    return _wrap(coding, indices, payloads)


def _coded(coding: Coding, index: int, values: Tensor, slab: Slab) -> Payload:
    """Encode a chunk. The slab stores only payloads without modulo coding, because half-differences need them later."""
    if on_grid := coding.modulo(index):
        codec, grid = on_grid
        return codec.encode(values, grid=grid, chunk_index=index)
    return slab.code(coding.plan.codec, values)


def _measure_own(
    coding: Coding, indices: Sequence[int], payloads: Sequence[Payload], squares: Squares, scratch: Scratch
) -> list[Chunk]:
    for index, payload in zip(indices, payloads, strict=True):
        squares.own += coding.square(payload, index, scratch=scratch)
    return _wrap(coding, indices, payloads)


def _wrap(coding: Coding, indices: Sequence[int], payloads: Sequence[Payload]) -> list[Chunk]:
    name, pairs = coding.plan.name, zip(indices, payloads, strict=True)
    return [Chunk(name, index, payload, chunk_digest(payload)) for index, payload in pairs]


def _checked(coding: Coding, chunk: Chunk, slab: Slab, beside: Beside | None) -> Checked:
    if chunk_digest(chunk.payload) != chunk.digest:
        raise CorruptPayload(f"chunk {chunk.index} of {coding.plan.name.name.lower()} is damaged")
    if beside is None:
        return _kept(coding, chunk, slab), True
    own = beside.values[slice(*chunk_range(len(beside.values), chunk.index))]
    if on_grid := coding.modulo(chunk.index):
        codec, grid = on_grid
        earlier = beside.earlier[chunk.index] if coding.times_broken else b""
        differences = codec.differences(own, chunk.payload, grid=grid, chunk_index=chunk.index, earlier=earlier)
        if differences is None:
            return b"".join((earlier, chunk.payload)) if coding.follows else b"", False
        kept, half = slab.keep(differences), coding.half_difference(codec, differences, chunk.index)
    else:
        kept = _kept(coding, chunk, slab)
        half = coding.plan.codec.decode(kept, num_elements=own.numel()).sub_(own).mul_(0.5)
        if coding.plan.codec.encode(own) == kept:
            half.zero_()  # the remaining difference is the codec's error, not a distance
    beside.bounds.update(chunk.index, half_difference=half, values=own)
    return kept, True


def _kept(coding: Coding, chunk: Chunk, slab: Slab) -> Payload:
    codec, num_elements = coding.plan.codec, coding.num_elements(chunk.index)
    fits = len(chunk.payload) == codec.num_bytes(num_elements)
    payload = slab.keep(chunk.payload) if fits else chunk.payload
    codec.check(payload, num_elements=num_elements)  # this checks the copy, because torch needs writable memory
    return payload
