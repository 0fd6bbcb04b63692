"""Measure the cost of the directory and how even its draws are, from 100 to a million peers.

    python benchmarks/directory.py [--quick] [--json FILE]

Even draws: the exact probability of drawing the luckiest peer and that of drawing the unluckiest peer, relative to a
uniform draw. They follow from the sizes of the real buckets.

Real reads: the production code stores records on DHT nodes on loopback, and reads them. The bytes of a read include all
copies that the nodes send.

Sizes: 100 production censuses, which know no peers at first, run among bystanders. The bystanders are records that are
stored where those of a swarm of this size would be (`harness/bucket_swarm.py`). Bytes per minute combine the reads and
records of this simulation with the copies and bytes of the real reads. Then 1 % of the bystanders (at least 5) die at
once, and the time is measured until no peer can draw any of them.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import uvloop
from claims import Claim, run
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from harness.bucket_swarm import BucketSwarm

from noloco_p2p.identity import Identity, peer_id_of
from noloco_p2p.swarm.buckets import MAX_BUCKET_BYTES, NUM_DRAWN, best_depth, bucket_of, buckets_at, run_key
from noloco_p2p.swarm.dialer import AddressBook
from noloco_p2p.swarm.directory import SwarmDirectory
from noloco_p2p.swarm.records import MAX_RECORD_BYTES, PeerRecord, encode_record
from noloco_p2p.telemetry.metrics import Metrics

RUN = "ab" * 32
READERS = 100
NEIGHBOUR_BYTES = 20 + 38  # of one neighbour in an answer: its key in the DHT and its peer id


@dataclass(frozen=True, slots=True)
class Cost:
    """The figures of one real read of a bucket."""

    record_bytes: float
    copies: float  # of each record that a read receives
    overhead_bytes: float
    seconds: float


def even_draws(num_peers: int) -> list[Claim]:
    depth = best_depth(num_peers)
    sizes = Counter(bucket_of(f"peer-{number}", depth) for number in range(num_peers))
    worst, best = spread_of_draws([sizes[bucket] for bucket in buckets_at(depth)])
    return [
        Claim(f"{num_peers} peers: chance of the unluckiest to be drawn", worst, "of 1/N"),
        Claim(f"{num_peers} peers: chance of the luckiest", best, "of 1/N"),
    ]


def spread_of_draws(occupancies: Sequence[int]) -> tuple[float, float]:
    """Return the probabilities of the unluckiest and the luckiest peer, relative to a uniform draw.

    The result is exact if a peer is drawn from the union of two random buckets, or from the only bucket. `occupancies`
    has the number of peers in each bucket.
    """
    sizes, num_buckets, num_peers = Counter(occupancies), len(occupancies), sum(occupancies)
    if num_buckets < NUM_DRAWN:
        return 1.0, 1.0
    chances = []
    for size in sizes:
        if size:
            others = (sizes - Counter({size: 1})).items()
            pairs = sum(number / (size + other) for other, number in others)
            chances.append(num_peers * 2 * pairs / (num_buckets * (num_buckets - 1)))
    return min(chances), max(chances)


def describe(identity: Identity, number: int) -> PeerRecord:
    """Return a record with as many fields as that of a training peer."""
    return PeerRecord(
        identity.peer_id,
        "directory",
        RUN,
        addresses=(f"198.51.100.{number % 250}:41000",),
        multiaddrs=(f"/ip4/198.51.100.{number % 250}/tcp/41001/p2p/{identity.peer_id}",),
        sequence=int(time.time() * 1000),
        metrics=Metrics(
            progress=0.123456789,
            swaps=123_456,
            failed_unreachable=20,
            failed_slow=5,
            failed_corrupt=1,
            failed_abandoned=34,
            swaps_per_min=12.34,
            link_use=0.812,
            age_steps=1.23,
            apart=0.00312,
            inner_steps_per_s=3.2109,
            tokens_per_s=12345.6,
            loss=3.2109,
            last_partner=identity.peer_id,
            bytes_sent=1 << 40,
            bytes_received=1 << 40,
            blocked_s=1234.5,
        ),
        reachability="reached",
        session_key="A" * 44,
        depths=(3,),
    )


async def real_reads(num_nodes: int, num_records: int) -> Cost:
    keys = [Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")) for number in range(1, num_records + 1)]
    public = [key.public_key().public_bytes_raw() for key in keys]
    many = [Identity(peer_id_of(raw), raw, key) for raw, key in zip(public, keys, strict=True)]
    depth = best_depth(num_records)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = [await _node(stack, folder, 0, ())]
        nodes += [await _node(stack, folder, number, tuple(nodes[0].multiaddrs())) for number in range(1, num_nodes)]
        while min(len(node.node.neighbours()) for node in nodes) < min(8, num_nodes - 1):  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # no event says that a routing table is full
        expires_at_s = time.time() + 59.0
        records = [replace(describe(identity, n), expires_at_s=expires_at_s) for n, identity in enumerate(many)]
        values = [encode_record(record, identity) for record, identity in zip(records, many, strict=True)]
        record_bytes = [len(value) for value in values]

        async def store(number: int) -> None:
            peer_id, node = many[number].peer_id, nodes[number % num_nodes].node
            key = bucket_of(peer_id, depth).key(run_key(RUN))
            await node.store(key, peer_id, values[number], expires_at_s=expires_at_s)

        for start in range(0, num_records, 16):
            await asyncio.gather(*(store(number) for number in range(start, min(start + 16, num_records))))
        reader = nodes[-1].node
        received = _count_received(reader)
        took_s, found = [], 0
        for bucket in buckets_at(depth) * 3:
            began_s = time.monotonic()
            found += len(await reader.get(bucket.key(run_key(RUN))))
            took_s.append(time.monotonic() - began_s)
    reads = len(took_s)
    return Cost(mean(record_bytes), received["records"] / found, received["overhead"] / reads, median(took_s))


async def _node(stack: AsyncExitStack, folder: Path, number: int, door: tuple[str, ...]) -> SwarmDirectory:
    path = folder / f"{number}.key"
    node = await SwarmDirectory(
        identity_path=path,
        identity=Identity.load_or_create(path),
        listen_host="127.0.0.1",
        listen_port=0,
        bootstraps=door,
        address_book=AddressBook(),
        spec_digest=None,
    ).start()
    stack.push_async_callback(node.stop, farewell=False)
    return node


def _count_received(node: Any) -> Counter[str]:
    """Return a counter of the bytes that this node's reads receive from now on."""
    protocol, received = node._dht.protocol, Counter[str]()
    call_find = protocol.call_find

    async def counted(peer: Any, keys: Any) -> Any:
        answer = await call_find(peer, keys)
        for found, neighbours in (answer or {}).values():
            received["overhead"] += len(neighbours) * NEIGHBOUR_BYTES
            received["records"] += len(found.value) if found else 0
        return answer

    protocol.call_find = counted
    return received


