"""Divides the records of a run into buckets in the DHT, and decides which buckets a peer reads.

At depth d there are 2^d buckets. The bucket of a peer is given by the first d bits of the SHA-256 hash of its id. A
small run has depth 0, with a single bucket.

The right depth depends on the size of the swarm, and each peer chooses it for itself. A peer estimates the size from
the buckets that it reads. It moves to a greater depth if they hold more than SPLIT_ABOVE records on average, and to a
smaller depth if they hold fewer than MERGE_BELOW. Because estimates differ from peer to peer, a peer near a limit
announces itself at the next depth as well, so that peers on both sides of the limit see each other.

Peers can also settle at very different depths, for example when two separate parts of a swarm merge. They find each
other by probing other depths. When a peer moves to another depth because of such a probe, it also keeps its old depth,
called the base. The nodes that answered for the new depth may have invented the records there, so the peer drops the
base only when it finds its old peers at the new depth.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

MEAN_OCCUPANCY = 32
SPLIT_ABOVE, MERGE_BELOW = 48, 20  # records in a bucket
# The gaps between these values and the limits above exceed almost any difference between two estimates, whose standard
# error is 6%.
ALSO_DEEPER_ABOVE, ALSO_SHALLOWER_BELOW = 36, 29
MAX_DEPTH = 16  # enough for 2 million peers at the mean occupancy; beyond that, buckets grow
MAX_BUCKET_BYTES = 64 * 1024  # entries of a larger bucket beyond this size are ignored
WINDOW_READS = 8  # the number of reads from which the size is estimated
PRIOR_READS = 4  # the weight of the old estimate after a change of depth, in reads
LINGER_S = 120.0  # how long a peer is still announced at its old depth after a change: two TTLs
# If another peer reads at a depth that is at least this far from this peer's own, that depth is probed. Two peers near
# a limit differ by only one depth.
FAR_DEPTHS = 2
EVIDENCE = 5  # records in a bucket at another depth that count as evidence of peers there
LOOKS_THAT_AGREE = 3  # buckets at another depth that must show this evidence
NUM_DRAWN = 2  # the number of buckets from which a partner is drawn
READS_AT_ONCE = 16


def run_key(spec_digest: str) -> str:
    """Return the DHT key for the records of all peers of a run."""
    return f"noloco_p2p/1/{spec_digest}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """One of the 2^depth buckets of a view."""

    depth: int
    index: int

    def holds(self, peer_id: str) -> bool:
        return bucket_of(peer_id, self.depth) == self

    def key(self, view_key: str) -> str:
        """Return the DHT key of this bucket. `view_key` is the key of the view, as returned by `run_key`."""
        return f"{view_key}/{self.depth}/{self.index}" if self.depth else view_key


@dataclass(frozen=True, slots=True)
class Found:
    """The live peers in a bucket that was read: peer id -> the depths at which it is announced, its own first.

    `share` is the share of the bucket's entries that was read.
    """

    peers: Mapping[str, Sequence[int]]
    share: float = 1.0


ROOT = Bucket(0, 0)


def bucket_of(peer_id: str, depth: int) -> Bucket:
    first_bits = int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big")
    return Bucket(depth, first_bits >> (32 - depth))


def buckets_at(depth: int) -> list[Bucket]:
    return [Bucket(depth, index) for index in range(1 << depth)]


def random_bucket(depth: int, rng: random.Random, *, but: Collection[Bucket] = ()) -> Bucket:
    """Choose uniformly among the buckets at this depth that are not in `but`, or among all if none is left."""
    left = (1 << depth) - sum(bucket.depth == depth for bucket in but)
    while True:
        bucket = Bucket(depth, rng.randrange(1 << depth))
        if bucket not in but or not left:
            return bucket


def best_depth(size: float) -> int:
    """Return the depth at which the mean number of records per bucket comes closest to MEAN_OCCUPANCY."""
    return min(max(round(math.log2(max(size, 1.0) / MEAN_OCCUPANCY)), 0), MAX_DEPTH)


def within_limit(entries: Mapping[str, tuple[bytes, T]], rng: random.Random) -> dict[str, tuple[bytes, T]]:
    """Return all entries of a bucket, or a random selection that fits into MAX_BUCKET_BYTES."""
    chosen: dict[str, tuple[bytes, T]] = {}
    total_bytes = 0
    for subkey in rng.sample(sorted(entries), len(entries)):
        total_bytes += len(entries[subkey][0])
        if total_bytes > MAX_BUCKET_BYTES:
            break
        chosen[subkey] = entries[subkey]
    return chosen


@dataclass
class Census:
    """A peer's estimate of the size of its swarm, and the depths at which it reads and is announced.

    `read` reads some buckets. Its result is empty if there is no node to ask. If `reads_all` is true, all buckets at
    the depth are read, and otherwise one at a time.
    """

    read: Callable[[Sequence[Bucket]], Awaitable[Sequence[Found]]]
    own_peer_id: str = ""
    reads_all: bool = False
    rng: random.Random = field(default_factory=random.SystemRandom)
    clock: Callable[[], float] = time.monotonic
    depth: int = field(init=False, default=0)
    base: int | None = field(init=False, default=None)  # the old depth, where this peer also reads and is announced
    witness: str | None = field(init=False, default=None)  # a peer at the base, looked for at the current depth
    whole_depth: int | None = field(init=False, default=None)  # the depth at which all buckets were read

    def __post_init__(self) -> None:
        self._counts: deque[float] = deque([0.0], maxlen=WINDOW_READS)  # live records in each bucket that was read
        self._drawn: deque[tuple[Bucket, frozenset[str]]] = deque(maxlen=NUM_DRAWN)
        self._num_along = 0  # witnesses in a row that were found at the current depth
        self._before = (0, -math.inf)  # the previous depth, and the time until which this peer is announced there
        self._asides: list[int] = []  # depths that remain to be probed
        self._hint: int | None = None

    @property
    def size(self) -> float:
        """The estimated number of peers in the run, including this one. It is exact at depth 0."""
        return self._occupancy() * 2.0**self.depth

    @property
    def read_at(self) -> tuple[int, ...]:
        """The depths at which this peer reads."""
        return (self.depth,) if self.base is None else (self.depth, self.base)

    def drawn(self) -> frozenset[str]:
        """Return the peers in the buckets that were read last, from which a partner is drawn."""
        return frozenset().union(*(peers for _, peers in self._drawn))

    def depths(self) -> tuple[int, ...]:
        """Return the depths at which this peer must be announced now.

        The depth at which this peer reads comes first. Peers with a different estimate may look for this peer at the
        other depths.
        """
        occupancy, lingering = self._occupancy(), self._before
        depths = {self.depth: None}
        if occupancy > ALSO_DEEPER_ABOVE and self.depth < MAX_DEPTH:
            depths[self.depth + 1] = None
        if occupancy < ALSO_SHALLOWER_BELOW and self.depth > 0:
            depths[self.depth - 1] = None
        if self.clock() < lingering[1]:
            depths[lingering[0]] = None
        if self.base is not None:
            depths[self.base] = None
        return tuple(depths)

    async def refresh(self) -> None:
        """Read a bucket at the current depth, or all of them, and a bucket at the base."""
        depth, base, witness = self.depth, self.base, self.witness
        buckets = [bucket_of(witness, depth) if witness else self.next()]
        if self.reads_all:
            buckets = self.rng.sample(buckets_at(depth), 1 << depth)
        if base is not None:
            buckets += buckets_at(base) if self.reads_all else [random_bucket(base, self.rng)]
        for start in range(0, len(buckets), READS_AT_ONCE):
            some = buckets[start : start + READS_AT_ONCE]
            for bucket, found in zip(some, await self.read(some), strict=False):
                self.took(bucket, found)
            if self.depth != depth:
                return  # the remaining buckets are no longer used
        self.whole_depth = depth if self.reads_all else None

    async def survey(self) -> None:
        """Probe all depths until this peer moves to one of them, because a newcomer does not know the right depth."""
        before = self.depth
        for depth in range(MAX_DEPTH + 1):
            if depth != before:
                await self.look_aside(depth)
            if self.depth != before:
                return await self.refresh()

    async def look_aside(self, depth: int | None = None) -> None:
        """Probe another depth for peers that are not announced at the current one, and move there if there are many.

        LOOKS_THAT_AGREE buckets, or all buckets if there are fewer, must hold EVIDENCE such peers. If `depth` is None,
        it is the most common of the distant depths at which peers in the last bucket read. If there are none, all other
        depths take turns in random order.
        """
        if depth is None:
            depth, self._hint = self._hint, None
        while depth is None or depth == self.depth:
            self._asides = self._asides or self.rng.sample(range(MAX_DEPTH + 1), MAX_DEPTH + 1)
            depth = self._asides.pop()
        nums_apart: list[float] = []
        while len(nums_apart) < min(LOOKS_THAT_AGREE, 1 << depth):
            reads = await self.read([random_bucket(depth, self.rng)])
            apart = [peer for found in reads for peer, depths in found.peers.items() if self.depth not in depths]
            if len(apart) < EVIDENCE:
                return
            nums_apart.append(len(apart) / reads[0].share)
        total = self.size + sum(nums_apart) / len(nums_apart) * 2.0**depth
        if best_depth(total) != self.depth:
            base = self.depth if self.base is None else self.base
            self._move(total)
            self.base, self._num_along = base if base != self.depth else None, 0

    def next(self) -> Bucket:
        """Return the bucket to read next: a random bucket other than the one that was read last."""
        return random_bucket(self.depth, self.rng, but=[bucket for bucket, _ in list(self._drawn)[-1:]])

    def took(self, bucket: Bucket, found: Found) -> None:
        """Note what was found in a bucket at the current depth or at the base.

        At the base, one of the peers becomes the witness, which this peer then looks for at the current depth. If there
        are none, the base is dropped, and also after WINDOW_READS witnesses in a row that were found: most peers have
        then moved to this depth as well.
        """
        if bucket.depth not in self.read_at:
            return
        others = [drawn for drawn in self._drawn if drawn[0] != bucket]  # a bucket that is drawn again is replaced
        self._drawn = deque([*others, (bucket, frozenset(found.peers))], maxlen=NUM_DRAWN)
        if bucket.depth != self.depth:
            left = [peer for peer in found.peers if peer != self.own_peer_id]
            self.witness = self.rng.choice(left) if left else None
            self.base = self.base if left else None
            return
        if self.witness and bucket.holds(self.witness):
            self._num_along = self._num_along + 1 if self.witness in found.peers else 0
            self.witness, self.base = None, None if self._num_along >= WINDOW_READS else self.base
        self._count(found)

    def _count(self, found: Found) -> None:
        """Estimate the size anew from a bucket at the current depth, and move to another depth if necessary."""
        if self.depth == 0:
            self._counts.clear()  # a single bucket holds all peers, so there is nothing to average
        self._counts.append(len(found.peers) / found.share)
        afar = Counter(depths[0] for depths in found.peers.values() if abs(depths[0] - self.depth) >= FAR_DEPTHS)
        self._hint = afar.most_common(1)[0][0] if afar else None
        occupancy = self._occupancy()
        if occupancy > SPLIT_ABOVE:
            self._move(self.size)
        elif occupancy < MERGE_BELOW and self.depth > 0:
            # While there is a base, the estimate is at most the size that suits the depth of the base, because the
            # records of a larger swarm may be invented.
            self._move(self.size if self.base is None else min(self.size, MEAN_OCCUPANCY * 2.0**self.base))

    def _move(self, size: float) -> None:
        depth = best_depth(size)
        if depth == self.depth:
            return
        self.base, self.witness = None if depth == self.base else self.base, None
        self._before = (self.depth, self.clock() + LINGER_S)
        self.depth = depth
        self._counts.clear()
        self._counts.extend([size / 2.0**depth] * PRIOR_READS)
        self._asides = []

    def _occupancy(self) -> float:
        return sum(self._counts) / len(self._counts)
