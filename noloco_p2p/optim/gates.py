"""What is applied of a partner's vectors: decisions on norms, and the scaling that follows. Pure.

A partner is a stranger. What it sends has arrived intact and is finite, but may otherwise be anything. Several gates
stand between it and the weights; all compare it with what this peer itself has done and seen.

* finite     A norm that is not a number refuses the whole swap (a chunk that is not finite never gets here).
* gradient   A partner whose outer gradient is ten times the median of this peer's recent ones is refused entirely.
             Otherwise the longer of the two outer gradients is scaled down to twice the shorter, and then in each
             tensor to four times the shorter, before the half-difference is made. Both sides know both coded vectors,
             so both use the same factors and their half-differences stay opposite: nothing needs to be negotiated,
             and the mean of the pair does not move.
* cosine     A partner whose outer gradient points against this peer's one is refused entirely. The cosine is estimated
             on at most 16 chunks that this peer draws in secret, so that a liar cannot keep just those clean. Honest
             gradients of one run agree or are unrelated: the limit is well below 0.
* distance   A partner whose slow weights are three times as far away as those of most recent partners is refused
             entirely, if that is also further than this peer's outer gradient allows. Each partner counts once, so a
             liar that is met often does not make distant weights usual. When islands merge, distant partners are
             refused until as many of them were met as close ones.
* offset     The half-differences of slow weights and outer momentum are clipped to a radius around this peer
             (ClippedGossip, arXiv 2202.01545), for each tensor separately: twice the median of the last ones, bounded
             by half and twice this peer's outer gradient there. Each side has its own radius.
* loss       `outer/update_filter.py` compares the loss on a private batch, before and after. Off by default.

Outer gradients are compared after decoding, because only the decoded ones are known to both sides. A coarse code
changes lengths and angles. A normal vector becomes 0.94 times as long with int2 and 0.80 times with sign1; real outer
gradients of the toy in benchmarks/study become 0.90 to 1.10 and 0.75 to 0.95 times as long. No vector becomes more than
1.5 times as long with int2, or longer at all with sign1. So a partner is refused for a gradient that decodes to ten
times the median of this peer's exact ones. For two normal vectors with cosine c, the decoded ones have 0.89 c (int2)
or 2 / pi asin(c) (sign1): the limit of -0.1 corresponds to -0.11 or -0.16 of the exact ones. So honest partners are
refused less often, and what a liar may send is bounded as before. A run whose outer gradients do not travel has only
the gates on weights and the loss. Its offsets are as long as outer gradients, so clipping begins later
(`WITHOUT_LATE_PART`).

Slow weights have no cosine gate: islands that merge may differ in either direction.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from noloco_p2p.spec import CodecSpec

HISTORY_ROUNDS = 8
LEAST_PARTNERS = 3  # needed to identify a majority


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The limits of the gates. benchmarks/attacks.py measures what the defaults achieve, and what they cost."""

    clip_above: float = 2.0  # times the shorter outer gradient of a swap
    clip_piece_above: float = 4.0  # times the shorter one, of each piece of the two
    refuse_above: float = 10.0  # times the median of the own outer gradients
    least_cosine: float = -0.1  # of the two outer gradients of a swap
    far_above: float = 3.0  # times the median distance of recent partners
    offset_radius: float = 2.0  # times the median of the last offsets
    offset_least: float = 0.5  # times the own outer gradient
    offset_most: float = 2.0


LIMITS = GateLimits()
# If outer gradients do not travel, partners differ by whole ones, and only the slow weights bring them together.
WITHOUT_LATE_PART = replace(LIMITS, offset_least=1.0)
# For measurements: nothing is clipped or refused.
OPEN = GateLimits(1e30, 1e30, 1e30, -2.0, 1e30, 1e30, 1e30, 1e30)


def gate_limits(codecs: CodecSpec) -> GateLimits:
    """Return the limits of a run."""
    return LIMITS if codecs.has_late_part else WITHOUT_LATE_PART


@dataclass(frozen=True, slots=True)
class GradientScales:
    """Factors of the two coded outer gradients of a swap; at most one of them is below 1."""

    own: float
    partner: float


def gradient_scales(own_norm: float, partner_norm: float, *, limits: GateLimits = LIMITS) -> GradientScales:
    """Return the factors. The partner's call returns the same two numbers, exchanged."""
    limit = limits.clip_above * min(own_norm, partner_norm)
    return GradientScales(*(limit / norm if norm > limit else 1.0 for norm in (own_norm, partner_norm)))


class GradientHistory:
    """Norms of this peer's recent outer gradients, against which a partner's is compared."""

    def __init__(self, limits: GateLimits = LIMITS) -> None:
        self._limits = limits
        self._norms: deque[float] = deque(maxlen=HISTORY_ROUNDS)

    def note(self, own_norm: float) -> None:
        self._norms.append(own_norm)

    def usual(self) -> float:
        """The median of the recent rounds; 0 before the first one."""
        return median(self._norms) if self._norms else 0.0

    def refusal(self, own_norm: float, partner_norm: float, *, times_longer: float = 1.0) -> str:
        """Return why a partner is refused; "" = it is not.

        own_norm: of this round, not yet recorded. times_longer: the ratio of the partner's inner steps to this peer's.
        """
        if not math.isfinite(partner_norm):
            return "the norm of its outer gradient is not finite"
        usual = median([*self._norms, own_norm])
        if partner_norm > self._limits.refuse_above * max(1.0, times_longer) * usual:
            return f"its outer gradient has {partner_norm / max(usual, 1e-30):.3g} times the norm of this peer's own"
        return ""