def at_size(num_peers: int, cost: Cost) -> list[Claim]:
    swarm = BucketSwarm(seed=num_peers)
    swarm.settle(num_peers)
    swarm.join(READERS if num_peers > READERS else 20, within_s=10.0)
    first_s = _until(swarm, lambda: all(m.census.drawn() - {m.peer_id} for m in swarm.members.values()))
    swarm.run(120.0)  # the quick reads of the start are over
    before = swarm.reads, swarm.records_read
    swarm.run(60.0)
    members = list(swarm.members.values())
    reads, records = (
        (now - then) / len(members) for now, then in zip((swarm.reads, swarm.records_read), before, strict=True)
    )
    num_bytes = records * cost.copies * cost.record_bytes + reads * cost.overhead_bytes
    estimates = sorted(member.census.size / (num_peers + len(members)) for member in members)
    dead = swarm.silence(max(5, num_peers // 100))
    drawn = mean(len(member.census.drawn()) for member in members)
    gone_s = _until(swarm, lambda: not any(member.census.drawn() & dead for member in swarm.members.values()))
    name = f"{num_peers} peers"
    return [
        Claim(f"{name}: depth", Counter(member.census.depth for member in members).most_common(1)[0][0], "bits"),
        Claim(f"{name}: peers to draw from", drawn, "peers"),
        Claim(f"{name}: reads a peer and minute", reads, "reads"),
        Claim(f"{name}: received a peer and minute", num_bytes / 1e6, "MB"),
        Claim(f"{name}: newcomers know somebody after", first_s - 10.0, "s at most"),
        Claim(f"{name}: estimate of the size, lowest of {len(members)}", estimates[0], "of N"),
        Claim(f"{name}: estimate of the size, highest", estimates[-1], "of N"),
        Claim(f"{name}: the dead have vanished after", gone_s, "s"),
    ]


def _until(swarm: BucketSwarm, holds: Any) -> float:
    """Run the swarm until the condition holds, and return the virtual seconds."""
    began_s = swarm.now_s
    swarm.run(1.0)
    while not holds() and swarm.now_s - began_s < 600:
        swarm.run(1.0)
    return swarm.now_s - began_s


def measure(quick: bool) -> list[Claim]:
    claims = [claim for size in (10, 1_000, 100_000) for claim in even_draws(size)]
    cost = uvloop.run(real_reads(*((6, 60) if quick else (12, 256))))
    bucket_bytes = 32 * cost.record_bytes
    claims += [
        Claim("a record", cost.record_bytes, "bytes", f"< {MAX_RECORD_BYTES}", cost.record_bytes < MAX_RECORD_BYTES),
        Claim("a bucket of 32", bucket_bytes, "bytes", f"< {MAX_BUCKET_BYTES}", bucket_bytes < MAX_BUCKET_BYTES),
        Claim("copies of a bucket that a read receives", cost.copies, "copies"),
        Claim("addresses of nodes that a read receives", cost.overhead_bytes, "bytes"),
        Claim("a read on loopback", 1e3 * cost.seconds, "ms"),
    ]
    for size in (100, 1_000) if quick else (100, 1_000, 10_000, 100_000, 1_000_000):
        claims += at_size(size, cost)
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
