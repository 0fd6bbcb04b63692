"""Bound what a partner's half-differences can do before they are added to the weights.

A partner is a stranger. Its numbers have arrived intact and are finite, but they can otherwise be anything. So each
piece of a half-difference is clipped to a radius around this peer's own weights (ClippedGossip, arXiv 2202.01545). A
piece is a part of one tensor within one chunk. Each partner of a swap computes its own radius.

The radius is one and a quarter times the median norm of the newest half-differences of the last `PARTNERS` different
partners in this piece. Each partner counts once, so a liar that this peer meets often has one voice. The norms are
remembered as they arrived: a median of clipped norms would fall again and again, until nothing honest could pass. They
are measured in what this peer itself moved from one mixing to the next, because while the learning rate rises, norms of
a hundred steps ago would cut most of what is honest. The radius cuts about three in ten honest half-differences. It is
also at most twice what this peer moves, because liars that drive honest peers apart would otherwise widen it, and as
much as this peer moves while there is no median.

The spectral norm has such a radius as well. Honest half-differences stretch all vectors alike. A matrix of rank 1 with
the same norm stretches one vector many times more, and does as much more harm. This radius has no other bound: how much
honest peers pull to one side depends on their optimizer and their texts.

In closing swaps, nobody moves, and peers are closer after each of them. Two mixings halve the distance of honest peers,
so they halve the radius.

What is left to a liar is to do the same harm in every swap. Two cosines show that, and if one of them is beyond its
limit, the half-difference is scaled down until it would be at the limit if nothing else had changed:

* with what this partner alone has pulled to before: the running mean of its half-differences, minus the median of those
  of all partners, which is what a peer that is ahead, behind or has other text than all others sees from each of them;
* against the direction in which this peer's own inner steps have moved it between the last mixings. Honest partners
  also pull back, since they average out the noise of its gradients, so the limit is relative to the median of the last
  partners. What swaps have added is no part of this direction: where a liar has pushed, honest partners pull back.

Both are cosines of sketches: sums of numbers with random signs that only this peer knows. A cosine of samples could be
evaded, because a liar would lie only where nothing is sampled.
"""

from __future__ import annotations

import math
import secrets
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import normalize

from noloco_p2p.gossip.coder import Coding
from noloco_p2p.gossip.exchange import Halves

