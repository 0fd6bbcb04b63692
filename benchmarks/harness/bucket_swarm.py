"""Run the production census and sampler of many peers in memory and on a virtual clock, with a dict as the DHT.

Every peer announces itself, reads buckets and looks at other depths as often as `swarm.membership_view` does. Reads
return exactly what is stored.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass

from noloco_p2p.swarm.buckets import (
    LINGER_S,
    MAX_DEPTH,
    Bucket,
    BucketSampler,
    Census,
    best_depth,
    bucket_of,
    is_enough,
    random_bucket,
)
from noloco_p2p.swarm.records import TTL_S

HEARTBEAT_S, VIEW_S, BUCKET_VIEW_S, QUICK_S, QUICK_FOR_S, FRESHEN_S = TTL_S / 4, 5.0, 10.0, 1.0, 30.0, 30.0


@dataclass(slots=True)
class Member:
    """One peer with its view of the directory."""

    peer_id: str
    began_s: float
    census: Census
    sampler: BucketSampler


@dataclass(slots=True)
class Stored:
    depths: tuple[int, ...]
    expires_at_s: float


class BucketSwarm:
    """A swarm that `join` and `kill` change and `run` advances. Each group has its own DHT until `heal` is called."""

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.members: dict[str, Member] = {}
        self.bystanders: list[str] = []
        self.reads = self.records_read = self.stores = 0
        self._seed = seed
        self._rng = random.Random(seed)
        self._stored: dict[tuple[int, Bucket], dict[str, Stored]] = defaultdict(dict)
        self._group: dict[str, int] = {}
        self._events: list[tuple[float, int, str, str]] = []
        self._num_events = self._num_joined = 0

    def join(self, number: int, *, within_s: float = 1.0, group: int = 0) -> None:
        for _ in range(number):
            peer_id, at_s = f"peer-{self._seed}-{self._num_joined}", self.now_s + self._rng.uniform(0.0, within_s)
            self._num_joined += 1
            rng = random.Random(peer_id)
            self.members[peer_id] = Member(peer_id, at_s, Census(rng), BucketSampler(rng))
            if group:
                self._group[peer_id] = group
            self._at(at_s, "look", peer_id)
            self._at(at_s, "beat", peer_id)
            self._at(at_s + FRESHEN_S, "freshen", peer_id)

    def settle(self, number: int) -> None:
        """Add bystanders, which are peers that joined long ago, are announced at the right depths, and read nothing."""
        depth, alike = best_depth(number), Census(random.Random(0))
        while alike.depth != depth or self.now_s < LINGER_S:
            alike.note(number / 2.0**alike.depth, now_s=self.now_s)
            self.now_s += VIEW_S
        announced = Stored(alike.depths(self.now_s), float("inf"))
        self.bystanders = [f"bystander-{self._seed}-{index}" for index in range(number)]
        for peer_id in self.bystanders:
            for depth in announced.depths:
                self._stored[0, bucket_of(peer_id, depth)][peer_id] = announced

    def silence(self, number: int) -> set[str]:
        """Kill this many bystanders, each announced within the last heartbeat, and return their ids."""
        dead = set(self._rng.sample(self.bystanders, number))
        for peer_id in dead:
            expires_at_s = self.now_s + TTL_S - self._rng.uniform(0.0, HEARTBEAT_S)
            for records in [self._stored[0, bucket_of(peer_id, depth)] for depth in range(MAX_DEPTH + 1)]:
                if peer_id in records:
                    records[peer_id] = Stored(records[peer_id].depths, expires_at_s)
        return dead

    def kill(self, number: int) -> None:
        """Remove this many members at random. Their records expire later."""
        for peer_id in self._rng.sample(sorted(self.members), number):
            del self.members[peer_id]

    def heal(self) -> None:
        """Join the islands into one DHT again."""
        self._group.clear()
        merged: dict[tuple[int, Bucket], dict[str, Stored]] = defaultdict(dict)
        for (_, bucket), records in self._stored.items():
            merged[0, bucket].update(records)
        self._stored = merged

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what, peer_id = heapq.heappop(self._events)
            if member := self.members.get(peer_id):
                pause_s = {"look": self._look, "beat": self._beat, "freshen": self._freshen}[what](member)
                self._at(self.now_s + pause_s * self._rng.uniform(0.95, 1.05), what, peer_id)
        self.now_s = until_s

    def visible_share(self, member: Member) -> float:
        """Return the share of other members that this one can draw, because it reads at the depth of their records."""
        depths = member.census.read_at
        others = [peer for peer in self.members if peer != member.peer_id]
        seen = [any(peer in self._found(member, bucket_of(peer, depth)) for depth in depths) for peer in others]
        return sum(seen) / len(others)

    def _found(self, member: Member, bucket: Bucket) -> dict[str, Stored]:
        records = self._stored.get((self._group.get(member.peer_id, 0), bucket), {})
        for peer in [peer for peer, record in records.items() if record.expires_at_s < self.now_s]:
            del records[peer]
        return records

    def _look(self, member: Member) -> float:
        self._read_own_depth(member)
        is_young = self.now_s - member.began_s < QUICK_FOR_S
        if not member.sampler.peers() - {member.peer_id}:
            self._survey(member)
        elif is_young:
            self._look_aside(member, member.census.aside())
        return QUICK_S if is_young else BUCKET_VIEW_S if member.census.depth else VIEW_S

    def _read_own_depth(self, member: Member) -> None:
        depth, witness = member.census.depth, member.census.witness
        bucket = bucket_of(witness, depth) if witness else member.sampler.next(depth)
        found = self._read(member, bucket)
        if witness:
            member.census.note_witness(witness in found)
        homes = [record.depths[0] for record in found.values()]
        member.census.note(len(found), homes=homes, now_s=self.now_s)
        member.sampler.took(bucket, found)
        if member.census.base is not None:
            self._read_base(member, random_bucket(member.census.base, self._rng))

    def _read_base(self, member: Member, bucket: Bucket) -> None:
        found = self._read(member, bucket)
        member.sampler.took(bucket, found)
        member.census.note_base([peer for peer in found if peer != member.peer_id])

    def _survey(self, member: Member) -> None:
        before = member.census.depth
        for depth in range(MAX_DEPTH + 1):
            if depth != before:
                self._look_aside(member, depth)
            if member.census.depth != before:
                self._read_own_depth(member)
                return

    def _look_aside(self, member: Member, depth: int) -> None:
        nums_apart = list[float]()
        while not is_enough(depth, nums_apart):
            found = self._read(member, random_bucket(depth, self._rng))
            nums_apart.append(sum(member.census.depth not in record.depths for record in found.values()))
        member.census.note_aside(depth, nums_apart, now_s=self.now_s)

    def _freshen(self, member: Member) -> float:
        self._look_aside(member, member.census.aside())
        return FRESHEN_S

    def _beat(self, member: Member) -> float:
        depths = member.census.depths(self.now_s)
        for depth in depths:
            self.stores += 1
            at = (self._group.get(member.peer_id, 0), bucket_of(member.peer_id, depth))
            self._stored[at][member.peer_id] = Stored(depths, self.now_s + TTL_S)
        return HEARTBEAT_S

    def _read(self, member: Member, bucket: Bucket) -> dict[str, Stored]:
        found = self._found(member, bucket)
        self.reads += 1
        self.records_read += len(found)
        return found

    def _at(self, at_s: float, what: str, peer_id: str) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, what, peer_id))
