"""Copy chunks between an accelerator and main memory while both compute.

The copies use pinned memory and their own streams.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.devices import has_own_memory

log = logging.getLogger(__name__)

Chunk = Callable[[int, Tensor], Tensor]  # (index of the chunk, device memory for it) -> the chunk in this memory


class Staging:
    """Two streams of one device, one per direction, because a bus can transfer data in both directions at once."""

    def __init__(self, device: torch.device, *, is_overlapped: bool | None = None) -> None:
        """Create the streams if `is_overlapped` is true. By default, it is true if the device has its own memory.

        A CPU has streams in name only.
        """
        self.device = device
        self._api = torch.get_device_module(device)
        if is_overlapped is None:
            is_overlapped = has_own_memory(device)
        self._down, self._up = (self._stream(), self._stream()) if is_overlapped else (None, None)

    def _stream(self) -> Any:
        """Return a new stream of the model's device, which need not be the current device."""
        return self._api.Stream() if self.device.type == "cpu" else self._api.Stream(device=self.device)

    def chunks(self, chunk: Chunk, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield each chunk on the CPU. It is computed on the device and copied while the previous chunk is in use.

        A chunk is valid until the next one is requested.
        """
        if self._down is None:
            there = torch.empty(max(sizes), device=self.device)
            here = there if self.device.type == "cpu" else torch.empty(max(sizes))
            for index, size in enumerate(sizes):
                values = chunk(index, there)
                yield values if here is there else here[:size].copy_(values)
            return
        self._down.wait_stream(self._api.current_stream(self.device))
        slots = [_Slot(max(sizes), self.device) for _ in range(2)]
        for index in range(len(sizes) + 1):
            if index < len(sizes):
                with self._api.stream(self._down):
                    slots[index % 2].begin(chunk, index)
            if index:
                yield slots[(index - 1) % 2].end(sizes[index - 1])

    def going_up(self) -> AbstractContextManager[object]:
        """Return a context in which copies to the device do not wait for the device's computation.

        `FlatParameters.flush` waits for these copies.
        """
        return nullcontext() if self._up is None else self._api.stream(self._up)

    def begin(self) -> None:
        """Make later copies to the device wait for all computation that is already queued."""
        if self._up is not None:
            self._up.wait_stream(self._api.current_stream(self.device))


class _Slot:
    def __init__(self, num_elements: int, device: torch.device) -> None:
        self._on_device = torch.empty(num_elements, device=device)
        self._on_cpu = torch.empty(num_elements, pin_memory=has_own_memory(device))
        self._copied = torch.get_device_module(device).Event()

    def begin(self, chunk: Chunk, index: int) -> None:
        values = chunk(index, self._on_device)
        self._on_cpu[: values.numel()].copy_(values, non_blocking=True)
        self._copied.record()

    def end(self, num_elements: int) -> Tensor:
        self._copied.synchronize()
        return self._on_cpu[:num_elements]


def pin(values: Tensor, device: torch.device) -> None:
    """Pin a tensor of main memory in place, so that a CUDA device can copy it directly.

    The tensor is not copied, and no memory is lost to rounding up its size. If the system does not allow pinning,
    copies are slower and a warning is logged.
    """
    if device.type != "cuda" or not values.numel():
        return
    cudart: Any = torch.cuda.cudart()
    address = values.data_ptr()
    if int(cudart.cudaHostRegister(address, values.nbytes, 0)) != 0:
        log.warning("could not pin %d MiB of memory; outer steps will be slower", values.nbytes >> 20)
        return
    weakref.finalize(values, cudart.cudaHostUnregister, address)