PARTNERS = 8  # whose half-differences give the radius
REMEMBERED = 32  # those whose pulls are remembered: after as many others, a liar is new again
VOICES = 3  # partners without whose norms there is no median
SKETCH = 256  # sums by which the movement of a piece is measured
PULL_SKETCH = 64  # sums by which the pull of each partner is remembered; divides SKETCH
SMOOTHING = 0.125  # weight of a new movement
PATH_SMOOTHING = 0.05  # weight of a new movement in the direction of this peer's own steps
PULL_SMOOTHING = 0.3  # weight of a new half-difference in the pull of its partner
# benchmarks/attacks.py measures how well these limits work and what they cost.
RADIUS = 1.25  # times the median norms of the half-differences of different partners
# Times this peer's own movement since the last mixing, or its mean if that is more, which is the unit of all norms.
# Without it, liars that drive honest peers apart would widen the radius.
MOST = 2.0
FIRST = 1.0  # the same, while there is no median
PULL = 0.3  # cosine with the pull of the partner alone
DRAG = 0.15  # cosine with the direction against the last own steps, beyond the median of the last partners
FIRST_DRAG = 0.3  # the same cosine, while there is no median
TINY = 1e-30  # the unit where a peer has not moved at all
# With `outer.wait`, one swap carries everything that partners have learned apart, and their mean must be exact.
SCALE_WAITING = 2.0  # times all limits


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor in a chunk. The pieces of a vector are numbered in its order. A row has `width` elements."""

    number: int
    place: slice
    width: int


class UpdateFilter:
    """The filter of one replica and its history, which is not saved: after a restart, a few swaps rebuild it.

    `shapes` are those of the tensors that form the vector, and `chunks` are its chunks (start, stop). `is_waiting` says
    whether training waits for swaps (`outer.wait`). Only a simulation sets `seed`, because the signs are secret.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        chunks: Sequence[tuple[int, int]],
        *,
        is_waiting: bool = False,
        seed: int | None = None,
    ) -> None:
        self._scale = SCALE_WAITING if is_waiting else 1.0
        self._is_waiting = is_waiting
        self._pieces = dict(zip((start for start, _ in chunks), pieces_of(shapes, chunks), strict=True))
        num_pieces = sum(map(len, self._pieces.values()))
        self._norms = Memory(PARTNERS, num_pieces, 2)  # as `_norms_of` returns them, in this peer's own movement
        self._drags = dict[str, float]()  # of the last partners, the newest last
        self._pulls = Memory(REMEMBERED, num_pieces, PULL_SKETCH)
        # With a small tensor for each piece, allocated between large ones, the C library would keep as much free memory
        # as the model takes, in parts that are too small for the next chunk.
        self._mixed = torch.full((num_pieces, SKETCH), torch.nan, dtype=torch.float32, device="cpu")  # last mixing
        self._paths = self._mixed.clone()  # of inner steps from one mixing to the next: a running mean
        random = torch.Generator("cpu").manual_seed(secrets.randbits(63) if seed is None else seed)
        longest = max(stop - start for start, stop in chunks)
        self._signs = torch.empty(longest, dtype=torch.float32, device="cpu").bernoulli_(generator=random)
        self._signs.mul_(2).sub_(1)
        self._movement = [0.0] * num_pieces  # running mean of this peer's movement between two mixings
        self._rested = [0] * num_pieces  # mixings since the last inner step
        self._judging = threading.Lock()

    def begin(self, start: int, values: Tensor) -> None:
        """Record the values of the chunk that begins at `start`, from which this peer moves until the next mixing."""
        for piece in self._pieces[start]:
            self._mixed[piece.number] = self._sketch(values, piece.place)

    def judge(self, coding: Coding, partner: str, *, is_at_rest: bool = False) -> Halves:
        """Overwrite a snapshot with the half-differences of its swap, and clip them. The call is thread-safe.

        If `is_at_rest`, training is over, so this peer does not move any more.
        """
        norms: list[Tensor] = []  # of each piece, as it arrived
        sketches: list[tuple[int, Tensor, Tensor]] = []  # each piece, its values, and its half-differences
        num_clipped, factor, square, own_square, moved_square = 0, 1.0, 0.0, 0.0, 0.0
        with self._judging:
            for index, chunk in enumerate(coding.chunks):
                values, halves = coding.values[chunk.start : chunk.stop], coding.half_difference(index)
                own_square += float(torch.linalg.vector_norm(values)) ** 2
                pieces = self._pieces[coding.start + chunk.start]
                medians = self._norms.medians(range(pieces[0].number, pieces[-1].number + 1))
                for piece, usual in zip(pieces, medians, strict=True):
                    own = self._sketch(values, piece.place)
                    norm, unit = self._norms_of(piece, halves), self._unit(piece, own, is_at_rest=is_at_rest)
                    limit = self._scale * unit * _limits(usual, is_at_rest=is_at_rest)
                    shorter = min(1.0, float((limit / norm).nan_to_num(1.0).min()))
                    if shorter < 1.0:
                        halves[piece.place].mul_(shorter)
                        num_clipped += 1
                    square += float(norm[0]) ** 2
                    moved_square += (shorter * float(norm[0])) ** 2
                    norms.append(norm / unit)
                    sketches.append((piece.number, own, self._sketch(halves, piece.place)))
                values.copy_(halves)
            part = range(sketches[0][0], sketches[-1][0] + 1)  # the pieces of a slice are consecutive
            if not self._is_waiting:
                factor = min(_within(self._pull(partner, part, sketches), PULL), self._drag(partner, sketches))
                coding.values.mul_(factor)
                moved_square *= factor**2
            self._note(sketches, factor, is_at_rest=is_at_rest)
            self._norms.put(partner, part, torch.stack(norms))
        num_elements = len(coding.values)
        return Halves(
            coding.values,
            moved=math.sqrt(moved_square / num_elements),
            distance=2 * math.sqrt(square / num_elements),
            magnitude=math.sqrt(own_square / num_elements),
            num_pieces=len(norms),
            num_clipped=num_clipped,
        )

    def _norms_of(self, piece: Piece, halves: Tensor) -> Tensor:
        """Return the norm of a piece, and about its spectral norm: the length to which it stretches a vector most."""
        values = halves[piece.place]
        norm = torch.linalg.vector_norm(values)
        num_rows = len(values) // piece.width
        if min(num_rows, piece.width) < 2:
            return torch.stack([norm, norm])
        rows = values[: num_rows * piece.width].view(num_rows, piece.width)
        vector = self._signs[: piece.width]
        for _ in range(2):
            vector = normalize(rows.T @ normalize(rows @ vector, dim=0), dim=0)
        return torch.stack([norm, torch.linalg.vector_norm(rows @ vector)])

    def _sketch(self, values: Tensor, place: slice) -> Tensor:
        """Return sums of numbers with random signs, which have about the norm and the cosines of the numbers."""
        signed = values[place] * self._signs[place]
        rest = len(signed) % SKETCH
        sums = signed[: len(signed) - rest].view(-1, SKETCH).sum(dim=0)
        sums[:rest] += signed[len(signed) - rest :]
        return sums

    def _cosine(self, sketches: Sequence[tuple[int, Tensor, Tensor]]) -> float:
        """Return the cosine of a half-difference and the direction of this peer's own steps."""
        along = square = path_square = 0.0
        for piece, _, halves in sketches:
            path = self._paths[piece]
            if not path[0].isnan():
                along += float(halves @ path)
                square += float(halves @ halves)
                path_square += float(path @ path)
        return along / math.sqrt(square * path_square) if square * path_square > 0 else 0.0

    def _note(self, sketches: Sequence[tuple[int, Tensor, Tensor]], factor: float, *, is_at_rest: bool) -> None:
        for piece, own, halves in sketches:
            self._rested[piece] = self._rested[piece] + 1 if is_at_rest else 0
            if not self._rested[piece]:
                path, moved = self._paths[piece], own - self._mixed[piece]
                path.copy_(moved if path[0].isnan() else path.lerp(moved, PATH_SMOOTHING))
            self._mixed[piece] = own + factor * halves

    def _pull(self, partner: str, part: range, sketches: Sequence[tuple[int, Tensor, Tensor]]) -> float:
        """Return the cosine of a half-difference with what its partner alone has pulled to, and remember it."""
        new = torch.stack([halves for _, _, halves in sketches]).unflatten(1, (-1, PULL_SKETCH)).sum(dim=1)
        own, middle = self._pulls.of(partner, part), self._pulls.medians(part)
        self._pulls.put(partner, part, own.lerp(new, PULL_SMOOTHING).where(~own.isnan(), new))
        alone = (own - middle).nan_to_num()  # 0 where it has not pulled before, or too few have
        length = float(alone.norm() * new.norm())
        return float((alone * new).sum()) / length if length > 0 else 0.0

    def _drag(self, partner: str, sketches: Sequence[tuple[int, Tensor, Tensor]]) -> float:
        """Return the factor for a half-difference that pulls back further than those of other partners."""
        self._drags.pop(partner, None)
        others = self._drags.values()
        limit = max(0.0, median(others)) + DRAG if len(others) >= VOICES else FIRST_DRAG
        self._drags[partner] = drag = -self._cosine(sketches)
        if len(self._drags) > PARTNERS:
            del self._drags[next(iter(self._drags))]
        return _within(drag, limit)

    def _unit(self, piece: Piece, own: Tensor, *, is_at_rest: bool) -> float:
        """Return the unit of the norms of a piece: how far this peer has moved since the last mixing, or its mean."""
        number, moved = piece.number, float(torch.linalg.vector_norm(own - self._mixed[piece.number]))
        if not (is_at_rest and self._movement[number]):
            self._movement[number] = _smoothed(self._movement[number], moved)
        closer = 2.0 ** (-self._rested[number] / 2) if is_at_rest else 1.0  # by closing swaps
        return closer * max(moved, self._movement[number], TINY)


