"""Decide how strongly a partner's vectors are applied, and scale them accordingly. This module does no I/O.

A partner is a stranger. The vectors that it sends have arrived intact and are finite, but they can otherwise be
anything. Several gates protect the weights. All of them compare the vectors with values that this peer itself has
computed or received before.

* finite     If a norm is non-finite, the whole swap is refused. Chunks with non-finite values are rejected earlier.
* gradient   A partner is refused entirely if the norm of its outer gradient is more than ten times the median norm of
             this peer's recent outer gradients. Otherwise, the longer of the two outer gradients is scaled down to
             twice the norm of the shorter one. Then, in each tensor, the longer of the two is scaled down to four times
             the norm of the shorter one, before the half-difference is computed. Both partners know both decoded
             vectors, so they use the same factors and their half-differences stay opposite. They need not negotiate,
             and the mean of the pair does not move.
* cosine     A partner is refused entirely if its outer gradient points against this peer's outer gradient. The cosine
             is estimated on at most 16 chunks that this peer draws in secret, so that a liar cannot keep only those
             chunks clean. Honest gradients of one run either agree or are unrelated, so the limit is well below 0.
* distance   A partner is refused entirely if the distance between the two peers' slow weights is more than three times
             the median distance of recent partners, and also larger than this peer's outer gradient allows. Each
             partner counts once, so a liar that this peer meets often does not make large distances normal. When
             islands merge, distant partners are refused until this peer has met as many distant partners as close ones.
* offset     The half-differences of slow weights and outer momentum are clipped to a radius around this peer
             (ClippedGossip, arXiv 2202.01545), separately for each tensor. The radius is twice the median norm of
             recent offsets, but at least half and at most twice the norm of this peer's outer gradient in that tensor.
             Each partner computes its own radius.

Outer gradients are compared after decoding, because only the decoded ones are known to both partners. int2 changes
norms and angles. It multiplies the norm of a normally distributed vector by 0.94. For real outer gradients of the toy
model in benchmarks/toy.toml, the factor is 0.90 to 1.10, and it never exceeds 1.5. The limit of ten times the median
compares the norm of the partner's decoded gradient with the norms of this peer's exact gradients. For two normally
distributed vectors with cosine c, the decoded vectors have a cosine of 0.89 c. The limit of -0.1 corresponds to a
cosine of -0.11 between the exact vectors. int2 therefore makes it less likely that an honest partner is refused, and it
does not increase a liar's influence. In a run without a late part, only the gates on the weights remain. The offsets of
such a run are as long as outer gradients, so the smallest clipping radius is larger (`WITHOUT_LATE_PART`).

Slow weights have no cosine gate, because islands that merge may differ in any direction.
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
LEAST_PARTNERS = 3  # the number of partners needed to identify a majority


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The limits of the gates. benchmarks/attacks.py measures how well the defaults work and what they cost."""

    clip_above: float = 2.0  # times the norm of the shorter outer gradient of a swap
    clip_piece_above: float = 4.0  # times the norm of the shorter gradient in each piece
    refuse_above: float = 10.0  # times the median norm of this peer's outer gradients
    least_cosine: float = -0.1  # between the two outer gradients of a swap
    far_above: float = 3.0  # times the median distance of recent partners
    offset_radius: float = 2.0  # times the median norm of recent offsets
    offset_least: float = 0.5  # times the norm of this peer's outer gradient
    offset_most: float = 2.0  # times the norm of this peer's outer gradient


LIMITS = GateLimits()
# Without a late part, partners differ by whole outer gradients, and only swaps of slow weights bring them together.
WITHOUT_LATE_PART = replace(LIMITS, offset_least=1.0)
# With these limits, which are meant for measurements, nothing is clipped or refused.
OPEN = GateLimits(1e30, 1e30, 1e30, -2.0, 1e30, 1e30, 1e30, 1e30)


def gate_limits(codecs: CodecSpec) -> GateLimits:
    """Return the limits of the gates for a run with these codecs."""
    return LIMITS if codecs.has_late_part else WITHOUT_LATE_PART


@dataclass(frozen=True, slots=True)
class GradientScales:
    """The factors for the two decoded outer gradients of a swap. At most one of them is below 1."""

    own: float
    partner: float


def gradient_scales(own_norm: float, partner_norm: float, *, limits: GateLimits = LIMITS) -> GradientScales:
    """Return the factors for both outer gradients. The partner's call returns the same two numbers in reverse order."""
    limit = limits.clip_above * min(own_norm, partner_norm)
    return GradientScales(*(limit / norm if norm > limit else 1.0 for norm in (own_norm, partner_norm)))


