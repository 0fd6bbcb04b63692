"""Where the records of a run lie in the DHT: in buckets, by a prefix of the hash of the peer id. Pure.

    depth d   2^d buckets; the bucket of a peer is the first d bits of SHA-256 of its id; at depth 0 there is one

The depth follows from the size of the swarm, and nobody decides it for others: each peer estimates the size from the
buckets that it reads, and goes deeper above SPLIT_ABOVE records in a bucket, back below MERGE_BELOW. In between lie
the estimates of peers that do not agree yet; who is near a limit is announced at the next depth too, so that peers on
both sides of it see everybody. Peers that settled apart (islands that merged) find each other by looking aside. Who
goes where others seem to be does not leave its old place, the base, before it finds its peers of there again: whoever
answers for the nodes of another depth may have invented what is there.
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
MAX_DEPTH = 16  # 2 million peers at the mean occupancy; beyond it buckets grow
MAX_BUCKET_BYTES = 64 * 1024  # of one that is read; the rest of a larger one is left unread
WINDOW_READS = 8  # of which the size is estimated
PRIOR_READS = 4  # as many count for what was known before the depth changed
LINGER_S = 120.0  # after a change of depth a peer can be found at the old one, too: two TTL
FAR_DEPTHS = 2  # a neighbour's depth so far from the own one is a hint: a limit between both does not explain it
EVIDENCE = 5  # records in a bucket of another depth that are worth believing
LOOKS_THAT_AGREE = 3  # buckets of another depth, each with that evidence
NUM_DRAWN = 2  # buckets of which a partner is drawn


def run_key(spec_digest: str) -> str:
    """The DHT key under which the records of all peers of a run lie."""
    return f"noloco_p2p/1/{spec_digest}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """One of the 2^depth buckets of a view."""

    depth: int
    index: int

    def holds(self, peer_id: str) -> bool:
        return bucket_of(peer_id, self.depth) == self

    def key(self, view_key: str) -> str:
        """The DHT key of this bucket of the view that lies under `view_key`, as `run_key` gives one."""
        return f"{view_key}/{self.depth}/{self.index}" if self.depth else view_key


ROOT = Bucket(0, 0)


def bucket_of(peer_id: str, depth: int) -> Bucket:
    first_bits = int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big")
    return Bucket(depth, first_bits >> (32 - depth))


def buckets_at(depth: int) -> list[Bucket]:
    return [Bucket(depth, index) for index in range(1 << depth)]


def random_bucket(depth: int, rng: random.Random, *, but: Collection[Bucket] = ()) -> Bucket:
    """Uniform over the buckets of this depth that are not in `but`; over all when none is left."""
    left = (1 << depth) - sum(bucket.depth == depth for bucket in but)
    while True:
        bucket = Bucket(depth, rng.randrange(1 << depth))
        if bucket not in but or not left:
            return bucket


def best_depth(size: float) -> int:
    """At which a bucket comes nearest to MEAN_OCCUPANCY."""
    return min(max(round(math.log2(max(size, 1.0) / MEAN_OCCUPANCY)), 0), MAX_DEPTH)


def within_limit(entries: Mapping[str, tuple[bytes, T]], rng: random.Random) -> dict[str, tuple[bytes, T]]:
    """As many entries of a bucket as MAX_BUCKET_BYTES hold: all, or a random choice of an over-full one."""
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
    """What one peer knows of the size of its swarm, and the depth at which it reads and is announced."""

    def __init__(self, rng: random.Random) -> None:
        self.depth = 0
        self._rng = rng
        self._counts: deque[float] = deque([0.0], maxlen=WINDOW_READS)  # live records of each bucket that was read
        self.base: int | None = None  # the depth before a look aside, which is announced and read at, too
        self.witness: str | None = None  # a peer at the base
        self._num_along = 0
        self._before = (0, -math.inf)  # the last depth, and until when this peer is announced there
        self._asides: list[int] = []  # other depths, still to be looked at
        self._hint: int | None = None

    @property
    def size(self) -> float:
        """Peers of the run, this one included; exact at depth 0."""
        return self._occupancy() * 2.0**self.depth

    @property
    def read_at(self) -> tuple[int, ...]:
        """The depths at which this peer reads."""
        return (self.depth,) if self.base is None else (self.depth, self.base)

    def depths(self, now_s: float) -> tuple[int, ...]:
        """Where this peer is to be announced: the depth at which it reads, then others at which it may be sought."""
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
        """A bucket of the depth of now was read. `homes`: the depth at which each of its peers reads."""
        if self.depth == 0:
            self._counts.clear()  # one bucket has them all: nothing to average
        self._counts.append(num_live)
        afar = Counter(home for home in homes if abs(home - self.depth) >= FAR_DEPTHS)
        self._hint = max(afar, key=lambda home: afar[home]) if afar else None
        occupancy = self._occupancy()
        if occupancy > SPLIT_ABOVE or (occupancy < MERGE_BELOW and self.depth > 0):
            self._move(self._size_below() if occupancy < MERGE_BELOW else self.size, now_s)

    def note_base(self, others: Sequence[str]) -> None:
        """A bucket at the base was read, in which these peers are. One of them is sought at the depth of now."""
        self.witness = self._rng.choice(others) if others else None
        if not others:
            self.base = None

    def note_witness(self, is_there: bool) -> None:
        """The bucket was read in which the witness is, if it has come along. Many in a row prove that most have."""
        self.witness = None
        self._num_along = self._num_along + 1 if is_there else 0
        if self._num_along >= WINDOW_READS:
            self.base = None

    def aside(self) -> int:
        """Another depth to look at now: one that a neighbour reads at, or the next of all others in random order."""
        if self._hint is not None:
            hint, self._hint = self._hint, None
            return hint
        if not self._asides:
            self._asides = self._rng.sample(range(MAX_DEPTH + 1), MAX_DEPTH + 1)
        depth = self._asides.pop()
        return depth if depth != self.depth else self.aside()

    def note_aside(self, depth: int, nums_apart: Sequence[float], *, now_s: float) -> None:
        """Buckets of another depth were read, as many as `is_enough` wants, each with so many live peers that are not
        announced at the depth of now."""
        total = self.size + sum(nums_apart) / len(nums_apart) * 2.0**depth
        agree = min(nums_apart) >= EVIDENCE and is_enough(depth, nums_apart)
        if agree and depth != self.depth and best_depth(total) != self.depth:
            base = self.depth if self.base is None else self.base
            self._move(total, now_s)
            self.base, self._num_along = base if base != self.depth else None, 0

    def _size_below(self) -> float:
        """Of a swarm that is smaller than thought: where others were not found, what it was before one looked aside."""
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
    """Whether no more buckets of this depth need to be looked at: one has no evidence, or enough of them agree."""
    most = min(LOOKS_THAT_AGREE, 1 << depth)
    return bool(nums_apart) and (nums_apart[-1] < EVIDENCE or len(nums_apart) >= most)


class BucketSampler:
    """The buckets of which a partner is drawn: one is read at a time, and takes the place of the older one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._drawn: deque[tuple[Bucket, frozenset[str]]] = deque(maxlen=NUM_DRAWN)

    def next(self, depth: int) -> Bucket:
        """The bucket to read now: any but the one that stays."""
        return random_bucket(depth, self._rng, but=[bucket for bucket, _ in list(self._drawn)[-1:]])

    def took(self, bucket: Bucket, peer_ids: Iterable[str]) -> None:
        """Who was found there. One that was drawn already is only brought up to date."""
        others = [drawn for drawn in self._drawn if drawn[0] != bucket]
        self._drawn = deque([*others, (bucket, frozenset(peer_ids))], maxlen=NUM_DRAWN)

    def peers(self) -> frozenset[str]:
        return frozenset().union(*(peers for _, peers in self._drawn))
