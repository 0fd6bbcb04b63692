"""fp32 (exact) and bf16 (rounded to nearest even): the elements themselves, little-endian, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec.base import check_num_elements, check_values, payload_bytes, refused_value, within
from noloco_p2p.errors import CorruptPayload


@dataclass(frozen=True, slots=True)
class RawCodec:
    """Elements in `dtype`, without scale or header: `dtype.itemsize` bytes a parameter."""

    name: str
    dtype: torch.dtype
    bits: torch.dtype  # the integer of that size: numpy knows no bf16

    def num_bytes(self, num_elements: int) -> int:
        check_num_elements(num_elements)
        return num_elements * self.dtype.itemsize

    def encode(self, values: Tensor) -> bytes:
        check_values(values)
        coded = values.detach().to(self.dtype).cpu()
        if not self._all_finite(coded):  # checked after rounding: the largest fp32 values become infinite in bf16
            raise refused_value(values, codec=self)
        return coded.view(self.bits).numpy().tobytes()

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        self._checked(payload, num_elements=num_elements)

    def decode(self, payload: bytes | memoryview, *, num_elements: int) -> Tensor:
        coded = self._checked(payload, num_elements=num_elements)
        return coded.to(torch.float32)  # fp32: no second copy, payload_bytes() made one

    def _checked(self, payload: bytes | memoryview, *, num_elements: int) -> Tensor:
        coded = payload_bytes(payload, codec=self, num_elements=num_elements).view(self.dtype)
        if not self._all_finite(coded):
            raise CorruptPayload(
                f"{self.name} chunk of {num_elements} elements holds NaN or infinity; discard the part"
            )
        return coded

    def _all_finite(self, coded: Tensor) -> bool:
        limits = torch.finfo(self.dtype)
        return within(coded, lowest=limits.min, highest=limits.max)


FP32 = RawCodec(name="fp32", dtype=torch.float32, bits=torch.int32)
BF16 = RawCodec(name="bf16", dtype=torch.bfloat16, bits=torch.int16)
