"""This module defines the sections of a swap, the encoding of their chunks, and the half-differences of partners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noloco_p2p.codec import Codec, Scratch, chunk_range, get_codec, section_bytes
from noloco_p2p.codec.modulo import MODULO_CODECS, Grid, ModuloCodec
from noloco_p2p.gossip.frames import Part, Payload, SectionName
from noloco_p2p.optim.halves import half_difference_
from noloco_p2p.spec import CodecSpec

BESIDE_MODULO = "int8"  # for a chunk whose bounds are not known yet or did not hold


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """The encoding of one named vector of a swap, on which both partners must agree.

    Without modulo coding, `modulo` is empty and `codec` encodes every chunk. With modulo coding, `codec` encodes only
    the chunks for which modulo coding is impossible. The first codec in `modulo` encodes all other chunks. Each time a
    chunk cannot be decoded, the next codec in `modulo` encodes further bits of it.
    """

    name: SectionName
    part: Part
    codec: Codec
    num_elements: int
    modulo: tuple[ModuloCodec, ...] = ()

    @property
    def codec_name(self) -> str:
        return self.modulo[0].name if self.modulo else self.codec.name

    @property
    def num_bytes(self) -> int:
        """The total size of the payloads. With modulo coding, this assumes that every bound is known and holds."""
        return section_bytes(self.modulo[0] if self.modulo else self.codec, self.num_elements)


def section_plans(codecs: CodecSpec, *, swap_momentum: bool, num_elements: int) -> tuple[SectionPlan, ...]:
    """Return the sections of every swap of a run, in the order in which they are sent.

    Without a codec for the outer gradient, there is no late part.
    """
    momentum = [(SectionName.OUTER_MOMENTUM, Part.EARLY, codecs.outer_momentum)] if swap_momentum else []
    gradient = [(SectionName.OUTER_GRADIENT, Part.LATE, codecs.outer_gradient)] if codecs.has_late_part else []
    rows = [(SectionName.SLOW_WEIGHTS, Part.EARLY, codecs.slow_weights), *momentum, *gradient]
    return tuple(_plan(name, part, codec, num_elements) for name, part, codec in rows)


def part_bytes(plans: Iterable[SectionPlan], part: Part) -> int:
    """Return the size of a part in each direction, as defined by `SectionPlan.num_bytes`."""
    return sum(plan.num_bytes for plan in plans if plan.part is part)


def _plan(name: SectionName, part: Part, codec: str, num_elements: int) -> SectionPlan:
    modulo = MODULO_CODECS.get(codec, ())
    return SectionPlan(name, part, get_codec(BESIDE_MODULO if modulo else codec), num_elements, modulo)


@dataclass(frozen=True, slots=True)
class Coding:
    """The encoding of a section's chunks in one swap, which is the same for both partners.

    `grid` is the agreed grid, or None if the section (or the repair of its failed chunks) does not use modulo coding.
    `times_broken` counts how often these chunks have failed.
    """

    plan: SectionPlan
    grid: Grid | None = None
    times_broken: int = 0

    @property
    def follows(self) -> Coding | None:
        """The encoding of further bits of failed chunks, or None if the chunks are sent again without modulo coding."""
        is_last = self.times_broken + 1 >= len(self.plan.modulo)
        return None if is_last else replace(self, times_broken=self.times_broken + 1)

    def modulo(self, index: int) -> tuple[ModuloCodec, Grid] | None:
        """Return the modulo codec and the grid of a chunk, or None if the plan's plain codec encodes that chunk."""
        if not self.plan.modulo or self.grid is None or not self.grid.covers(index):
            return None
        return self.plan.modulo[self.times_broken], self.grid

    def num_elements(self, index: int) -> int:
        start, stop = chunk_range(self.plan.num_elements, index)
        return stop - start

    def num_bytes(self, indices: Sequence[int]) -> int:
        """Return the total size of the payloads of these chunks."""
        return sum(self._chunk_bytes(index) for index in indices)

    def _chunk_bytes(self, index: int) -> int:
        on_grid = self.modulo(index)
        return (on_grid[0] if on_grid else self.plan.codec).num_bytes(self.num_elements(index))

    def half_difference(self, own: Kept, partner: Payload, index: int, *, scratch: Scratch | None = None) -> Tensor:
        """Return h = (Q(partner) - Q(own)) / 2 of chunk `index`, in fp32 on the CPU.

        If `own` is a ModuloCodec, `partner` holds the differences of the grid's integers. If `scratch` is
        given, the result is valid only until the next half-difference that uses it. Otherwise it is a new tensor.
        """
        size = self.num_elements(index)
        if isinstance(own, ModuloCodec):
            assert self.grid, index
            return own.half_difference(partner, num_elements=size, grid=self.grid, chunk_index=index)
        return half_difference_(*self.decoded(own, partner, index, scratch=scratch or Scratch()))

    def decoded(self, own: Payload, partner: Payload, index: int, *, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Return Q(own) and Q(partner) of a chunk without modulo coding.

        Both are fp32 tensors on the CPU that are valid until `scratch` is reused.
        """
        size, decode = self.num_elements(index), self.plan.codec.decode
        mine, theirs = (
            decode(payload, num_elements=size, out=scratch.take(side, size, dtype=torch.float32), scratch=scratch)
            for side, payload in (("own", own), ("partner", partner))
        )
        return mine, theirs

    def square(self, payload: Payload, index: int, *, scratch: Scratch) -> float:
        """Return the squared norm of a chunk without modulo coding, as both partners decode it."""
        size = self.num_elements(index)
        out = scratch.take("square", size, dtype=torch.float32)
        values = self.plan.codec.decode(payload, num_elements=size, out=out, scratch=scratch)
        return float(torch.linalg.vector_norm(values)) ** 2


@dataclass(slots=True)
class Squares:
    """The squared norms of both partners' encoded vectors, summed in chunk order so that their sums agree."""

    own: float = 0.0
    partner: float = 0.0


Kept = Payload | ModuloCodec  # stored for a peer's own chunk: the payload, or the modulo codec that encoded it


@dataclass(frozen=True, slots=True)
class SectionPair:
    """Both partners' encoded vectors in a committed section, chunk by chunk, in the form that `Coding` accepts.

    `squares` holds the squared norms of the outer gradients, which are checked before the gradients are used.
    """

    coding: Coding
    own: Sequence[Kept | None]
    partner: list[Payload]
    squares: Squares

    def half_difference(self, index: int, *, scratch: Scratch | None = None) -> Tensor:
        """Return h of chunk `index`, as described in `Coding.half_difference`."""
        own = self.own[index]
        assert own is not None, index
        return self.coding.half_difference(own, self.partner[index], index, scratch=scratch)

    def decoded(self, index: int, *, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Return both partners' vectors of chunk `index`, as described in `Coding.decoded`."""
        own = self.own[index]
        assert own is not None, index
        assert not isinstance(own, ModuloCodec), "coded modulo"
        return self.coding.decoded(own, self.partner[index], index, scratch=scratch)
