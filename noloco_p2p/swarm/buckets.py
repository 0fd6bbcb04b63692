"""The buckets of a run's records in the DHT, by a prefix of the hash of the peer id. Pure.

    depth d   2^d buckets; the bucket of a peer is the first d bits of SHA-256 of its id; at depth 0 there is one

The depth follows from the size of the swarm, and each peer decides it for itself. It estimates the size from the
buckets that it reads, and goes deeper above SPLIT_ABOVE records in a bucket, back below MERGE_BELOW. Estimates in
between differ from peer to peer, so a peer close to a limit is also announced at the next depth, and peers on both
sides see each other. Peers that settled at different depths (islands that merged) find each other by probing other
depths. A peer that moves to where others seem to be keeps its old depth, the base, until it finds its peers of there
again, because the nodes that answered for the other depth may have invented its records.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MEAN_OCCUPANCY = 32
SPLIT_ABOVE, MERGE_BELOW = 48, 20  # records in a bucket
# Wider than two estimates of one size differ in nearly all cases: their standard error is 6 %.
ALSO_DEEPER_ABOVE, ALSO_SHALLOWER_BELOW = 36, 29
MAX_DEPTH = 16  # 2 million peers at the mean occupancy; beyond that, buckets grow
MAX_BUCKET_BYTES = 64 * 1024  # of one that is read; the rest of a larger one is ignored
WINDOW_READS = 8  # from which the size is estimated
PRIOR_READS = 4  # weight of what was known before the depth changed
LINGER_S = 120.0  # after a change of depth a peer can also be found at the old one: two TTL
FAR_DEPTHS = 2  # a neighbour at a depth this far from one's own is a hint: a limit between the two does not explain it
EVIDENCE = 5  # records in a bucket of another depth that count as evidence
LOOKS_THAT_AGREE = 3  # buckets of another depth with that evidence
NUM_DRAWN = 2  # buckets from which a partner is drawn


def run_key(spec_digest: str) -> str:
    """The DHT key for the records of all peers of a run."""
    return f"noloco_p2p/1/{spec_digest}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """One of the 2^depth buckets of a view."""

    depth: int
    index: int

    def holds(self, peer_id: str) -> bool:
        return bucket_of(peer_id, self.depth) == self

    def key(self, view_key: str) -> str:
        """The DHT key of this bucket. `view_key`: the key of the view, as `run_key` returns it."""
        return f"{view_key}/{self.depth}/{self.index}" if self.depth else view_key


ROOT = Bucket(0, 0)


def bucket_of(peer_id: str, depth: int) -> Bucket:
    first_bits = int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big")
    return Bucket(depth, first_bits >> (32 - depth))


def buckets_at(depth: int) -> list[Bucket]:
    return [Bucket(depth, index) for index in range(1 << depth)]


def random_bucket(depth: int, rng: random.Random, *, but: Collection[Bucket] = ()) -> Bucket:
    """A uniform choice of the buckets of this depth that are not in `but`, or of all if none is left."""
    left = (1 << depth) - sum(bucket.depth == depth for bucket in but)
    while True:
        bucket = Bucket(depth, rng.randrange(1 << depth))
        if bucket not in but or not left:
            return bucket


def best_depth(size: float) -> int:
    """The depth at which a bucket comes closest to MEAN_OCCUPANCY."""
    return min(max(round(math.log2(max(size, 1.0) / MEAN_OCCUPANCY)), 0), MAX_DEPTH)


def within_limit(entries: Mapping[str, tuple[bytes, T]], rng: random.Random) -> dict[str, tuple[bytes, T]]:
    """As many entries of a bucket as fit into MAX_BUCKET_BYTES: all, or a random choice."""
    total_bytes = sum(len(value) for value, _ in entries.values())
    if total_bytes <= MAX_BUCKET_BYTES:
        return dict(entries)
    chosen: dict[str, tuple[bytes, T]] = {}
    for subkey in rng.sample(sorted(entries), len(entries)):
        total_bytes = sum(len(value) for value, _ in chosen.values()) + len(entries[subkey][0])
        if total_bytes > MAX_BUCKET_BYTES:
            break
        chosen[subkey] = entries[subkey]
    return chosen


class Census:
    """A peer's knowledge of the size of its swarm, and the depth at which it reads and is announced."""

    def __init__(self, rng: random.Random) -> None:
        self.depth = 0
        self._rng = rng
        self._counts: deque[float] = deque([0.0], maxlen=WINDOW_READS)  # live records of each bucket that was read
        self.base: int | None = None  # the depth before the last move, at which this peer still reads and is announced
        self.witness: str | None = None  # a peer at the base
        self._num_along = 0
        self._before = (0, -math.inf)  # the last depth, and until when this peer is announced there
        self._asides: list[int] = []  # other depths that are still to be probed
        self._hint: int | None = None

    @property
    def size(self) -> float:
        """The number of peers of the run, including this one; exact at depth 0."""
        return self._occupancy() * 2.0**self.depth

    @property
    def read_at(self) -> tuple[int, ...]:
        """The depths at which this peer reads."""
        return (self.depth,) if self.base is None else (self.depth, self.base)

    def depths(self, now_s: float) -> tuple[int, ...]:
        """The depths at which this peer is to be announced: where it reads first, then where it may be looked for."""
        occupancy, lingering = self._occupancy(), self._before
        depths = {self.depth: None}
        if occupancy > ALSO_DEEPER_ABOVE and self.depth < MAX_DEPTH:
            depths[self.depth + 1] = None
        if occupancy < ALSO_SHALLOWER_BELOW and self.depth > 0:
            depths[self.depth - 1] = None
        if now_s < lingering[1]:
            depths[lingering[0]] = None
        if self.base is not None:
            depths[self.base] = None
        return tuple(depths)

    def note(self, num_live: float, *, homes: Iterable[int] = (), now_s: float) -> None:
        """Record the read of a bucket at the current depth. `homes`: the depth at which each of its peers reads."""
        if self.depth == 0:
            self._counts.clear()  # one bucket has all of them, so there is nothing to average
        self._counts.append(num_live)
        afar = Counter(home for home in homes if abs(home - self.depth) >= FAR_DEPTHS)
        self._hint = max(afar, key=lambda home: afar[home]) if afar else None
        occupancy = self._occupancy()
        if occupancy > SPLIT_ABOVE or (occupancy < MERGE_BELOW and self.depth > 0):
            self._move(self._size_below() if occupancy < MERGE_BELOW else self.size, now_s)

    def note_base(self, others: Sequence[str]) -> None:
        """Record the read of a bucket at the base with these peers. One of them becomes the witness at the current
        depth.
        """
        self.witness = self._rng.choice(others) if others else None
        if not others:
            self.base = None

    def note_witness(self, is_there: bool) -> None:
        """Record whether the witness was in its bucket. Many in a row prove that most peers have moved along."""
        self.witness = None
        self._num_along = self._num_along + 1 if is_there else 0
        if self._num_along >= WINDOW_READS:
            self.base = None

    def aside(self) -> int:
        """The next depth to probe: one that a neighbour reads at, or else the next of all others in random order."""
        if self._hint is not None:
            hint, self._hint = self._hint, None
            return hint
        if not self._asides:
            self._asides = self._rng.sample(range(MAX_DEPTH + 1), MAX_DEPTH + 1)
        depth = self._asides.pop()
        return depth if depth != self.depth else self.aside()

    def note_aside(self, depth: int, nums_apart: Sequence[float], *, now_s: float) -> None:
        """Record a probe of another depth: live peers in each bucket that are not announced at the current depth.

        `is_enough` decides how many buckets are read.
        """
        total = self.size + sum(nums_apart) / len(nums_apart) * 2.0**depth
        agree = min(nums_apart) >= EVIDENCE and is_enough(depth, nums_apart)
        if agree and depth != self.depth and best_depth(total) != self.depth:
            base = self.depth if self.base is None else self.base
            self._move(total, now_s)
            self.base, self._num_along = base if base != self.depth else None, 0

    def _size_below(self) -> float:
        """The size of a swarm that is smaller than estimated; while others are missing, that of before the move."""
        return self.size if self.base is None else min(self.size, MEAN_OCCUPANCY * 2.0**self.base)

    def _move(self, size: float, now_s: float) -> None:
        depth = best_depth(size)
        if depth == self.depth:
            return
        self.base, self.witness = None if depth == self.base else self.base, None
        self._before = (self.depth, now_s + LINGER_S)
        self.depth = depth
        self._counts.clear()
        self._counts.extend([size / 2.0**depth] * PRIOR_READS)
        self._asides = []

    def _occupancy(self) -> float:
        return sum(self._counts) / len(self._counts)


def is_enough(depth: int, nums_apart: Sequence[float]) -> bool:
    """Whether no more buckets of this depth need to be read: one has no evidence, or enough of them agree."""
    most = min(LOOKS_THAT_AGREE, 1 << depth)
    return bool(nums_apart) and (nums_apart[-1] < EVIDENCE or len(nums_apart) >= most)


class BucketSampler:
    """The buckets from which a partner is drawn: one is read at a time, and replaces the older one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._drawn: deque[tuple[Bucket, frozenset[str]]] = deque(maxlen=NUM_DRAWN)

    def next(self, depth: int) -> Bucket:
        """The bucket to read now: any except the one that stays."""
        return random_bucket(depth, self._rng, but=[bucket for bucket, _ in list(self._drawn)[-1:]])

    def took(self, bucket: Bucket, peer_ids: Iterable[str]) -> None:
        """Record the peers found there. A bucket that was already drawn is only updated."""
        others = [drawn for drawn in self._drawn if drawn[0] != bucket]
        self._drawn = deque([*others, (bucket, frozenset(peer_ids))], maxlen=NUM_DRAWN)

    def peers(self) -> frozenset[str]:
        return frozenset().union(*(peers for _, peers in self._drawn))
