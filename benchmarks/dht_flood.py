"""Measure what a flood of DHT requests costs a peer that swaps.

    python benchmarks/dht_flood.py [--quick] [--json FILE]

Two peers in separate processes swap over TLS, again and again, as fast as they can. One of them also runs a DHT node on
the same event loop, as real peers do. Attackers in the node's routing table send up to 10 MB/s: find requests that
repeat one key 6,000 times, find requests for a full bucket, messages of 1 MiB, records of invented identities, damaged
records, pings, questions for the addresses of peers whose ids have 16 KiB, and provider records for the DHT of p2pd.
The node also reads a bucket every second, and the attackers answer its questions with peer ids of 100 kB. Every few
seconds, the attackers switch between this peer and a decoy, which is another process with a DHT node but no peer. The
machine's two cores are equally busy with either target, so the two rates can be compared. A turn of the loop is the CPU
time of the network thread between two ticks of a 2 ms timer. Memory is the peak of the peer and its p2pd, minus their
memory before the flood.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop
from claims import Claim, run
from harness.identities import identity_of
from pair import Side, whole_swaps

from noloco_p2p.cli.collection import spare_what_is_loaded
from noloco_p2p.errors import DirectoryError
from noloco_p2p.identity import Identity
from noloco_p2p.swarm.buckets import ROOT, run_key
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.records import PeerRecord, encode_record

RUN = "ab" * 32
SPEC = whole_swaps("dht-flood")
NUM_ELEMENTS = 8_000_000
FLOOD_BYTES_A_S = 10e6
NUM_ATTACKERS = 3
PERIOD_S = 0.1
MAX_OPEN = 64  # unanswered requests of one attacker
REQUEST_S = 2.0
READ_S = 1.0
LONG_ID_BYTES, LONGEST_ID_BYTES = 16 * 1024, 100_000  # in requests, which p2pd passes on up to 256 KiB, and in answers
LOOK_S = 0.002
LONGEST_TURN_S, LEAST_SHARE, MOST_GROWN_BYTES = 0.050, 0.9, 64 << 20


@dataclass(slots=True)
class Meter:
    """Records the longest turn of its event loop in seconds of CPU time."""

    longest_s: float = 0.0

    async def run(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.thread_time()
            self.longest_s = max(self.longest_s, now_s - before_s)
            before_s = now_s


def side(name: str, pipe: Connection, folder: str) -> None:
    """Swap on each "swap"; on "turn", send the longest turn since the last "turn". Side a also runs a DHT node."""
    peer, meter, node = Side(name, pipe, SPEC), Meter(), None
    peer.begin(NUM_ELEMENTS)
    if name == "b":
        peer.directory.others = []
    else:
        node = peer.on_loop(start_node(Path(folder), "victim"))
        asyncio.run_coroutine_threadsafe(meter.run(), peer.loop)
        asyncio.run_coroutine_threadsafe(read(node), peer.loop)
    pipe.send((node.multiaddrs()[0], node.daemon_pid) if node else None)
    spare_what_is_loaded()  # as `noloco join` does
    while True:
        word = pipe.recv()
        while word == "turn":
            pipe.send(meter.longest_s)
            meter.longest_s = 0.0
            word = pipe.recv()
        if word == "end":
            break
        pipe.send(peer.swap())
    if node:
        peer.on_loop(node.stop())
    peer.stop()


async def read(node: SwarmNode) -> None:
    """Read the bucket of the run again and again, as a peer does. Nodes that answer badly are not asked for a while."""
    while True:
        with suppress(DirectoryError):
            await node.get(ROOT.key(run_key(RUN)))
        await asyncio.sleep(READ_S)


async def start_node(folder: Path, name: str) -> SwarmNode:
    path = folder / f"{name}.key"
    return await SwarmNode(path, Identity.load_or_create(path).peer_id, ListenOn("127.0.0.1", 0)).start()


def decoy(pipe: Connection, folder: str) -> None:
    """Run a DHT node that is flooded instead of the victim."""

    async def main() -> None:
        node = await start_node(Path(folder), "decoy")
        pipe.send((node.multiaddrs()[0], node.daemon_pid))
        await asyncio.to_thread(pipe.recv)
        await node.stop()

    uvloop.run(main())


def flooder(pipe: Connection, folder: str, doors: list[str]) -> None:
    """Flood the node whose index the pipe delivers (None: no node), and reply with the counts of earlier requests."""

    async def main() -> None:
        attackers = [await start_node(Path(folder), f"attacker {number}") for number in range(NUM_ATTACKERS)]
        for attacker, door in itertools.product(attackers, doors):
            address, _, peer_id = door.partition("/p2p/")
            await attacker.dial(peer_id, [address])
        floods = [Flood(attacker, FLOOD_BYTES_A_S / NUM_ATTACKERS) for attacker in attackers]
        tasks = [asyncio.create_task(flood.run()) for flood in floods]
        pipe.send("ready")
        while (word := await asyncio.to_thread(pipe.recv)) != "end":
            sent = sum((flood.sent for flood in floods), Counter())
            for flood in floods:
                flood.sent.clear()
                flood.target = None if word is None else doors[word].partition("/p2p/")[2]
            pipe.send(dict(sent))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for attacker in attackers:
            await attacker.stop()

    uvloop.run(main())


class Flood:
    """One attacker. Each kind of request may use a bit more than a third of the bytes, and has a rate limit."""

    def __init__(self, node: SwarmNode, bytes_a_s: float) -> None:
        self.target: str | None = None
        self.sent: Counter[str] = Counter()
        self._node: Any = node
        self._open = asyncio.Semaphore(MAX_OPEN)
        self._tasks: set[asyncio.Task[None]] = set()
        self._records = itertools.cycle(records(200))
        kinds: list[tuple[str, Callable[[], bytes], float]] = [
            ("find", repeated_keys, 1000.0),
            ("find", whole_bucket, 200.0),
            ("find", lambda: bytes(1 << 20), 10.0),
            ("store", self._next_records, 1000.0),
            ("store", self._damaged_records, 1000.0),
            ("ping", lambda: b"", 300.0),
            ("ping", lambda: filler(12_000), 1000.0),
            ("ping", self._introduction, 2.0),
            ("locate", lambda: b"\xff" * LONG_ID_BYTES, 100.0),
        ]
        handlers = self._node._p2p._client.control.unary_handlers
        self._answer, handlers["DHTProtocol.rpc_find"] = handlers["DHTProtocol.rpc_find"], self._lie
        # More than an eighth: small kinds do not use up theirs, p2pd accepts no provider records, 1 MiB requests wait.
        share = bytes_a_s / 2.7
        self._jobs = [self._keep_on(share, most, self._ask, what, make) for what, make, most in kinds]
        self._jobs.append(self._keep_on(share, 50.0, self._provide))

    async def run(self) -> None:
        await asyncio.gather(*self._jobs)

    async def _keep_on(
        self, bytes_a_s: float, most_a_s: float, send: Callable[..., Awaitable[int]], *args: Any
    ) -> None:
        """Send requests within both rates, once per PERIOD_S. Requests that did not fit into a period are skipped."""
        allowed = 0.0
        while True:
            allowed = min(allowed + bytes_a_s * PERIOD_S, bytes_a_s) if self.target else 0.0
            for _ in range(max(1, int(most_a_s * PERIOD_S))):
                if self.target and allowed > 0 and not self._open.locked():
                    allowed -= await send(*args)
            await asyncio.sleep(PERIOD_S)

    async def _ask(self, what: str, make: Callable[[], bytes]) -> int:
        from hivemind.p2p import PeerID

        from noloco_p2p.swarm.kademlia.whereabouts import LOCATE

        data, peer = make(), PeerID.from_base58(self.target or "")
        await self._open.acquire()
        protocol = LOCATE if what == "locate" else f"DHTProtocol.rpc_{what}"
        calling = self._node._p2p._client.call_unary_handler(peer, protocol, data)
        self._own(asyncio.wait_for(calling, REQUEST_S))
        self.sent["requests"] += 1
        self.sent["bytes"] += len(data)
        return max(len(data), 100)

    def _introduction(self) -> bytes:
        """Return a ping that names this node, so that the target asks it questions."""
        return field(2, field(1, self._node._dht.node_id.to_bytes()))

    def _lie(self, data: bytes, asker: Any) -> bytes:
        """Answer a question of the target with a node whose peer id is too long."""
        if str(asker) != self.target:
            return self._answer(data, asker)
        self.sent["answers"] += 1
        return field(2, field(4, bytes(20)) + field(5, b"\xff" * LONGEST_ID_BYTES))

    async def _provide(self) -> int:
        """Send 500 provider records on a stream of p2pd's own DHT, and return their estimated size."""
        await self._open.acquire()
        self._own(self._provider_stream(self.target or ""))
        return 500 * 100

    async def _provider_stream(self, target: str) -> None:
        _, writer = await self._node.open_stream(target, "/ipfs/kad/1.0.0")
        provider = field(1, self._node._p2p.peer_id.to_bytes()) + field(2, bytes.fromhex("0401020304060fa1"))
        for _ in range(500):
            key = bytes.fromhex("1220") + secrets.token_bytes(32)
            message = b"\x08\x02" + field(2, key) + field(9, provider) + b"\x50\x01"
            writer.write(varint(len(message)) + message)
            self.sent["bytes"] += len(message)
        self.sent["requests"] += 500
        await writer.drain()
        writer.close()

    def _own(self, job: Any) -> None:
        async def quietly() -> None:
            with suppress(Exception):  # the victim's answers do not matter
                await job

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(lambda _: (self._tasks.discard(task), self._open.release()))

    def _next_records(self) -> bytes:
        return next(self._records)

    def _damaged_records(self) -> bytes:
        good = bytearray(next(self._records))
        good[len(good) // 2] ^= 1
        return bytes(good)


def records(num_requests: int) -> list[bytes]:
    """Return store requests with eight signed records each, all for one bucket."""
    from hivemind.dht.routing import DHTID
    from hivemind.proto import dht_pb2
    from hivemind.utils import MSGPackSerializer

    key, dumps = DHTID.generate(ROOT.key(run_key(RUN))).to_bytes(), MSGPackSerializer.dumps
    requests = []
    for _ in range(num_requests):
        owners = [identity_of(secrets.token_hex(8)) for _ in range(8)]
        ends_s = time.time() + 115.0
        words = [PeerRecord(owner.peer_id, "x", RUN, session_key="A" * 175, expires_at_s=ends_s) for owner in owners]
        request = vars(dht_pb2)["StoreRequest"](
            keys=[key] * 8,
            subkeys=[dumps(owner.peer_id) for owner in owners],
            values=[dumps(encode_record(word, owner)) for word, owner in zip(words, owners, strict=True)],
            expiration_time=[ends_s] * 8,
            in_cache=[False] * 8,
        )
        requests.append(request.SerializeToString())
    return requests


def repeated_keys() -> bytes:
    return whole_bucket() * 6000


def whole_bucket() -> bytes:
    from hivemind.dht.routing import DHTID

    return field(2, DHTID.generate(ROOT.key(run_key(RUN))).to_bytes())


def filler(num_bytes: int) -> bytes:
    return field(15, bytes(num_bytes))  # an unknown field


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


@dataclass(slots=True)
class Slice:
    """The measurements of a few seconds in which one target is flooded."""

    mb_a_s: float  # of swaps, each way
    turn_s: float
    flood: dict[str, int]
    seconds: float
    grown_bytes: int


class Bench:
    """The processes of the benchmark, which `end` stops."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self.pipes: dict[str, Any] = {}

        def start(name: str, target: Callable[..., None], *args: Any) -> Connection:
            self.pipes[name], theirs = context.Pipe()
            first = (name, theirs) if target is side else (theirs,)
            process = context.Process(target=target, args=(*first, folder, *args), daemon=True)
            process.start()
            self._processes.append(process)
            return self.pipes[name]

        sides = {name: start(name, side) for name in "ab"}
        told = {name: pipe.recv() for name, pipe in sides.items()}
        for name, other in ("ab", "ba"):
            port, *rest = told[other]
            sides[name].send((other, f"127.0.0.1:{port}", *rest))
        (victim_door, p2pd), _ = sides["a"].recv(), sides["b"].recv()
        decoy_door, _ = start("decoy", decoy).recv()
        self._watched = [psutil.Process(self._processes[0].pid), psutil.Process(p2pd)]
        for _ in range(5):
            self.swap()
        start("flooder", flooder, [victim_door, decoy_door]).recv()
        self._before_bytes = self.memory()

    def memory(self) -> int:
        return sum(process.memory_info().rss for process in self._watched)

    def swap(self) -> int:
        """Swap once, and return the number of payload bytes in each direction."""
        for name in "ab":
            self.pipes[name].send("swap")
        return sum(self.pipes[name].recv() for name in "ab") // 2

    def flood(self, target: int | None) -> dict[str, int]:
        """Flood this target from now on, and return the counts of the requests that were sent before."""
        self.pipes["flooder"].send(target)
        return self.pipes["flooder"].recv()

    def longest_turn_s(self) -> float:
        self.pipes["a"].send("turn")
        return self.pipes["a"].recv()

    def measure(self, target: int | None, seconds: float) -> Slice:
        self.flood(target)
        self.swap()  # by its end the flood has started
        self.longest_turn_s()
        began_s, num_bytes, grown = time.monotonic(), 0, 0
        while (took_s := time.monotonic() - began_s) < seconds:
            num_bytes += self.swap()
            grown = max(grown, self.memory() - self._before_bytes)
        return Slice(num_bytes / took_s / 1e6, self.longest_turn_s(), self.flood(None), took_s, grown)

    def end(self) -> None:
        for pipe in self.pipes.values():
            pipe.send("end")
        for process in self._processes:
            process.join(30)


def measure(quick: bool) -> list[Claim]:
    repeats, seconds = (3, 4.0) if quick else (12, 5.0)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        victim: list[Slice] = []
        elsewhere: list[Slice] = []
        calm = bench.measure(None, seconds)
        for _ in range(repeats):
            elsewhere.append(bench.measure(1, seconds))
            victim.append(bench.measure(0, seconds))
        bench.end()
    flooded_s = sum(part.seconds for part in victim)
    rate, rate_elsewhere = (
        sum(part.mb_a_s * part.seconds for part in parts) / sum(part.seconds for part in parts)
        for parts in (victim, elsewhere)
    )
    turn_s, share = max(part.turn_s for part in victim), rate / rate_elsewhere
    grown = max(part.grown_bytes for part in victim)
    return [
        Claim("flood", sum(part.flood.get("bytes", 0) for part in victim) / flooded_s / 1e6, "MB/s"),
        Claim("flood, requests", sum(part.flood.get("requests", 0) for part in victim) / flooded_s, "a second"),
        Claim("flood of the victim, in all", flooded_s, "s"),
        Claim("answers with a peer id of 100 kB", sum(part.flood.get("answers", 0) for part in victim), ""),
        Claim("swaps without a flood, each way", calm.mb_a_s, "MB/s"),
        Claim("swaps while another process is flooded", rate_elsewhere, "MB/s"),
        Claim("swaps while the peer is flooded", rate, "MB/s"),
        Claim("share of the rate that is kept", share, "", f">= {LEAST_SHARE}", share >= LEAST_SHARE),
        Claim("longest turn of the loop without a flood", 1e3 * calm.turn_s, "ms CPU"),
        Claim("longest turn while another is flooded", 1e3 * max(part.turn_s for part in elsewhere), "ms CPU"),
        Claim("longest turn while flooded", 1e3 * turn_s, "ms CPU", "< 50", turn_s < LONGEST_TURN_S),
        Claim("memory grows by", grown / 2**20, "MiB", "< 64", grown < MOST_GROWN_BYTES),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
