"""The trainable parameters of a model as one flat vector in a fixed order of names, without storing that vector."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.devices import has_own_memory, synchronize
from noloco_p2p.errors import ModelError
from noloco_p2p.gossip.layout import ModelLayout

HASHED_AT_ONCE = 1 << 22  # numbers that are copied for a digest


@dataclass(frozen=True, slots=True)
class _Piece:
    values: Tensor  # a part of one parameter, 1-D, on the parameter's device
    start: int  # its offset in the chunk
    stop: int


class FlatParameters:
    """`read(start, stop)` and `write(start, values)` by position in the vector. Tied parameters appear once."""

    def __init__(self, model: nn.Module) -> None:
        self.named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        self._frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
        if not self.named:
            raise ModelError("the model has no trainable parameters")
        self.device = self.named[0][1].device
        self._is_async = has_own_memory(self.device)
        self._offsets: list[int] = []
        offset = 0
        for name, param in self.named:
            self._check(name, param)
            if not param.is_contiguous():
                raise ModelError(f"{name} is not contiguous in memory; call .contiguous() on it before training")
            self._offsets.append(offset)
            offset += param.numel()
        self.num_elements = offset

    def _check(self, name: str, param: Tensor) -> None:
        if isinstance(param, DTensor):
            raise ModelError(f"{name} is sharded over several processes; `noloco join --gpus` trains such models")

    @cached_property
    def model_layout(self) -> ModelLayout:
        """What partners must have in common. Frozen parameters do not travel, so their content is hashed (4 GB/s)."""
        trainable = tuple((name, tuple(param.shape)) for name, param in self.named)
        return ModelLayout(trainable, tuple((name, tuple(p.shape), content_digest(p)) for name, p in self._frozen))

    def layout(self) -> str:
        """The digest of `model_layout`: two peers can swap only if it is the same."""
        return self.model_layout.digest()

    def read(self, start: int, stop: int) -> Tensor:
        """Return a new fp32 tensor with elements [start, stop), on the device of the parameters."""
        return torch.cat([piece.values.float() for piece in self._pieces(start, stop)])

    def minus(self, start: int, values: Tensor, *, out: Tensor) -> Tensor:
        """Write parameters minus `values` (1-D, any device), for elements [start, start + len), to the start of `out`.

        `out`: fp32, on the device of the parameters, at least as long as `values`.
        """
        for piece in self._pieces(start, start + values.numel()):
            place = slice(piece.start, piece.stop)
            there = values[place].to(piece.values.device, non_blocking=self._is_async)
            torch.sub(piece.values.float(), there, out=out[place])
        return out[: values.numel()]

    def write(self, start: int, values: Tensor) -> None:
        """Copy `values` (1-D, any device) over elements [start, start + len).

        From pinned memory it may return early; `values` must then not change until `flush`.
        """
        for piece in self._pieces(start, start + values.numel(), is_written=True):
            piece.values.copy_(values[piece.start : piece.stop], non_blocking=self._is_async)

    def add(self, start: int, values: Tensor) -> None:
        """Add `values` (1-D, any device) to elements [start, start + len), in place."""
        for piece in self._pieces(start, start + values.numel(), is_written=True):
            piece.values.add_(values[piece.start : piece.stop].to(piece.values.device))

    def flush(self) -> None:
        """Wait until all that was written is in the model."""
        synchronize(self.device)

    def named_values(self) -> dict[str, Tensor]:
        """The parameters by name, which must not be written to."""
        return {name: param.detach() for name, param in self.named}

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector with the names and shapes of the parameters."""
        stops = [*self._offsets[1:], self.num_elements]
        return {
            name: vector[start:stop].view(param.shape)
            for (name, param), start, stop in zip(self.named, self._offsets, stops, strict=True)
        }

    def take(self, values: Mapping[str, Tensor]) -> None:
        """The inverse of `named_values`; the values may be on any device."""
        for offset, (name, _) in zip(self._offsets, self.named, strict=True):
            flat = values[name].reshape(-1)
            for start, stop in chunk_bounds(flat.numel()):
                self.write(offset + start, flat[start:stop])
        self.flush()

    def _pieces(self, start: int, stop: int, *, is_written: bool = False) -> Iterator[_Piece]:
        for index in range(bisect_right(self._offsets, start) - 1, len(self.named)):
            offset = self._offsets[index]
            if offset >= stop:
                return
            first, last = max(start, offset), min(stop, offset + self.named[index][1].numel())
            if first < last:  # false for a parameter without elements
                values = self._values(index, is_written=is_written).view(-1)
                yield _Piece(values[first - offset : last - offset], first - start, last - start)

    def _values(self, index: int, *, is_written: bool) -> Tensor:
        """The whole parameter at that index of `named`. If `is_written`, what the caller writes takes effect."""
        return self.named[index][1].detach()


def content_digest(values: Tensor) -> str:
    """The blake3 of the bytes of a tensor in its own dtype, on any device."""
    hasher = blake3()
    for chunk in values.detach().reshape(-1).split(HASHED_AT_ONCE):
        hasher.update(chunk.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
