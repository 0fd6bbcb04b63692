"""Apply the gates of `optim/gates.py` to the vectors of a swap, chunk by chunk, during the outer step."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec import Scratch, chunk_bounds
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Received
from noloco_p2p.gossip.sections import SectionPair
from noloco_p2p.optim.gates import (
    LIMITS,
    DistanceHistory,
    GateLimits,
    GradientHistory,
    GradientScales,
    PieceNorms,
    Pieces,
    clip_offset_,
    cosine_refusal,
    gradient_scales,
    offset_radius,
    shorten_longer_,
)
from noloco_p2p.optim.halves import half_difference_

UNSCALED = GradientScales(1.0, 1.0)
ESTIMATE_CHUNKS = 16  # chunks per estimate; each has 1 MiB in fp32, so an estimate takes milliseconds
SECRET = random.SystemRandom()
OFFSETS = (SectionName.SLOW_WEIGHTS, SectionName.OUTER_MOMENTUM)


@dataclass(frozen=True, slots=True)
class FilterVerdict:
    """The verdict of the gates on a whole swap.

    `refusal` is the reason why nothing of the swap is applied, or an empty string if the swap may be applied. `scales`
    are the factors by which the outer gradients are multiplied.
    """

    refusal: str = ""
    scales: GradientScales = UNSCALED


@dataclass(frozen=True, slots=True)
class Clipped:
    """Statistics about the clipping in one outer step.

    `num_clipped` and `num_pieces` are the numbers of clipped pieces and of all pieces in the offsets of the swap.
    `num_lost` is the number of chunks of this peer's outer gradient that were set to 0 because they were non-finite.
    """

    num_clipped: int = 0
    num_pieces: int = 0
    cut_share: float = 0.0  # norm of the parts that were cut off, relative to the norm of all offsets
    num_lost: int = 0


class ChunkFilter:
    """The gates of one replica and their history.

    The history is not saved. After a restart, the gates rebuild it within a few rounds.
    """

    def __init__(self, tensor_sizes: Sequence[int], limits: GateLimits = LIMITS) -> None:
        self.limits = limits
        self.pieces = Pieces(tensor_sizes, chunk_bounds(sum(tensor_sizes)))
        self.gradients = GradientHistory(limits)
        self.distances = DistanceHistory(limits)
        self.offsets = {name: PieceNorms(self.pieces.num_pieces) for name in OFFSETS}
        self.own = PieceNorms(self.pieces.num_pieces)

    def judge_weights(self, partner: str, weights: SectionPair, gradient: SectionPair | None) -> str:
        """Return the reason to refuse the whole swap because of the partner's slow weights, or an empty string.

        The distance between the partners' slow weights is recorded in either case.
        """
        own_gradient = max(self.gradients.usual(), math.sqrt(gradient.squares.own) if gradient else 0.0)
        scratch, square, num_chunks = Scratch(), 0.0, len(weights.partner)
        drawn = _drawn(num_chunks)
        for index in drawn:
            square += float(weights.half_difference(index, scratch=scratch).square().sum())
        distance = math.sqrt(square * num_chunks / max(1, len(drawn)))
        return self.distances.refusal(partner, distance, own_gradient=own_gradient)

    def judge(self, gradient: SectionPair | None, *, times_longer: float = 1.0) -> FilterVerdict:
        """Judge a whole swap by its outer gradient. For `times_longer`, see `GradientHistory.refusal`."""
        if gradient is None:
            return FilterVerdict()
        own_norm, partner_norm = math.sqrt(gradient.squares.own), math.sqrt(gradient.squares.partner)
        if refusal := self.gradients.refusal(own_norm, partner_norm, times_longer=times_longer):
            return FilterVerdict(refusal)
        if refusal := self._refusal_by_cosine(gradient):
            return FilterVerdict(refusal)
        return FilterVerdict(scales=gradient_scales(own_norm, partner_norm, limits=self.limits))

    def _refusal_by_cosine(self, gradient: SectionPair) -> str:
        scratch, dot, own_square, partner_square = Scratch(), 0.0, 0.0, 0.0
        for index in _drawn(len(gradient.partner)):
            own, partner = gradient.decoded(index, scratch=scratch)
            dot += float(own @ partner)
            own_square += float(own @ own)
            partner_square += float(partner @ partner)
        return cosine_refusal(
            dot=dot, own_norm=math.sqrt(own_square), partner_norm=math.sqrt(partner_square), limits=self.limits
        )

    def half_gradient(self, pair: SectionPair, index: int, scales: GradientScales, *, scratch: Scratch) -> Tensor:
        """Return the half-difference of one chunk of the scaled outer gradients.

        The gradients are scaled as a whole first, and then piece by piece. The result is the negation of the partner's
        half-difference, because the partner applies the same factors to the same two gradients.
        """
        own, partner = pair.decoded(index, scratch=scratch)
        for vector, scale in ((own, scales.own), (partner, scales.partner)):
            if scale != 1.0:
                vector.mul_(scale)
        for _, place in self.pieces.in_chunk[index]:
            shorten_longer_(own[place], partner[place], limits=self.limits)
        return half_difference_(own, partner)

    def late_steps(
        self, gradient: SectionPair, *, beta: float, scales: GradientScales = UNSCALED
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first element, `beta h`) for each chunk of a late outer gradient.

        The gradient arrived from a partner after the boundary. The chunks are in fp32 on the CPU, and each of them
        reuses the memory of the previous one.
        """
        scratch = Scratch()
        for index, (start, _) in enumerate(chunk_bounds(gradient.coding.plan.num_elements)):
            yield start, self.half_gradient(gradient, index, scales, scratch=scratch).mul_(beta)

    def open_step(self, received: Received | None, scales: GradientScales) -> FilteredStep:
        return FilteredStep(self, received, scales)


