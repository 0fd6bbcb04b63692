"""Coding ahead and checking behind: what a swap does with payloads besides moving them, off the event loop.

Both work message by message, and a message carries several chunks. A hop to another thread and back costs more than
coding a chunk does, as the event loop, the codec thread and the training thread pass one interpreter lock around.
"""

from __future__ import annotations

import asyncio
from collections import deque
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

MESSAGE_BYTES = 528 << 10  # of payload: two chunks of 8 bits or four of 4 bits, which a slow link carries in seconds


class Staged:
    """The coded outer gradient of this round, filled chunk by chunk at the boundary. Lives on the network thread."""

    def __init__(self) -> None:
        self.chunks: list[Payload | None] = []
        self._grown = asyncio.Event()

    def put(self, payload: Payload) -> None:
        self.chunks.append(payload)
        self._grown.set()

    async def get(self, indices: Sequence[int]) -> list[Payload]:
        """Waits until these chunks are staged; ends by cancellation only, as the boundary may be minutes away."""
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
    own: list[Payload | None],
    squares: Squares,
) -> AsyncGenerator[Chunk]:
    """These chunks of a section in messages; the next one is coded while the caller sends this one.

    `source`: a flat vector to code, or payloads that the training thread codes, whose squares are added to
    `squares.own`. own: gets what half-differences need of the payloads of a vector, by index. Raises ValueError for a
    vector that is not finite.
    """
    messages, scratch = together(coding, indices), Scratch()

    async def message() -> Chunk | None:
        mine = next(messages, None)
        if mine is None:
            return None
        if isinstance(source, Staged):
            work = (_measure_own, coding, mine, await source.get(mine), squares, scratch)
            return await asyncio.get_running_loop().run_in_executor(executor, *work)
        return await asyncio.get_running_loop().run_in_executor(executor, _code, coding, mine, source, slab, own)

    coming = asyncio.create_task(message())
    try:
        while (chunks := await coming) is not None:
            coming = asyncio.create_task(message())
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
    """Checks each message while the next one arrives. An error is raised by a later `add`, or by `finish`.

    indices: of the chunks to come, in order. kept: what `Coding.half_difference` takes as the partner's side, in order,
    in memory of `slab`. broken: chunks whose bound did not hold, to be sent again without modulo; empty in `kept`. With
    `squares` their squares are added to `squares.partner`.
    """

    def __init__(
        self,
        coding: Coding,
        indices: Sequence[int],
        *,
        executor: Executor,
        slab: Slab,
        beside: Beside | None = None,
        squares: Squares | None = None,
    ) -> None:
        self.kept: list[Payload] = []
        self.broken: list[int] = []
        self._missing = deque(indices)
        self._squares = squares
        self._scratch = Scratch()
        self._coding = coding
        self._executor = executor
        self._slab = slab
        self._beside = beside
        self._checking: asyncio.Future[list[Payload | None]] | None = None
        self._checked_indices: list[int] = []

    @property
    def next_index(self) -> int | None:
        """Of the first chunk of the next message; None when all have come."""
        return self._missing[0] if self._missing else None

    async def add(self, message: Chunk) -> None:
        """Raises CorruptPayload for this or an earlier message. Waits while an earlier one is being checked."""
        parts = self._split(message)
        await self._settle()
        self._checked_indices = [index for index, _ in parts]
        work = (self._check, message, parts)
        self._checking = asyncio.get_running_loop().run_in_executor(self._executor, *work)

    async def finish(self) -> None:
        """All chunks are checked when this returns. Raises CorruptPayload."""
        await self._settle()

    def _split(self, message: Chunk) -> list[tuple[int, Payload]]:
        """(index, payload) of each chunk. The last one may be too short; its check finds that."""
        parts: list[tuple[int, Payload]] = []
        payload, start = memoryview(message.payload), 0
        while start < len(payload) or not parts:
            if not self._missing:
                raise CorruptPayload(
                    f"the rest of {_name(self._coding)} must have {start} bytes, it has {len(payload)}"
                )
            index = self._missing.popleft()
            stop = start + self._coding.num_bytes([index])
            parts.append((index, payload[start:stop]))
            start = stop
        return parts

    def _check(self, message: Chunk, parts: list[tuple[int, Payload]]) -> list[Payload | None]:
        """What is kept of each chunk; None for one that modulo coding could not carry. Raises CorruptPayload."""
        if chunk_digest(message.payload) != message.digest:
            raise CorruptPayload(f"the message with chunk {message.index} of {_name(self._coding)} is damaged")
        kept = [_checked(self._coding, index, payload, self._slab, self._beside) for index, payload in parts]
        if self._squares is not None:
            for (index, _), payload in zip(parts, kept, strict=True):
                assert payload is not None, "coded modulo"
                self._squares.partner += self._coding.square(payload, index, scratch=self._scratch)
        return kept

    async def _settle(self) -> None:
        if self._checking is None:
            return
        checking, self._checking = self._checking, None
        for index, payload in zip(self._checked_indices, await checking, strict=True):
            if payload is None:
                self.broken.append(index)
            self.kept.append(payload or b"")