def cosine_refusal(*, dot: float, own_norm: float, partner_norm: float, limits: GateLimits = LIMITS) -> str:
    """Return why a partner is refused; "" = it is not. All arguments are of the same chunks of the two outer
    gradients.

    A norm can be 0 where `dot` is not: int2 and sign1 have no code for 0, so zeros are decoded to numbers whose
    squares underflow. Such a gradient has no direction.
    """
    product = own_norm * partner_norm
    if product == 0.0 or dot >= limits.least_cosine * product:
        return ""
    return f"its outer gradient points against this peer's own (cosine {dot / product:.2f})"


class DistanceHistory:
    """How far away the slow weights of the last `HISTORY_ROUNDS` different partners were, admitted or not.

    Distances are norms of half-differences.
    """

    def __init__(self, limits: GateLimits = LIMITS) -> None:
        self._limits = limits
        self._distances: OrderedDict[str, float] = OrderedDict()

    def refusal(self, partner: str, distance: float, *, own_gradient: float) -> str:
        """Record this distance, and return why the partner is refused; "" = it is not.

        own_gradient: the norm of this peer's outer gradient, or the usual one if that is larger.
        """
        self._distances.pop(partner, None)
        self._distances[partner] = distance
        if len(self._distances) > HISTORY_ROUNDS:
            self._distances.popitem(last=False)
        if len(self._distances) < LEAST_PARTNERS:
            return ""
        usual = median(self._distances.values())
        if distance <= max(self._limits.far_above * usual, self._limits.offset_most * own_gradient):
            return ""
        return f"its weights are {distance / max(usual, 1e-30):.3g} times as far away as those of most partners"


class PieceNorms:
    """Norms of one vector in recent rounds, piece by piece.

    Pieces are the tensors of the model, cut at chunk boundaries, so that a vector is gated in one pass.
    """

    def __init__(self, num_pieces: int) -> None:
        self._norms = torch.full((HISTORY_ROUNDS, num_pieces), torch.nan, dtype=torch.float64)
        self._rounds = 0

    def usual(self) -> list[float]:
        """The median of recent norms; 0 where none is known."""
        return self._norms.nanmedian(dim=0).values.nan_to_num_(0.0).tolist()

    def note(self, norms: Sequence[float]) -> None:
        """Record one round; for offsets after clipping, since a liar must not widen its own gate."""
        self._norms[self._rounds % HISTORY_ROUNDS] = torch.tensor(norms, dtype=torch.float64)
        self._rounds += 1


def offset_radius(*, usual: float, own_gradient: float, limits: GateLimits = LIMITS) -> float:
    """How far a partner may pull one piece. All are norms: usual of its offsets, own_gradient of this peer's gradient.

    The bounds by the own gradient admit the first swaps, and stop a liar that is met again and again, because the
    median is computed from clipped offsets.
    """
    most, least = limits.offset_most * own_gradient, limits.offset_least * own_gradient
    return min(max(limits.offset_radius * usual, least), most)


def shorten_longer_(own: Tensor, partner: Tensor, *, limits: GateLimits = LIMITS) -> None:
    """Clip one piece of two outer gradients, in place: the longer one to `clip_piece_above` times the shorter one.

    The partner does the same to the same two vectors.
    """
    norms = [float(torch.linalg.vector_norm(vector)) for vector in (own, partner)]
    limit = limits.clip_piece_above * min(norms)
    for vector, norm in zip((own, partner), norms, strict=True):
        if norm > limit:
            vector.mul_(limit / norm)


def clip_offset_(offset: Tensor, radius: float) -> tuple[float, float]:
    """Clip one piece of a half-difference, in place. Returns its norm before and after."""
    norm = float(torch.linalg.vector_norm(offset))
    if norm <= radius:
        return norm, norm
    offset.mul_(radius / norm)  # to 0 when the norm is infinite: every element is finite
    return norm, radius


class Pieces:
    """The pieces: the tensors of a flat vector, cut at the boundaries of its chunks."""

    def __init__(self, tensor_sizes: Sequence[int], chunks: Sequence[tuple[int, int]]) -> None:
        ends: list[int] = []
        for size in tensor_sizes:
            if size:
                ends.append((ends[-1] if ends else 0) + size)
        self.in_chunk: list[list[tuple[int, slice]]] = []  # (index of the piece, its slice of the chunk)
        number = 0
        for start, stop in chunks:
            inner = ends[bisect_right(ends, start) : bisect_right(ends, stop - 1)]
            cuts = [start, *inner, stop]
            places = [slice(cuts[i] - start, cuts[i + 1] - start) for i in range(len(cuts) - 1)]
            self.in_chunk.append(list(enumerate(places, number)))
            number += len(places)
        self.num_pieces = number
