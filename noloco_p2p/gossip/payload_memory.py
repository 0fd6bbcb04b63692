"""This module provides a pool of memory for the encoded sections of swaps.

Each swap needs half as much memory as the model. A fresh allocation would take longer than encoding, because the kernel
first fills each page with zeros (0.1 to 2 ns per byte, compared with 0.1 ns for bf16 encoding).

A block returns to the pool when its last view is gone, not by an explicit call. gRPC may still read a payload after its
swap has ended, so a block that was released earlier could be overwritten while gRPC sends it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_p2p.codec import Codec, Scratch
from noloco_p2p.gossip.frames import Payload

Memory = NDArray[np.uint8]

MAX_KEPT_BLOCK_BYTES = (32 << 20) - (64 << 10)  # glibc raises its mmap threshold to at most 32 MiB


class PayloadMemory:
    """A thread-safe pool of memory blocks, grouped by size.

    Each section of a run has a fixed size, so the pool never holds more memory than was in use at one time.
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
    """Make glibc reuse blocks of up to 32 MiB instead of returning them to the kernel.

    This matters because gRPC copies every message. glibc raises its mmap threshold to the size of the largest block
    that was freed, as mallopt(3) describes. The block that this function frees is never written to, so it uses only
    address space. Other C libraries are not affected.
    """
    np.empty(MAX_KEPT_BLOCK_BYTES, dtype=np.uint8)


class Slab:
    """The memory of one section. Only one thread at a time may fill it, chunk by chunk from the front."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._used = 0
        self._scratch = Scratch()

    def code(self, codec: Codec, values: Tensor) -> memoryview:
        """Encode a chunk and return its payload. Raises ValueError as `Codec.encode_into` does."""
        payload = self._cut(codec.num_bytes(values.numel()))
        codec.encode_into(values, torch.frombuffer(payload, dtype=torch.uint8), scratch=self._scratch)
        return payload

    def keep(self, payload: Payload) -> memoryview:
        """Copy a payload, so that its message can be freed, and return the copy."""
        kept = self._cut(len(payload))
        # numpy lets other threads run while it copies, and, unlike torch, it accepts read-only memory
        np.copyto(np.frombuffer(kept, dtype=np.uint8), np.frombuffer(payload, dtype=np.uint8))
        return kept

    def _cut(self, num_bytes: int) -> memoryview:
        start, self._used = self._used, self._used + num_bytes
        assert self._used <= len(self._memory), (self._used, len(self._memory))
        return self._memory[start : self._used]


class _Lease:
    """The owner of a memory block. When the last view of the block is gone, the block returns to the pool."""

    def __init__(self, memory: Memory, free: list[Memory]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._memory)