class Memory:
    """What the last `num` different partners have sent for each piece: `width` numbers from each."""

    def __init__(self, num: int, num_pieces: int, width: int) -> None:
        self._values = torch.full((num, num_pieces, width), torch.nan, dtype=torch.float32, device="cpu")
        self._senders = torch.zeros((num, num_pieces), dtype=torch.int64, device="cpu")  # hashes
        self._times = torch.zeros((num, num_pieces), dtype=torch.int64, device="cpu")
        self._now = 0

    def of(self, partner: str, part: range) -> Tensor:
        """Return what a partner has sent last for these pieces, with shape (pieces, width): NaN where it has not."""
        index, is_known = self._index(partner, part)
        return self._values[index].where(is_known[:, None], torch.nan)

    def put(self, partner: str, part: range, values: Tensor) -> None:
        """Replace what a partner has sent before, or else what has been there for longest."""
        index, _ = self._index(partner, part)
        self._now += 1
        self._values[index], self._senders[index], self._times[index] = values, hash(partner), self._now

    def medians(self, part: range) -> Tensor:
        """Return the medians for these pieces, with shape (pieces, width): NaN where fewer than `VOICES` have sent."""
        values = self._values[:, part.start : part.stop]
        has_voices = (~values.isnan()).sum(dim=0) >= VOICES
        return values.nanmedian(dim=0).values.where(has_voices, torch.nan)

    def _index(self, partner: str, part: range) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the place of a partner for each piece, and whether it is there."""
        is_its = self._senders[:, part.start : part.stop] == hash(partner)
        oldest = self._times[:, part.start : part.stop].argmin(dim=0)
        is_known = is_its.any(dim=0)
        places = is_its.byte().argmax(dim=0).where(is_known, oldest)
        return (places, torch.arange(part.start, part.stop, device="cpu")), is_known


def _limits(usual: Tensor, *, is_at_rest: bool) -> Tensor:
    """Return the largest norms that a piece may have, where those of other partners have the medians `usual`."""
    limits = RADIUS * usual
    if not is_at_rest:
        limits[0] = min(float(limits[0]), MOST)
    return limits.nan_to_num(FIRST)


def _within(cosine: float, limit: float) -> float:
    """Return the factor that scales a half-difference with this cosine down to what it may have in a direction."""
    return min(1.0, limit / cosine) if cosine > 0 else 1.0


def _smoothed(before: float, value: float) -> float:
    return before + SMOOTHING * (value - before) if before else value


def pieces_of(shapes: Sequence[Sequence[int]], chunks: Sequence[tuple[int, int]]) -> list[list[Piece]]:
    """Cut the tensors of a vector at the boundaries of its chunks, and return the pieces of each chunk."""
    tensors = [shape for shape in shapes if math.prod(shape)]
    ends = list(accumulate(map(math.prod, tensors)))
    in_chunks: list[list[Piece]] = []
    number = 0
    for start, stop in chunks:
        first, last = bisect_right(ends, start), bisect_right(ends, stop - 1)
        cuts = [start, *ends[first:last], stop]
        places = [slice(begin - start, end - start) for begin, end in pairwise(cuts)]
        widths = [math.prod(shape[1:]) for shape in tensors[first : last + 1]]
        in_chunks.append([Piece(number + i, *each) for i, each in enumerate(zip(places, widths, strict=True))])
        number += len(places)
    return in_chunks
