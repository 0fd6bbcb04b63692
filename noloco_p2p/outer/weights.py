"""The vectors of one replica, which its swaps copy and change slice by slice while an optimizer trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS, chunk_bounds
from noloco_p2p.devices import has_own_memory
from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.units import MOST_ELEMENTS, Slice, Units
from noloco_p2p.outer.checkpoint import Vector
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.outer_step import outer_step
from noloco_p2p.outer.update_filter import UpdateFilter
from noloco_p2p.spec import OuterSpec

WEIGHTS, OUTER_MOMENTUM = "weights", "outer_momentum"  # the vectors of a state that newcomers fetch
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of the fraction of an fp32 number
SUBNORMAL = 2.0**-24  # distance between two subnormal numbers of fp16; those of bf16 have the exponents of fp32


class Weights:
    """The model's parameters and, in a run with an outer step, the slow weights and the outer momentum.

    Partners swap slices of one vector: the parameters and, if the spec says so, the slow weights and the momentum.

    The training thread holds `lock` while its optimizer changes the parameters, and only then. Copies are made chunk by
    chunk, so the optimizer waits for a copy of 1 MiB at most. On an accelerator, a copy within its memory is queued on
    the stream on which the optimizer works, so it sees the weights before or after a step, but never in between. From
    there, it moves to pinned memory on a stream of its own. So training does not wait for it, nor does it wait for the
    steps that are queued later.

    `seed` is that of the update filter in a simulation.
    """

    def __init__(self, parameters: FlatParameters, outer: OuterSpec, *, seed: int | None = None) -> None:
        self.lock = threading.Lock()
        self.parameters = parameters
        self.num_elements = num = parameters.num_elements
        self.slow = self._copy() if outer.has_outer_step else None
        self.momentum = torch.zeros(num, dtype=torch.float32, device="cpu") if outer.keeps_momentum else None
        # What partners add to the slow weights waits for the next outer step.
        self._slow_halves = torch.zeros(num, dtype=torch.float32, device="cpu") if outer.sends_slow_weights else None
        self._outer = outer
        self.num_swapped = num * (1 + outer.sends_slow_weights + outer.sends_momentum)
        self.units = Units(self.num_swapped)
        chunks = self.units.chunks(Slice(0, self.units.num_units))
        shapes = [param.shape for _, param in parameters.named] * (self.num_swapped // num)
        bounds = [(chunk.start, chunk.stop) for chunk in chunks]
        self.filter = UpdateFilter(shapes, bounds, is_waiting=outer.wait, seed=seed)
        self._accelerator = torch.get_device_module(parameters.device) if has_own_memory(parameters.device) else None
        self._stream = self._accelerator.Stream(parameters.device) if self._accelerator else None
        self._begin_to_move()

    def _copy(self) -> Tensor:
        copy = torch.empty(self.num_elements, dtype=torch.float32, device="cpu")
        for start, stop in chunk_bounds(self.num_elements):
            copy[start:stop] = self.parameters.read(start, stop)
        return copy

    # swaps

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of elements [start, stop) of the swapped vector, in fp32 on the CPU, on any thread."""
        if self._stream:
            return self._read_from_accelerator(start, stop)
        copy = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        for first in range(start, stop, CHUNK_ELEMENTS):
            last = min(first + CHUNK_ELEMENTS, stop)
            with self.lock:
                parts = self._sections(first, last)
                values = [
                    self.parameters.read(begin, end) if vec is None else vec[begin:end] for vec, begin, end in parts
                ]
                torch.cat([part.cpu() for part in values], out=copy[first - start : last - start])
        return copy

    def _read_from_accelerator(self, start: int, stop: int) -> Tensor:
        assert self._accelerator
        assert self._stream
        copy = torch.empty(stop - start, dtype=torch.float32, device="cpu", pin_memory=stop - start <= MOST_ELEMENTS)
        copied = self._accelerator.Event(blocking=True)  # the wait must not count as CPU time
        for first in range(start, stop, MOST_ELEMENTS):
            place = first - start
            with self.lock:
                parts = [
                    self.parameters.read(begin, end) if vector is None else vector[begin:end].clone()
                    for vector, begin, end in self._sections(first, min(first + MOST_ELEMENTS, stop))
                ]
                self._stream.wait_stream(self._accelerator.current_stream(self.parameters.device))
            with self._accelerator.stream(self._stream):
                for part in parts:
                    copy[place : place + len(part)].copy_(part, non_blocking=True)
                    place += len(part)
                copied.record()
            copied.synchronize()  # before another thread uses the memory of `parts`
        return copy

    @property
    def is_on_accelerator(self) -> bool:
        return self._stream is not None

    def looks_finite(self) -> bool:
        """Return whether the first 1 MiB of the weights is finite. A gradient with NaN makes all weights NaN."""
        return bool(self.parameters.read(0, min(CHUNK_ELEMENTS, self.num_elements)).isfinite().all())

    def _read(self, vector: Tensor | None, start: int, stop: int) -> Tensor:
        return self.parameters.read(start, stop).cpu() if vector is None else vector[start:stop]

    @torch.no_grad()
    def add(self, start: int, halves: Tensor) -> None:
        """Add half-differences from element `start`. Only the training thread calls this."""
        for first, last in chunk_bounds(len(halves)):
            self._add(start + first, start + last, halves[first:last])
        self.parameters.flush()

    def _begin_to_move(self) -> None:
        """Let the filter measure how far this peer moves from its present weights."""
        for chunk in self.units.chunks(Slice(0, self.units.num_units)):
            self.filter.begin(chunk.start, self.read(chunk.start, chunk.stop))

    def _add(self, start: int, stop: int, halves: Tensor) -> None:
        done = 0
        for vector, begin, end in self._sections(start, stop, is_written=True):
            part = halves[done : done + end - begin]
            done += end - begin
            if vector is not None:
                vector[begin:end] += part
                continue
            with self.lock:
                for piece, place in self.parameters.pieces(begin, end, is_written=True):
                    add_(piece, part[place].to(piece.device, non_blocking=True))

    def _sections(self, start: int, stop: int, *, is_written: bool = False) -> Iterator[tuple[Tensor | None, int, int]]:
        """Yield the vectors that form elements [start, stop), with the place in each. None stands for the model."""
        vectors: list[Tensor | None] = [None]
        if self._outer.sends_slow_weights:
            vectors.append(self._slow_halves if is_written else self.slow)
        if self._outer.sends_momentum:
            vectors.append(self.momentum)
        for index, vector in enumerate(vectors):
            offset = index * self.num_elements
            begin, end = max(start, offset), min(stop, offset + self.num_elements)
            if begin < end:
                yield vector, begin - offset, end - offset

    # the outer step

    @torch.no_grad()
    def outer_step(self) -> None:
        """Take the outer step (arXiv 2506.10911), and set the model's parameters to the new slow weights.

        Half-differences of the parameters have already been added to them. With gamma = beta, they are the whole pull
        toward the partners. Otherwise, the half-differences of the slow weights add the rest of it.
        """
        assert self.slow is not None
        outer = self._outer
        for start, stop in chunk_bounds(self.num_elements):
            slow = self.slow[start:stop]
            gradient = self._read(None, start, stop).sub(slow)
            offset = None
            if self._slow_halves is not None:
                offset = self._slow_halves[start:stop]
                gradient.sub_(offset)  # the parameters already contain the mean of both partners
            momentum = None if self.momentum is None else self.momentum[start:stop]
            outer_step(slow, momentum, gradient, offset, alpha=outer.alpha, beta=outer.beta, gamma=outer.pull)
            with self.lock:
                self.parameters.write(start, slow)
            if offset is not None:
                offset.zero_()
        self.parameters.flush()

    # states

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of what a newcomer takes over with `take`: flat fp32 vectors on the CPU."""
        momentum = {} if self.momentum is None else {OUTER_MOMENTUM: self.momentum.clone()}
        return {WEIGHTS: self._copy() if self.slow is None else self.slow.clone(), **momentum}

    def vectors(self) -> dict[str, Tensor | Vector]:
        """Return the same vectors as `tensors` does, without copying them."""
        return {WEIGHTS: Vector(self.num_elements, self.parameters.read), **self.outer_state()}

    def outer_state(self) -> dict[str, Tensor]:
        """Return, without copying them, the vectors that the model itself does not contain."""
        momentum = {} if self.momentum is None else {OUTER_MOMENTUM: self.momentum}
        return momentum if self.slow is None else {WEIGHTS: self.slow, **momentum}

    def take_outer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Set what `outer_state` returns. Raises CheckpointError, before anything changes, as `take` does."""
        own = self.outer_state()
        check_vectors(tensors, dict.fromkeys(own, self.num_elements))
        for name, vector in own.items():
            vector.copy_(tensors[name])

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Set all vectors and the model from `tensors`. Other entries are ignored.

        Raises CheckpointError, before anything changes, if the state belongs to another model or contains non-finite
        numbers.
        """
        check_vectors(tensors, vectors_of(self._outer, self.num_elements))
        for start, stop in chunk_bounds(self.num_elements):
            with self.lock:
                self.parameters.write(start, tensors[WEIGHTS][start:stop])
        self.parameters.flush()
        for name, vector in self.outer_state().items():
            vector.copy_(tensors[name])
        self._begin_to_move()


def vectors_of(outer: OuterSpec, num_elements: int) -> dict[str, int]:
    """Return the flat vectors of a state of this run, as a mapping from their names to their sizes."""
    names = (WEIGHTS, OUTER_MOMENTUM) if outer.keeps_momentum else (WEIGHTS,)
    return dict.fromkeys(names, num_elements)


def check_vectors(tensors: Mapping[str, object], expected: Mapping[str, int]) -> None:
    """Raise CheckpointError if a vector has the wrong size or dtype, or contains non-finite numbers.

    `expected` maps the name of each flat vector to its size. Other entries are ignored.
    """
    for name, num_elements in expected.items():
        vector = tensors.get(name)
        if not isinstance(vector, Tensor) or vector.shape != (num_elements,):
            raise CheckpointError(
                f"the state has no vector {name} of {num_elements} elements: it belongs to another model"
            )
        if vector.dtype is not torch.float32:
            raise CheckpointError(f"{name} in the state is {vector.dtype} instead of float32")
        if not all(bool(torch.isfinite(chunk).all()) for chunk in vector.split(CHUNK_ELEMENTS)):
            raise CheckpointError(f"{name} in the state contains non-finite values")


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
