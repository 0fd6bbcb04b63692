"""Read and write a model's trainable parameters as one flat vector, without storing that vector."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.devices import has_own_memory, synchronize
from noloco_p2p.errors import ModelError
from noloco_p2p.gossip.layout import ModelLayout

T = TypeVar("T")

TRAINED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
COMPILED, WRAPPED = "_orig_mod.", "module."  # what torch.compile puts anywhere in a name, and DDP at its beginning
HASHED_AT_ONCE = 1 << 22  # number of elements that are copied at once to compute a digest


class FlatParameters:
    """The trainable parameters of a model as one flat vector, in the order of `named_parameters()`.

    `read(start, stop)` and `write(start, values)` access elements by their position in the vector. Tied parameters
    appear once. Raises ModelError if no parameter is trainable, or if a parameter is sharded or not contiguous in
    memory. `is_readable_anywhere` says whether any thread can read the vector.
    """

    is_readable_anywhere = True

    def __init__(self, model: nn.Module) -> None:
        named = named_parameters(model)
        self.named = [(name, param) for name, param in named if param.requires_grad]
        self._frozen = [(name, param) for name, param in named if not param.requires_grad]
        if not self.named:
            raise ModelError("the model has no trainable parameters")
        self.device = self.named[0][1].device
        self._is_async = has_own_memory(self.device)
        self._offsets: list[int] = []
        offset = 0
        for name, param in self.named:
            self._check(name, param)
            self._offsets.append(offset)
            offset += param.numel()
        self.num_elements = offset
        self._check_memory()

    def _check_memory(self) -> None:
        """Raise ModelError if two trainable parameters overlap, because each half-difference would be added twice."""
        own = [(name, each) for name, each in self.named if not (each.is_meta or isinstance(each, DTensor))]
        spans = [(each.data_ptr(), each.nbytes, name) for name, each in own]
        end, last = 0, ""
        for start, num_bytes, name in sorted(spans):
            if num_bytes and start < end:
                raise ModelError(f"{last} and {name} share memory: assign one nn.Parameter to both places to tie them")
            end, last = max(end, start + num_bytes), name

    def _check(self, name: str, param: Tensor) -> None:
        if isinstance(param, DTensor):
            raise ModelError(
                f"{name} is sharded across several processes; use `noloco join --gpus` to train such a model"
            )
        if param.device != self.device:
            raise ModelError(
                f"{name} is on {param.device}, but {self.named[0][0]} is on {self.device}: all trainable parameters "
                "must be on one device"
            )
        if param.dtype not in TRAINED:
            raise ModelError(
                f"{name} is {param.dtype}, but only fp16, bf16, fp32 and fp64 parameters can be trained and swapped"
            )
        if not param.is_contiguous():
            raise ModelError(f"{name} is not contiguous in memory; call .contiguous() on it before training")

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

    @contextmanager
    def replaced(self, vector: Tensor) -> Iterator[None]:
        """Let the model compute with a flat fp32 vector on the CPU, which is copied only if the model differs."""
        own = [(param, param.data) for _, param in self.named]
        try:
            for (_, param), values in zip(self.named, self.by_name(vector).values(), strict=True):
                param.data = values.to(param)
            yield
        finally:
            for param, values in own:
                param.data = values

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


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a model and their names, without the prefixes of wrappers.

    A model that is compiled, or wrapped by DDP or accelerate, is the same model for its partners and checkpoints.
    """
    return _without_wrappers(model.named_parameters())


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that `state_dict` contains, each once, named as by `named_parameters`."""
    kept = model.state_dict(keep_vars=True).keys()
    return _without_wrappers((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _without_wrappers(named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    found = [(name.replace(COMPILED, ""), value) for name, value in named]
    while found and all(name.startswith(WRAPPED) for name, _ in found):
        found = [(name.removeprefix(WRAPPED), value) for name, value in found]
    return found


def check_values(model: nn.Module) -> None:
    """Raise ModelError if a checkpoint could not hold a parameter or buffer of a model."""
    for name, tensor in [*named_parameters(model), *named_buffers(model)]:
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device and has no values: load or initialize the model first")
        if tensor.layout is not torch.strided:
            raise ModelError(f"{name} is stored as {tensor.layout}; call .to_dense() on it before training")


def content_digest(values: Tensor) -> str:
    """Return the blake3 digest of the bytes of a tensor in its own dtype. The tensor may be on any device."""
    hasher = blake3()
    for chunk in values.detach().reshape(-1).split(HASHED_AT_ONCE):
        hasher.update(chunk.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