def together(coding: Coding, indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """Which chunks travel in one message: as many as MESSAGE_BYTES hold, and one at least."""
    first, num_bytes = 0, 0
    for at, index in enumerate(indices):
        size = coding.num_bytes([index])
        if at > first and num_bytes + size > MESSAGE_BYTES:
            yield indices[first:at]
            first, num_bytes = at, 0
        num_bytes += size
    if indices:
        yield indices[first:]


def _code(coding: Coding, indices: Sequence[int], source: Tensor, slab: Slab, own: list[Payload | None]) -> Chunk:
    payloads = [_coded(coding, index, source[slice(*chunk_range(len(source), index))], slab) for index in indices]
    for index, payload in zip(indices, payloads, strict=True):
        own[index] = None if coding.modulo(index) else payload
    return _wrap(coding, indices, payloads)


def _coded(coding: Coding, index: int, values: Tensor, slab: Slab) -> Payload:
    """Modulo payloads are gone when they are sent; of the others the half-differences are made."""
    if on_grid := coding.modulo(index):
        codec, grid = on_grid
        return codec.encode(values, grid=grid, chunk_index=index)
    return slab.code(coding.plan.codec, values)


def _measure_own(
    coding: Coding, indices: Sequence[int], payloads: Sequence[Payload], squares: Squares, scratch: Scratch
) -> Chunk:
    for index, payload in zip(indices, payloads, strict=True):
        squares.own += coding.square(payload, index, scratch=scratch)
    return _wrap(coding, indices, payloads)


def _wrap(coding: Coding, indices: Sequence[int], payloads: Sequence[Payload]) -> Chunk:
    payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    return Chunk(coding.plan.name, indices[0], payload, chunk_digest(payload))


def _name(coding: Coding) -> str:
    return coding.plan.name.name.lower()


def _checked(coding: Coding, index: int, payload: Payload, slab: Slab, beside: Beside | None) -> Payload | None:
    if beside is None:
        return _kept(coding, index, payload, slab)
    own = beside.values[slice(*chunk_range(len(beside.values), index))]
    if on_grid := coding.modulo(index):
        codec, grid = on_grid
        differences = codec.differences(own, payload, grid=grid, chunk_index=index)
        if differences is None:
            return None
        kept, half = slab.keep(differences), coding.half_difference(None, differences, index)
    else:
        kept = _kept(coding, index, payload, slab)
        half = coding.plan.codec.decode(kept, num_elements=own.numel()).sub_(own).mul_(0.5)
    beside.bounds.update(index, half_difference=half, values=own)
    return kept


def _kept(coding: Coding, index: int, payload: Payload, slab: Slab) -> Payload:
    codec, num_elements = coding.plan.codec, coding.num_elements(index)
    if len(payload) == codec.num_bytes(num_elements):
        payload = slab.keep(payload)
    codec.check(payload, num_elements=num_elements)  # of the copy, as torch wants writable memory
    return payload