class GradientHistory:
    """The norms of this peer's recent outer gradients, which limit the norm of a partner's outer gradient."""

    def __init__(self, limits: GateLimits = LIMITS) -> None:
        self._limits = limits
        self._norms: deque[float] = deque(maxlen=HISTORY_ROUNDS)

    def note(self, own_norm: float) -> None:
        self._norms.append(own_norm)

    def usual(self) -> float:
        """Return the median norm of recent rounds, or 0 before the first round."""
        return median(self._norms) if self._norms else 0.0

    def refusal(self, own_norm: float, partner_norm: float, *, times_longer: float = 1.0) -> str:
        """Return the reason to refuse the partner, or an empty string if there is none.

        `own_norm` is the norm of this peer's outer gradient in this round; it has not been recorded yet. `times_longer`
        is the ratio of the partner's inner steps to this peer's inner steps.
        """
        if not math.isfinite(partner_norm):
            return "the norm of its outer gradient is not finite"
        usual = median([*self._norms, own_norm])
        if partner_norm > self._limits.refuse_above * max(1.0, times_longer) * usual:
            return (
                f"the norm of its outer gradient is {partner_norm / max(usual, 1e-30):.3g} times this peer's usual norm"
            )
        return ""


def cosine_refusal(*, dot: float, own_norm: float, partner_norm: float, limits: GateLimits = LIMITS) -> str:
    """Return the reason to refuse the partner, or an empty string if there is none.

    All arguments refer to the same chunks of the two outer gradients. A norm can be 0 even if `dot` is not, because
    int2 has no code for 0 and decodes zeros to numbers whose squares underflow. Such a gradient has no
    direction, so it is not refused.
    """
    product = own_norm * partner_norm
    if product == 0.0 or dot >= limits.least_cosine * product:
        return ""
    return f"its outer gradient opposes this peer's outer gradient (cosine {dot / product:.2f})"


class DistanceHistory:
    """The distances to the slow weights of the last `HISTORY_ROUNDS` different partners, including refused ones.

    Distances are norms of half-differences.
    """

    def __init__(self, limits: GateLimits = LIMITS) -> None:
        self._limits = limits
        self._distances: OrderedDict[str, float] = OrderedDict()

    def refusal(self, partner: str, distance: float, *, own_gradient: float) -> str:
        """Record a distance, and return the reason to refuse the partner, or an empty string if there is none.

        `own_gradient` is the norm of this peer's outer gradient, or its usual norm if that is larger.
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
        return (
            f"its weights are {distance / max(usual, 1e-30):.3g} times as far from this peer's weights as those of a "
            "typical partner"
        )


class PieceNorms:
    """The norms of one vector in recent rounds, piece by piece.

    Pieces are the tensors of the model, cut at chunk boundaries, so that the gates need only one pass over a vector.
    """

    def __init__(self, num_pieces: int) -> None:
        self._norms = torch.full((HISTORY_ROUNDS, num_pieces), torch.nan, dtype=torch.float64)
        self._rounds = 0

    def usual(self) -> list[float]:
        """Return the median of the recent norms of each piece, or 0 if none is known."""
        return self._norms.nanmedian(dim=0).values.nan_to_num_(0.0).tolist()

    def note(self, norms: Sequence[float]) -> None:
        """Record the norms of one round. Offsets are recorded after clipping, so a liar cannot widen its own gate."""
        self._norms[self._rounds % HISTORY_ROUNDS] = torch.tensor(norms, dtype=torch.float64)
        self._rounds += 1


def offset_radius(*, usual: float, own_gradient: float, limits: GateLimits = LIMITS) -> float:
    """Return the largest distance by which a partner may move one piece.

    `usual` is the usual norm of the piece's offsets, and `own_gradient` is the norm of this peer's outer gradient in
    the piece. The lower bound, which depends on this gradient, admits the first swaps, for which there is no history.
    The upper bound stops a liar that this peer meets again and again, whose clipped offsets would otherwise keep
    raising the median.
    """
    most, least = limits.offset_most * own_gradient, limits.offset_least * own_gradient
    return min(max(limits.offset_radius * usual, least), most)


def shorten_longer_(own: Tensor, partner: Tensor, *, limits: GateLimits = LIMITS) -> None:
    """Scale the longer of two pieces down to `clip_piece_above` times the norm of the shorter one, in place.

    The pieces belong to the two outer gradients of a swap. The partner does the same with the same two vectors.
    """
    norms = [float(torch.linalg.vector_norm(vector)) for vector in (own, partner)]
    limit = limits.clip_piece_above * min(norms)
    for vector, norm in zip((own, partner), norms, strict=True):
        if norm > limit:
            vector.mul_(limit / norm)


def clip_offset_(offset: Tensor, radius: float) -> tuple[float, float]:
    """Clip one piece of a half-difference in place, and return its norm before and after clipping."""
    norm = float(torch.linalg.vector_norm(offset))
    if norm <= radius:
        return norm, norm
    offset.mul_(radius / norm)  # sets it to 0 if the norm is infinite
    return norm, radius


class Pieces:
    """The tensors of a flat vector, cut into pieces at the boundaries of its chunks."""

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
