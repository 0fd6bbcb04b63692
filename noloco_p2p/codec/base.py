"""Define the interface of all codecs and the checks that they share."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from noloco_p2p.errors import CorruptPayload

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.bfloat16).max  # the largest number of a payload, which fp32 and bf16 can both represent

assert sys.byteorder == "little", "big-endian machines are not supported, because payloads are little-endian"


class Codec(Protocol):
    """A stateless and deterministic codec for tensors of shape (..., hidden). `name` is its name in a run spec.

    The last axis holds the numbers of one token. The payload is a sequence of encoded tokens of equal size, so its size
    depends only on the shape. A chunk of a flat vector is a single token.
    """

    @property
    def name(self) -> str: ...

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the exact size of a tensor's payload in bytes. Raises ValueError if `shape` is not (..., hidden)."""
        ...

    def encode(self, values: Tensor) -> memoryview:
        """Encode a tensor of shape (..., hidden) into a newly allocated payload.

        The tensor may have any floating-point dtype and be on any device; it is not changed. Encoding runs on the
        tensor's device and synchronizes once, to copy the encoded bytes to the CPU. Raises ValueError for any other
        kind of tensor, and for a value that is non-finite or too large for the codec. These checks protect the sender,
        because a receiver blames the sender for a bad payload.
        """
        ...

    def check(self, payload: bytes | memoryview, *, shape: Sequence[int]) -> None:
        """Raise the errors that `decode` would raise, without decoding. Use this for a payload that stays encoded."""
        ...

    def decode(
        self,
        payload: bytes | memoryview,
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> Tensor:
        """Decode a payload to a new tensor with the given shape, dtype and device.

        Every value is finite; in fp16, values that are too large are clamped to the largest finite value. Raises
        CorruptPayload for a wrong length, and NotFinite for bytes that no encoder writes. The caller knows the sender
        and adds its name to the error.
        """
        ...


def tokens_and_hidden(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of tokens, and the number of elements of each token."""
    if not shape or min(shape) < 0:
        raise ValueError(f"a tensor to encode must have the shape (..., hidden), not {tuple(shape)}")
    return math.prod(shape[:-1]), shape[-1]


def as_tokens(values: Tensor) -> Tensor:
    """Return `values`, detached and reshaped to (tokens, hidden). The result is a view if possible."""
    num_tokens, hidden = tokens_and_hidden(values.shape)
    if not values.is_floating_point():
        raise ValueError(f"a tensor to encode must hold floating-point numbers, not {values.dtype}")
    return values.detach().reshape(num_tokens, hidden)


def as_tensor(payload: bytes | memoryview, expected_bytes: int, *, name: str) -> Tensor:
    """Return a payload as a uint8 tensor, which must not be changed. Raises CorruptPayload if its length is wrong."""
    view = memoryview(payload)
    if view.nbytes != expected_bytes:
        raise CorruptPayload(
            f"the {name} payload must have {expected_bytes} bytes, but it has {view.nbytes}; discard it"
        )
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # Read-only memory is copied because torch warns about it. For bf16, the copy takes 11 us.
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def within(values: Tensor, *, lowest: float, highest: float) -> bool:
    """Return whether all `values` are in [lowest, highest]. NaN counts as outside.

    This takes one pass and is seven times as fast as isfinite().all().
    """
    if not values.numel():
        return True
    smallest, largest = torch.aminmax(values)
    return bool(smallest >= lowest) and bool(largest <= highest)


def refused_value(values: Tensor, *, name: str) -> ValueError:
    """Return the error for a tensor that cannot be encoded.

    The error names the first non-finite element, or the largest element if all are finite.
    """
    values = values.detach().flatten()
    bad = torch.nonzero(~torch.isfinite(values))
    index = int(bad[0]) if len(bad) else int(values.abs().argmax())
    what = "is not finite" if len(bad) else f"is too large for {name}"
    return ValueError(f"cannot encode: element {index} of {values.numel()} is {float(values[index])}, which {what}")


def saturated(values: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Clamp decoded values, which are within LARGEST, if they would be infinite in `dtype`, as only in fp16."""
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest) if largest < LARGEST else values  # bf16 cannot represent 65504
