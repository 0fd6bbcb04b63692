"""Encode tensors as fp32 (exact) or bf16 (rounded to nearest even), in little-endian byte order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec.base import (
    CPU,
    LARGEST,
    as_tensor,
    as_tokens,
    refused_value,
    saturated,
    tokens_and_hidden,
    within,
)
from noloco_p2p.errors import NotFinite


@dataclass(frozen=True, slots=True)
class RawCodec:
    """A codec that stores elements in `dtype` without a scale or header, at `dtype.itemsize` bytes per element."""

    name: str
    dtype: torch.dtype

    def num_bytes(self, shape: Sequence[int]) -> int:
        num_tokens, hidden = tokens_and_hidden(shape)
        return num_tokens * hidden * self.dtype.itemsize

    def encode(self, values: Tensor) -> memoryview:
        tokens = as_tokens(values)
        # Values are rounded on their device so that fewer bytes are copied.
        coded = torch.empty(tokens.shape, dtype=self.dtype, device=values.device).copy_(tokens).cpu()
        if not within(coded, lowest=-LARGEST, highest=LARGEST):  # after rounding, which can make a value infinite
            raise refused_value(values, name=self.name)
        return coded.flatten().view(torch.uint8).numpy().data

    def check(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> None:
        self._checked(payload, shape)

    def decode(
        self,
        payload: bytes | memoryview,
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> Tensor:
        coded = self._checked(payload, shape).to(device)
        out = torch.empty(*shape, dtype=dtype, device=device)
        return out.copy_(saturated(coded, dtype=dtype).view(out.shape))

    def _checked(self, payload: bytes | memoryview, shape: Sequence[int]) -> Tensor:
        coded = as_tensor(payload, self.num_bytes(shape), name=self.name).view(self.dtype)
        if not within(coded, lowest=-LARGEST, highest=LARGEST):
            raise NotFinite(f"the {self.name} payload has NaN, infinity or a magnitude above {LARGEST:.3g}; discard it")
        return coded
