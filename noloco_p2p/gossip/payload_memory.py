"""A pool of memory for the coded sections of swaps.

A swap needs as much memory as half the model, every round. A fresh allocation costs more than coding: the kernel fills
each page with zeros first (0.1 to 2 ns per byte; bf16 coding takes 0.1).

A piece returns to the pool with its last view, not by a call: gRPC may still read a payload after its swap has ended,
and memory that was released too early would change under it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_p2p.codec import Codec, Scratch
from noloco_p2p.gossip.frames import Payload

Memory = NDArray[np.uint8]

MAX_KEPT_BLOCK_BYTES = (32 << 20) - (64 << 10)  # glibc raises its threshold to at most 32 MiB


class PayloadMemory:
    """Lends memory by size. Any thread may call it.

    The sections of a run have one size each, so the pool holds no more than was in use at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Memory]] = {}
        _keep_freed_blocks()

    def take(self, num_bytes: int) -> Slab:
        free = self._free.setdefault(num_bytes, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(num_bytes, dtype=np.uint8)  # pages are allocated as they are filled
        return Slab(np.asarray(_Lease(memory, free)).data)


def _keep_freed_blocks() -> None:
    """Make glibc reuse blocks of up to 32 MiB instead of returning each to the kernel, as gRPC copies every message.

    glibc raises that threshold to the size of the largest block that was freed (mallopt(3)). The block here is never
    written, so it takes address space only. Other C libraries ignore it.
    """
    np.empty(MAX_KEPT_BLOCK_BYTES, dtype=np.uint8)


class Slab:
    """The memory of one section, filled from the front, chunk by chunk, by one thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._used = 0
        self._scratch = Scratch()

    def code(self, codec: Codec, values: Tensor) -> memoryview:
        """Return the payload of a chunk. Raises ValueError as `Codec.encode_into` does."""
        payload = self._cut(codec.num_bytes(values.numel()))
        codec.encode_into(values, torch.frombuffer(payload, dtype=torch.uint8), scratch=self._scratch)
        return payload

    def keep(self, payload: Payload) -> memoryview:
        """Return a copy of a payload, so that its message can be freed."""
        kept = self._cut(len(payload))
        # numpy lets other threads run meanwhile, and unlike torch it accepts read-only memory
        np.copyto(np.frombuffer(kept, dtype=np.uint8), np.frombuffer(payload, dtype=np.uint8))
        return kept

    def _cut(self, num_bytes: int) -> memoryview:
        start, self._used = self._used, self._used + num_bytes
        assert self._used <= len(self._memory), (self._used, len(self._memory))
        return self._memory[start : self._used]


class _Lease:
    """All views of a piece of memory refer to it; when the last view is gone, the memory is free."""

    def __init__(self, memory: Memory, free: list[Memory]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._memory)
