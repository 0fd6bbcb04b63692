"""Copy and change a model's weights slice by slice, while an optimizer trains them on another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.gossip.coder import Coding

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of the fraction of an fp32 number
SUBNORMAL = 2.0**-24  # distance between two subnormal numbers of fp16; those of bf16 have the exponents of fp32


class Parameters(Protocol):
    """The trainable parameters of a model as one flat vector. `FlatParameters` implements it."""

    def read(self, start: int, stop: int) -> Tensor: ...

    def pieces(self, start: int, stop: int) -> Iterable[tuple[Tensor, slice]]:
        """Yield the parts of the parameters that form elements [start, stop), with their places among these."""
        ...


class Weights:
    """The weights of one replica.

    The training thread holds `lock` while its optimizer changes the weights, and only then. Copies are made chunk by
    chunk, so the optimizer waits for a copy of 1 MiB at most. On an accelerator, a copy is queued on the stream on
    which the optimizer works, so it sees the weights before or after a step, but never in between.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.lock = threading.Lock()
        self._parameters = parameters

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of elements [start, stop) in fp32 on the CPU. This can be called on any thread."""
        copy = torch.empty(stop - start)
        for first in range(start, stop, CHUNK_ELEMENTS):
            last = min(first + CHUNK_ELEMENTS, stop)
            with self.lock:
                copy[first - start : last - start] = self._parameters.read(first, last)
        return copy

    @torch.no_grad()
    def add(self, start: int, coding: Coding) -> None:
        """Add the half-differences of a slice that begins at element `start`. Only the training thread calls this."""
        for index, chunk in enumerate(coding.chunks):
            halves = coding.half_difference(index)
            with self.lock:
                for part, place in self._parameters.pieces(start + chunk.start, start + chunk.stop):
                    add_(part, halves[place].to(part.device))


def add_(values: Tensor, offset: Tensor) -> None:
    """Add fp32 numbers to `values` in place.

    In bf16 and fp16, sums are rounded to one of the two nearest numbers at random, so that their expectation is exact.
    Rounding to nearest would lose every offset below half of the distance between two numbers.
    """
    bits = DROPPED_BITS.get(values.dtype)
    if bits is None:
        values.add_(offset)
        return
    exact = values.float().add_(offset)
    rounded = exact.view(torch.int32) + torch.randint_like(exact, 1 << bits, dtype=torch.int32)
    rounded = rounded.bitwise_and_(-1 << bits).view(torch.float32)  # carries into the exponent where they must
    if values.dtype is torch.float16:
        small = exact.div(SUBNORMAL).add_(torch.rand_like(exact)).floor_().mul_(SUBNORMAL)
        rounded = torch.where(exact.abs() < torch.finfo(torch.float16).tiny, small, rounded)
    values.copy_(rounded)
