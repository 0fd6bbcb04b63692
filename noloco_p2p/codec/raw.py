"""Encode vectors as fp32 (exact) or bf16 (rounded to nearest even), in little-endian byte order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec.base import check_num_elements, check_values, payload_bytes, refused_value, within
from noloco_p2p.errors import NotFinite


@dataclass(frozen=True, slots=True)
class RawCodec:
    """A codec that stores elements in `dtype` without a scale or header, at `dtype.itemsize` bytes per parameter."""

    name: str
    dtype: torch.dtype

    def num_bytes(self, num_elements: int) -> int:
        check_num_elements(num_elements)
        return num_elements * self.dtype.itemsize

    def encode(self, values: Tensor) -> bytes:
        check_values(values)
        values = values.detach()
        # Values are rounded on their device so that fewer bytes are copied.
        coded = torch.empty(values.numel(), dtype=self.dtype, device=values.device).copy_(values).cpu()
        if not self._all_finite(coded):  # checked after rounding: the largest fp32 values become infinite in bf16
            raise refused_value(values, name=self.name)
        return coded.view(torch.uint8).numpy().tobytes()

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        self._checked(payload, num_elements=num_elements)

    def decode(self, payload: bytes | memoryview, *, num_elements: int) -> Tensor:
        coded = self._checked(payload, num_elements=num_elements)
        return torch.empty(num_elements).copy_(coded)

    def _checked(self, payload: bytes | memoryview, *, num_elements: int) -> Tensor:
        coded = payload_bytes(payload, codec=self, num_elements=num_elements).view(self.dtype)
        if not self._all_finite(coded):
            raise NotFinite(f"the {self.name} chunk of {num_elements} elements contains NaN or infinity; discard it")
        return coded

    def _all_finite(self, coded: Tensor) -> bool:
        limits = torch.finfo(self.dtype)
        return within(coded, lowest=limits.min, highest=limits.max)


FP32 = RawCodec(name="fp32", dtype=torch.float32)
BF16 = RawCodec(name="bf16", dtype=torch.bfloat16)
