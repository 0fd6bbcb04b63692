"""Run the production census of many peers in memory and on a virtual clock, with a dict as the DHT.

Every peer announces itself, reads buckets and looks at other depths as often as `swarm.directory` does. Reads
return exactly what is stored.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass

from noloco_p2p.swarm.buckets import (
    LINGER_S,
    MAX_DEPTH,
    Bucket,
    Census,
    Found,
    best_depth,
    bucket_of,
)
from noloco_p2p.swarm.records import TTL_S

HEARTBEAT_S, VIEW_S, BUCKET_VIEW_S, QUICK_S, QUICK_FOR_S, FRESHEN_S = TTL_S / 4, 5.0, 10.0, 1.0, 30.0, 30.0


@dataclass(slots=True)
class Member:
    """One peer with its view of the directory."""

    peer_id: str
    began_s: float
    census: Census


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
            self.members[peer_id] = self._member(peer_id, at_s)
            if group:
                self._group[peer_id] = group
            self._at(at_s, "look", peer_id)
            self._at(at_s, "beat", peer_id)
            self._at(at_s + FRESHEN_S, "freshen", peer_id)

    def _member(self, peer_id: str, at_s: float) -> Member:
        async def read(buckets: Sequence[Bucket]) -> list[Found]:
            return [Found({peer: each.depths for peer, each in self._read(member, one).items()}) for one in buckets]

        census = Census(read, own_peer_id=peer_id, rng=random.Random(peer_id), clock=lambda: self.now_s)
        member = Member(peer_id, at_s, census)
        return member

    def settle(self, number: int) -> None:
        """Add bystanders, which are peers that joined long ago, are announced at the right depths, and read nothing."""
        depth, alike = best_depth(number), self._member("bystander", self.now_s).census
        while alike.depth != depth or self.now_s < LINGER_S:
            alike.took(alike.next(), Found({"anybody": alike.depths()}, share=2.0**alike.depth / number))
            self.now_s += VIEW_S
        announced = Stored(alike.depths(), float("inf"))
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
        _run(member.census.refresh())
        is_young = self.now_s - member.began_s < QUICK_FOR_S
        if not member.census.drawn() - {member.peer_id}:
            _run(member.census.survey())
        elif is_young:
            _run(member.census.look_aside())
        return QUICK_S if is_young else BUCKET_VIEW_S if member.census.depth else VIEW_S

    def _freshen(self, member: Member) -> float:
        _run(member.census.look_aside())
        return FRESHEN_S

    def _beat(self, member: Member) -> float:
        depths = member.census.depths()
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


def _run(reading: Coroutine[None, None, None]) -> None:
    """Run a coroutine that never waits, because its reads are in memory."""
    with suppress(StopIteration):
        reading.send(None)
