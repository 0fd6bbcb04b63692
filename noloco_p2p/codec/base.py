"""Define the interface of all codecs and the checks that they share."""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch import Tensor

from noloco_p2p.errors import CorruptPayload

CHUNK_ELEMENTS = 262_144  # 1 MiB of fp32 fits in a core's cache, and an encoded chunk is a well-sized gRPC message

CPU = torch.device("cpu")

assert sys.byteorder == "little", "big-endian machines are not supported, because payloads are little-endian"


class Codec(Protocol):
    """A stateless and deterministic codec for the chunks of a vector. `name` is its name in a run spec."""

    @property
    def name(self) -> str: ...

    def num_bytes(self, num_elements: int) -> int:
        """Return the exact size in bytes of a chunk's payload.

        Raises ValueError unless 0 <= num_elements <= CHUNK_ELEMENTS.
        """
        ...

    def encode(self, values: Tensor) -> bytes:
        """Encode a chunk.

        `values` is a contiguous 1-D tensor of at most CHUNK_ELEMENTS elements, in any floating-point dtype and on any
        device; it is not changed. Encoding runs on the device of `values` and synchronizes once, to copy the encoded
        bytes to the CPU. Raises ValueError for any other shape, and for a value that is non-finite or too large for the
        codec.
        """
        ...

    def check(self, payload: bytes | memoryview, *, num_elements: int) -> None:
        """Raise the errors that `decode` would raise, without decoding. Use this for a chunk that stays encoded."""
        ...

    def decode(self, payload: bytes | memoryview, *, num_elements: int) -> Tensor:
        """Decode a payload to fp32 on the CPU.

        The result has shape (num_elements,), and all its values are finite. Raises CorruptPayload for a wrong length
        and for values that are non-finite once decoded. The caller knows the sender and adds its name to the error.
        Raises ValueError for a `num_elements` that no chunk can have.
        """
        ...


def check_num_elements(num_elements: int) -> None:
    if not 0 <= num_elements <= CHUNK_ELEMENTS:
        raise ValueError(
            f"a chunk must have 0 to {CHUNK_ELEMENTS} elements, not {num_elements}; split the tensor with "
            "chunk_bounds()"
        )


def check_values(values: Tensor) -> None:
    """Raise ValueError if `values` is not a chunk. This checks the layout and the dtype, but not the elements."""
    if values.ndim != 1 or not values.is_contiguous() or not values.is_floating_point():
        shape = tuple(values.shape)
        raise ValueError(f"a chunk must be a contiguous 1-D floating-point tensor, not {values.dtype} of shape {shape}")
    check_num_elements(values.numel())


def check_length(payload: bytes | memoryview, expected: int, *, name: str, num_elements: int) -> None:
    """Raise CorruptPayload if the payload of a chunk does not have the expected length."""
    if (received := memoryview(payload).nbytes) != expected:
        raise CorruptPayload(
            f"the {name} chunk of {num_elements} elements must have {expected} bytes, but it has {received}; discard it"
        )


def payload_bytes(payload: bytes | memoryview, *, codec: Codec, num_elements: int) -> Tensor:
    """Return the payload as a uint8 tensor, which must not be changed. Raises CorruptPayload if its length is wrong."""
    check_length(payload, codec.num_bytes(num_elements), name=codec.name, num_elements=num_elements)
    return as_tensor(payload)


def as_tensor(payload: bytes | memoryview) -> Tensor:
    """Return a payload as a uint8 tensor, which must not be changed."""
    view = memoryview(payload)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
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
    """Return the error for a flat tensor that cannot be encoded.

    The error names the first non-finite element, or the largest element if all are finite.
    """
    bad = torch.nonzero(~torch.isfinite(values.detach()))
    index = int(bad[0]) if len(bad) else int(values.detach().abs().argmax())
    what = "is not finite" if len(bad) else f"is too large for {name}"
    return ValueError(f"cannot encode: element {index} of {values.numel()} is {float(values[index])}, which {what}")
