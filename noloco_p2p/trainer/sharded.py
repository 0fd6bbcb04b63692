"""A model that is sharded over the ranks of a peer (FSDP2), read and written as one flat vector through rank 0.

Nothing ever holds a second copy of the model: a window of the vector at a time moves between the shards and rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.trainer.compute import Compute, blocks, local
from noloco_p2p.trainer.ranks import Ranks, Verb

WINDOW_ELEMENTS = 8 << 20  # 32 MiB on rank 0's device, twice


def shard(model: nn.Module, ranks: Ranks, compute: Compute) -> None:
    """Split all parameters over the ranks, block by block, each along its first dimension; in place.

    Every rank calls it with the same model. Weights are fp32; with bf16 they are gathered, and used, in bf16, and
    gradients are summed in fp32. Blocks are given up after each forward, so that what is written to the shards counts.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    bf16 = compute.is_bf16(ranks.device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in [*blocks(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


@dataclass(frozen=True, slots=True)
class _Span:
    start: int  # in the vector
    stop: int


class ShardedVector:
    """Tensors of one order, each sharded along its first dimension, as one vector; every rank has the same one."""

    def __init__(self, tensors: Sequence[Tensor], ranks: Ranks) -> None:
        self._ranks = ranks
        self._local = [local(tensor).detach().view(-1) for tensor in tensors]
        self._spans: list[list[_Span]] = [[] for _ in range(ranks.size)]  # of each rank, one a tensor
        offset = 0
        for tensor in tensors:
            rows, row = (tensor.shape[0], tensor.numel() // max(1, tensor.shape[0])) if tensor.ndim else (1, 1)
            each = -(-rows // ranks.size)
            for rank in range(ranks.size):
                first, last = min(rows, rank * each), min(rows, (rank + 1) * each)
                self._spans[rank].append(_Span(offset + first * row, offset + last * row))
            offset += tensor.numel()
        for span, values in zip(self._spans[ranks.rank], self._local, strict=True):
            assert span.stop - span.start == values.numel(), "sharded otherwise than along the first dimension"
        self.num_elements = offset

    def send(self, start: int, stop: int) -> None:
        """Not rank 0: give what lies here of elements [start, stop)."""
        if pieces := [self._local[index][first:last] for index, first, last, _ in self._pieces(start, stop)]:
            distributed.send(torch.cat(pieces).float(), 0)

    def receive(self, start: int, stop: int) -> None:
        """Not rank 0: take what belongs here."""
        pieces = list(self._pieces(start, stop))
        if pieces:
            values = torch.empty(sum(last - first for _, first, last, _ in pieces), device=self._ranks.device)
            distributed.recv(values, 0)
            for index, first, last, _ in pieces:
                self._local[index][first:last] = values[: last - first]
                values = values[last - first :]

    def gather(self, start: int, out: Tensor) -> None:
        """Rank 0, while the others `send`: elements [start, start + len(out)) into `out`, fp32, on its device."""
        stop = start + out.numel()
        for index, first, last, place in self._pieces(start, stop):
            out[place - start : place - start + last - first] = self._local[index][first:last]
        for rank in range(1, self._ranks.size):
            if spans := self._overlaps(rank, start, stop):
                values = torch.empty(sum(span.stop - span.start for span in spans), device=self._ranks.device)
                distributed.recv(values, rank)
                for span in spans:
                    out[span.start - start : span.stop - start] = values[: span.stop - span.start]
                    values = values[span.stop - span.start :]

    def scatter(self, start: int, values: Tensor) -> None:
        """Rank 0, while the others `receive`: the inverse of `gather`."""
        stop = start + values.numel()
        for index, first, last, place in self._pieces(start, stop):
            self._local[index][first:last] = values[place - start : place - start + last - first]
        for rank in range(1, self._ranks.size):
            if spans := self._overlaps(rank, start, stop):
                pieces = [values[span.start - start : span.stop - start] for span in spans]
                distributed.send(torch.cat(pieces), rank)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(index of the tensor, first and last element of its part here, place of the first one in the vector)."""
        for index, span in enumerate(self._spans[self._ranks.rank]):
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                yield index, first - span.start, last - span.start, first

    def _overlaps(self, rank: int, start: int, stop: int) -> list[_Span]:
        cut = [_Span(max(start, span.start), min(stop, span.stop)) for span in self._spans[rank]]
        return [span for span in cut if span.start < span.stop]


class LedVector:
    """Rank 0's hand on a `ShardedVector` that all ranks know by the same number."""

    def __init__(self, vector: ShardedVector, ranks: Ranks, *, number: int) -> None:
        self.num_elements = vector.num_elements
        self._vector = vector
        self._ranks = ranks
        self._number = number

    def read(self, start: int, out: Tensor) -> Tensor:
        self._ranks.order(Verb.READ, self._number, start, start + out.numel())
        self._vector.gather(start, out)
        return out

    def write(self, start: int, values: Tensor) -> None:
        self._ranks.order(Verb.WRITE, self._number, start, start + values.numel())
        self._vector.scatter(start, values.to(self._ranks.device))


class ShardedParameters(FlatParameters):
    """Rank 0's view of all trainable parameters. What is written arrives with `flush`, at the latest.

    layout: of the model before it was sharded, as a digest of frozen weights would need all ranks.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, *, layout: ModelLayout, window_elements: int = WINDOW_ELEMENTS
    ) -> None:
        super().__init__(model)
        self.model_layout = layout
        self._led = LedVector(ShardedVector([param for _, param in self.named], ranks), ranks, number=0)
        size = min(window_elements, self.num_elements)
        self._read, self._read_start, self._read_stop = torch.empty(size, device=self.device), 0, 0
        self._write, self._write_start, self._write_stop = torch.empty(size, device=self.device), 0, 0

    def _check(self, name: str, param: Tensor) -> None:
        assert isinstance(param, DTensor), name

    def read(self, start: int, stop: int) -> Tensor:
        return torch.cat([values.clone() for values in self._windows(start, stop)])

    def minus(self, start: int, values: Tensor, *, out: Tensor) -> Tensor:
        place = 0
        for part in self._windows(start, start + values.numel()):
            stop = place + part.numel()
            torch.sub(part, values[place:stop].to(self.device, non_blocking=True), out=out[place:stop])
            place = stop
        return out[: values.numel()]

    def write(self, start: int, values: Tensor) -> None:
        if start != self._write_stop:
            self._send()
            self._write_start = self._write_stop = start
        while values.numel():
            place = self._write_stop - self._write_start
            part = values[: self._write.numel() - place]
            self._write[place : place + part.numel()].copy_(part, non_blocking=True)
            self._write_stop += part.numel()
            values = values[part.numel() :]
            if self._write_stop - self._write_start == self._write.numel():
                self._send()

    def add(self, start: int, values: Tensor) -> None:
        self.write(start, self.read(start, start + values.numel()).add_(values.to(self.device)))

    def flush(self) -> None:
        """Send what was written; what was read is forgotten, as inner steps will change it."""
        super().flush()  # it may have been written by another stream than that which sends
        self._send()
        self._read_start = self._read_stop = 0

    def named_values(self) -> dict[str, Tensor]:
        """In new memory, on the CPU: this is a second copy of the model there."""
        values = torch.empty(self.num_elements)
        for start, stop in chunk_bounds(self.num_elements):
            values[start:stop] = self.read(start, stop)
        parts = values.split([param.numel() for _, param in self.named])
        self.flush()
        return {name: part.view(param.shape) for part, (name, param) in zip(parts, self.named, strict=True)}

    def _send(self) -> None:
        if self._write_start < self._write_stop:
            self._led.write(self._write_start, self._write[: self._write_stop - self._write_start])
        self._write_start = self._write_stop

    def _windows(self, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop), in the parts in which they come; each is valid until the next one."""
        while start < stop:
            if not self._read_start <= start < self._read_stop:
                self._read_start, self._read_stop = start, min(start + self._read.numel(), self.num_elements)
                self._led.read(start, self._read[: self._read_stop - start])
            last = min(stop, self._read_stop)
            yield self._read[start - self._read_start : last - self._read_start]
            start = last
