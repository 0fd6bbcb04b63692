"""Memory for the coded sections of a swap, used again from round to round.

A swap needs as much memory as half the model, every round. To give it back and ask for it anew costs more than to code
what goes into it: the kernel fills each page with zeros first (0.1 to 2 ns a byte; bf16 coding takes 0.1).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_p2p.codec import Codec, Scratch
from noloco_p2p.gossip.frames import Payload

Memory = NDArray[np.uint8]

LARGEST_LESSON_BYTES = (32 << 20) - (64 << 10)  # above 32 MiB glibc learns nothing


class PayloadMemory:
    """Gives memory by size, and has it back by itself when nobody can see it any more. Any thread may call it.

    As the sections of a run have one size each, no more is held than was in use at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Memory]] = {}
        # gRPC copies each message more than once, into memory that the C library would give back to the kernel after
        # each of them. glibc learns from the first block of this size that goes to keep more (mallopt(3)); a process
        # that trains frees such blocks all the time.
        np.empty(LARGEST_LESSON_BYTES, dtype=np.uint8)

    def take(self, num_bytes: int) -> Slab:
        free = self._free.setdefault(num_bytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(num_bytes, dtype=np.uint8)  # becomes real page by page, as it is filled
        return Slab(np.asarray(_Lease(memory, free)).data)


class Slab:
    """The memory of one section, filled from the front, chunk after chunk, by one thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._used = 0
        self._scratch = Scratch()

    def code(self, codec: Codec, values: Tensor) -> memoryview:
        """The payload of a chunk. Raises ValueError as `Codec.encode_into` does."""
        payload = self._cut(codec.num_bytes(values.numel()))
        codec.encode_into(values, torch.frombuffer(payload, dtype=torch.uint8), scratch=self._scratch)
        return payload

    def keep(self, payload: Payload) -> memoryview:
        """A copy of a payload, so that the message it came in can go."""
        kept = self._cut(len(payload))
        # numpy lets other threads run Python meanwhile, and unlike torch it reads memory that is not to be written.
        np.copyto(np.frombuffer(kept, dtype=np.uint8), np.frombuffer(payload, dtype=np.uint8))
        return kept

    def _cut(self, num_bytes: int) -> memoryview:
        start, self._used = self._used, self._used + num_bytes
        assert self._used <= len(self._memory), (self._used, len(self._memory))
        return self._memory[start : self._used]


class _Lease:
    """What all views of a piece of memory hold on to; with the last of them it goes, and the memory is free."""

    def __init__(self, memory: Memory, free: list[Memory]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._memory)
