"""Read and write a model's trainable parameters as one flat vector, without storing that vector."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.devices import has_own_memory, synchronize
from noloco_p2p.errors import ModelError
from noloco_p2p.gossip.layout import ModelLayout

HASHED_AT_ONCE = 1 << 22  # number of elements that are copied at once to compute a digest


class FlatParameters:
    """The trainable parameters of a model as one flat vector, in the order of `named_parameters()`.

    `read(start, stop)` and `write(start, values)` access elements by their position in the vector. Tied parameters
    appear once. Raises ModelError if no parameter is trainable, or if a parameter is sharded or not contiguous in
    memory. `is_readable_anywhere` says whether any thread can read the vector.
    """

    is_readable_anywhere = True

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
            raise ModelError(
                f"{name} is sharded across several processes; use `noloco join --gpus` to train such a model"
            )

    @cached_property
    def model_layout(self) -> ModelLayout:
        """Return the model's layout, which must be the same for both partners of a swap.

        Frozen parameters are not sent, so the layout contains digests of their content, which are computed at about 4
        GB/s.
        """
        trainable = tuple((name, tuple(param.shape)) for name, param in self.named)
        return ModelLayout(trainable, tuple((name, tuple(p.shape), content_digest(p)) for name, p in self._frozen))

    def layout(self) -> str:
        """Return the digest of `model_layout`. Two peers can swap only if their digests are equal."""
        return self.model_layout.digest()

    def read(self, start: int, stop: int) -> Tensor:
        """Return a new fp32 tensor with elements [start, stop), on the device of the parameters."""
        return torch.cat([values.float() for values, _ in self.pieces(start, stop)])

    def write(self, start: int, values: Tensor) -> None:
        """Copy `values` (1-D, any device) over elements [start, start + len).

        If `values` is in pinned memory, this call may return before the copy is complete. In that case, `values` must
        not change until `flush` has returned.
        """
        for part, place in self.pieces(start, start + values.numel(), is_written=True):
            part.copy_(values[place], non_blocking=self._is_async)

    def flush(self) -> None:
        """Wait until all writes have reached the model."""
        synchronize(self.device)

    def named_values(self) -> dict[str, Tensor]:
        """Return the parameters by name. Callers must not write to them."""
        return {name: param.detach() for name, param in self.named}

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of a flat vector with the names and shapes of the parameters."""
        stops = [*self._offsets[1:], self.num_elements]
        return {
            name: vector[start:stop].view(param.shape)
            for (name, param), start, stop in zip(self.named, self._offsets, stops, strict=True)
        }

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Set the parameters to `values`, which may be on any device. This is the inverse of `named_values`."""
        for offset, (name, _) in zip(self._offsets, self.named, strict=True):
            flat = values[name].reshape(-1)
            for start, stop in chunk_bounds(flat.numel()):
                self.write(offset + start, flat[start:stop])
        self.flush()

    def pieces(self, start: int, stop: int, *, is_written: bool = False) -> Iterator[tuple[Tensor, slice]]:
        """Yield the parts of the parameters that form elements [start, stop), with their places in it."""
        for index in range(bisect_right(self._offsets, start) - 1, len(self.named)):
            offset = self._offsets[index]
            if offset >= stop:
                return
            first, last = max(start, offset), min(stop, offset + self.named[index][1].numel())
            if first < last:  # false for a parameter without elements
                values = self._values(index, is_written=is_written).view(-1)
                yield values[first - offset : last - offset], slice(first - start, last - start)

    def _values(self, index: int, *, is_written: bool) -> Tensor:
        """Return the whole parameter at this index of `named`.

        If `is_written` is true, writes to it must reach the model.
        """
        return self.named[index][1].detach()


def content_digest(values: Tensor) -> str:
    """Return the blake3 digest of the bytes of a tensor in its own dtype. The tensor may be on any device."""
    hasher = blake3()
    for chunk in values.detach().reshape(-1).split(HASHED_AT_ONCE):
        hasher.update(chunk.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
