"""The named vectors of a swap: which there are, how each chunk of them is coded, and the half-differences of two
sides.
"""

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

BESIDE_MODULO = "int8"  # for a chunk whose bounds are not known yet, or did not hold


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """One named vector of a swap, as both sides must see it.

    codec: for every chunk; with `modulo` only for the chunks that cannot be coded modulo. modulo: the codec of all
    other
    chunks, then those of the bits that follow, one after another, while a chunk fails; () without.
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
        """The total size of the payloads; with modulo, if every bound is known and holds."""
        return section_bytes(self.modulo[0] if self.modulo else self.codec, self.num_elements)


def section_plans(codecs: CodecSpec, *, swap_momentum: bool, num_elements: int) -> tuple[SectionPlan, ...]:
    """The sections of every swap of a run, in the order in which they travel.

    Without a codec for the outer gradient there is no late part.
    """
    momentum = [(SectionName.OUTER_MOMENTUM, Part.EARLY, codecs.outer_momentum)] if swap_momentum else []
    gradient = [(SectionName.OUTER_GRADIENT, Part.LATE, codecs.outer_gradient)] if codecs.has_late_part else []
    rows = [(SectionName.SLOW_WEIGHTS, Part.EARLY, codecs.slow_weights), *momentum, *gradient]
    return tuple(_plan(name, part, codec, num_elements) for name, part, codec in rows)


def part_bytes(plans: Iterable[SectionPlan], part: Part) -> int:
    """The bytes of a part in each direction, see `SectionPlan.num_bytes`."""
    return sum(plan.num_bytes for plan in plans if plan.part is part)


def _plan(name: SectionName, part: Part, codec: str, num_elements: int) -> SectionPlan:
    modulo = MODULO_CODECS.get(codec, ())
    return SectionPlan(name, part, get_codec(BESIDE_MODULO if modulo else codec), num_elements, modulo)


@dataclass(frozen=True, slots=True)
class Coding:
    """How the chunks of a section are coded in one swap, equal on both sides.

    grid: the agreed grid; None for a section, or a repair of one, without modulo. times_broken: how often the chunks of
    this coding have failed.
    """

    plan: SectionPlan
    grid: Grid | None = None
    times_broken: int = 0

    @property
    def follows(self) -> Coding | None:
        """The coding of the further bits of failed chunks; None if they are sent again without modulo."""
        is_last = self.times_broken + 1 >= len(self.plan.modulo)
        return None if is_last else replace(self, times_broken=self.times_broken + 1)

    def modulo(self, index: int) -> tuple[ModuloCodec, Grid] | None:
        """The codec and grid of a chunk; None when the plan's plain codec codes it."""
        if not self.plan.modulo or self.grid is None or not self.grid.covers(index):
            return None
        return self.plan.modulo[self.times_broken], self.grid

    def num_elements(self, index: int) -> int:
        start, stop = chunk_range(self.plan.num_elements, index)
        return stop - start

    def num_bytes(self, indices: Sequence[int]) -> int:
        """The total size of the payloads of these chunks."""
        return sum(self._chunk_bytes(index) for index in indices)

    def _chunk_bytes(self, index: int) -> int:
        on_grid = self.modulo(index)
        return (on_grid[0] if on_grid else self.plan.codec).num_bytes(self.num_elements(index))

    def half_difference(self, own: Kept, partner: Payload, index: int, *, scratch: Scratch | None = None) -> Tensor:
        """Return h of chunk `index`, fp32 on the CPU: (Q(partner) - Q(own)) / 2.

        If `own` is a ModuloCodec, `partner` holds the differences of the grid's integers. The result is new memory;
        with `scratch` it is valid only until the next half-difference that uses it.
        """
        size = self.num_elements(index)
        if isinstance(own, ModuloCodec):
            assert self.grid, index
            return own.half_difference(partner, num_elements=size, grid=self.grid, chunk_index=index)
        return half_difference_(*self.decoded(own, partner, index, scratch=scratch or Scratch()))

    def decoded(self, own: Payload, partner: Payload, index: int, *, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Return Q(own), Q(partner) of a chunk that was not coded modulo, fp32 on the CPU, valid until `scratch` is
        reused.
        """
        size, decode = self.num_elements(index), self.plan.codec.decode
        mine, theirs = (
            decode(payload, num_elements=size, out=scratch.take(side, size, dtype=torch.float32), scratch=scratch)
            for side, payload in (("own", own), ("partner", partner))
        )
        return mine, theirs

    def square(self, payload: Payload, index: int, *, scratch: Scratch) -> float:
        """Return the squared norm of a chunk that was not coded modulo, as both sides decode it."""
        size = self.num_elements(index)
        out = scratch.take("square", size, dtype=torch.float32)
        values = self.plan.codec.decode(payload, num_elements=size, out=out, scratch=scratch)
        return float(torch.linalg.vector_norm(values)) ** 2


@dataclass(slots=True)
class Squares:
    """Squared norms of both sides' coded vectors, summed in the order of the chunks: equal on both sides."""

    own: float = 0.0
    partner: float = 0.0


Kept = Payload | ModuloCodec  # what is kept of an own chunk: its payload, or the codec that carried it modulo


@dataclass(frozen=True, slots=True)
class SectionPair:
    """Both sides' coded vectors in a committed section, chunk by chunk, in the form that `Coding` takes.

    squares: of the outer gradient, whose length is judged before it is used.
    """

    coding: Coding
    own: Sequence[Kept | None]
    partner: list[Payload]
    squares: Squares

    def half_difference(self, index: int, *, scratch: Scratch | None = None) -> Tensor:
        """Return h of chunk `index`, see `Coding.half_difference`."""
        own = self.own[index]
        assert own is not None, index
        return self.coding.half_difference(own, self.partner[index], index, scratch=scratch)

    def decoded(self, index: int, *, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Return both sides' vectors of chunk `index`, see `Coding.decoded`."""
        own = self.own[index]
        assert own is not None, index
        assert not isinstance(own, ModuloCodec), "coded modulo"
        return self.coding.decoded(own, self.partner[index], index, scratch=scratch)