def _drawn(num_chunks: int) -> list[int]:
    """Draw the chunks on which a norm or a cosine is estimated, in a way that partners cannot predict."""
    return SECRET.sample(range(num_chunks), min(num_chunks, ESTIMATE_CHUNKS))


class FilteredStep:
    """One outer step that passes through the gates.

    Request the chunks in order, and call `own_gradient` first for each of them. At the end, call `close`.
    """

    def __init__(self, gating: ChunkFilter, received: Received | None, scales: GradientScales) -> None:
        self._filter = gating
        self._scales = scales
        self._scratch = Scratch()
        self._sections = received.sections if received else {}
        self._offsets = [name for name in OFFSETS if name in self._sections]
        self._usual = {name: gating.offsets[name].usual() for name in self._offsets}
        self._norms: dict[SectionName, list[float]] = {name: [] for name in self._offsets}
        self._num_clipped = 0
        self._num_lost = 0
        self._squares = self._cut_squares = 0.0
        self._usual_own = gating.own.usual()
        self._own_norms: list[float] = []  # for the pieces of the current chunk
        self._all_own_norms: list[float] = []

    def own_gradient(self, index: int, gradient: Tensor) -> None:
        """Record this peer's exact outer gradient for a chunk, which limits the offsets of that chunk.

        A chunk with non-finite values is set to 0, so its weights return to the slow weights. Other chunks are
        unaffected.
        """
        places = self._filter.pieces.in_chunk[index]
        self._own_norms = [float(torch.linalg.vector_norm(gradient[place])) for _, place in places]
        if not all(map(math.isfinite, self._own_norms)):
            gradient.zero_()
            self._own_norms = [0.0] * len(places)
            self._num_lost += 1
        self._all_own_norms += self._own_norms

    def gradient(self, index: int) -> Tensor | None:
        """Return the half-difference of the outer gradients, or None if the swap contained none.

        It is valid until the next chunk.
        """
        pair = self._sections.get(SectionName.OUTER_GRADIENT)
        return self._filter.half_gradient(pair, index, self._scales, scratch=self._scratch) if pair else None

    def offset(self, name: SectionName, index: int) -> Tensor | None:
        """Return the clipped half-difference of slow weights or momentum, or None if the swap contained none.

        The result is valid until the next chunk.
        """
        if name not in self._offsets:
            return None
        limits = self._filter.limits
        offset = self._sections[name].half_difference(index, scratch=self._scratch)
        for (piece, place), own_norm in zip(self._filter.pieces.in_chunk[index], self._own_norms, strict=True):
            own = max(own_norm, self._usual_own[piece])
            radius = offset_radius(usual=self._usual[name][piece], own_gradient=own, limits=limits)
            norm, kept = clip_offset_(offset[place], radius)
            self._norms[name].append(kept)
            self._num_clipped += kept < norm
            self._squares += norm * norm
            self._cut_squares += (norm - kept) ** 2
        return offset

    def close(self) -> Clipped:
        """Record the round in the history, and return the clipping statistics."""
        if any(self._all_own_norms):  # all norms are 0 in a closing round
            self._filter.gradients.note(math.hypot(*self._all_own_norms))
            self._filter.own.note(self._all_own_norms)
        for name, norms in self._norms.items():
            self._filter.offsets[name].note(norms)
        share = math.sqrt(self._cut_squares / self._squares) if self._squares else 0.0
        num_pieces = len(self._offsets) * self._filter.pieces.num_pieces
        return Clipped(self._num_clipped, num_pieces, share, self._num_lost)
