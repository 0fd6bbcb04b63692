"""Measure holes between peers behind every kind of router: which pairs meet, how fast, and the cost of a swap.

    python benchmarks/punching.py [--quick] [--json FILE]

Routers are emulated between network namespaces (netlab.py, harness/nat.py). The round trip between any two peers is 50
ms. A kind of router is MAPPING/FILTERING of RFC 4787. The mapping says on which part of the partner's address the outer
port depends, and the filtering says which part of a sender's address the router must know to let a packet in. Routers
never preserve the inner port, drop packets silently, and do not hairpin.

The table compares all pairs of kinds; the row is the side that calls. Every attempt does what a real call does: each
side asks the relay for its own outer address, they exchange the addresses through the relay (with a round trip of 100
ms), and connect. The time ends when the caller has the connection. A dash stands for a pair for which no attempt made a
hole; calls between such peers go through the relay.

The swaps run the production code over lines of 20 and 100 Mbit/s, with the p2pd, the tunnels and the relay of real
peers. Direct swaps, swaps through a hole and swaps through the relay take turns; the relay has the same kind of line.
Each way has its own two peers, because a peer remembers how many connections helped. All peers are behind emulated
routers. The routers of the direct way forward their ports, so that the packets of a hole and of a direct swap take the
same path. The ratio is the median of the ratios of successive swaps, because the machine is shared and its two cores
are the limit at 100 Mbit/s. Bytes are those that the relay forwards for a swap. This needs root (see netlab.py).
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from claims import Claim, run
from harness.holes import Homes
from harness.nat import Router, outer_address
from netlab import LabError, NetLab, enter, home
from pair import PATIENCE_S, BarePeer, whole_swaps

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.net.session import Session
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.relay import Relay, Reservations
from noloco_p2p.swarm.tunnel import Tunnels
from noloco_p2p.tcp import Mirror

ROUND_TRIP_MS = 50
KINDS = (
    "endpoint/endpoint",
    "endpoint/address",
    "endpoint/port",
    "address/address",
    "address/port",
    "port/port",
)
CARRIER, BEHIND_IT = Router("endpoint", "endpoint"), "endpoint/port, carrier"  # RFC 6888 asks carriers for this one
SPEC = whole_swaps("punching")


def router(kind: str, behind: int | None = None) -> Router:
    mapping, _, filtering = kind.partition("/")
    return Router(mapping, filtering, behind)  # pyright: ignore[reportArgumentType] - one of the three words


def must_work(one: str, other: str) -> bool:
    """Return whether a hole is required: both sides map by endpoint, or one side maps and filters by endpoint."""
    return all(kind.startswith("endpoint") for kind in (one, other)) or "endpoint/endpoint" in (one, other)


def table(attempts: int) -> list[Claim]:
    kinds = [*KINDS, BEHIND_IT]
    carriers = [CARRIER, CARRIER]
    routers = carriers + [router(kind) for kind in KINDS for _ in "ab"]
    routers += [router("endpoint/port", behind=0), router("endpoint/port", behind=1), router("endpoint/port", behind=0)]
    behind = list(range(2, len(routers)))  # a node for each router but the carriers: two for each kind
    behind += [2 + 2 * KINDS.index("endpoint/port"), 2 + 2 * KINDS.index("port/port")]  # a second one in two homes
    claims, rows = [], []
    with Homes(home(rate_mbit_s=0, round_trip_ms=ROUND_TRIP_MS), routers, behind) as homes:
        for row, one in enumerate(kinds):
            cells = []
            for column, other in enumerate(kinds):
                claim = _claim(homes, f"{one} calls {other}", 1 + 2 * row, 2 + 2 * column, attempts)
                claims.append(_must(claim) if must_work(_plain(one), _plain(other)) else claim)
                cells.append(claim.value)
            rows.append(cells)
        for number, kind in enumerate(("endpoint/port", "port/port"), len(behind) - 1):
            what = f"two behind one {kind} router"
            claims.append(_must(_claim(homes, what, 1 + 2 * KINDS.index(kind), number, attempts)))
        claims.append(
            _claim(homes, "two homes of one carrier", 1 + 2 * kinds.index(BEHIND_IT), len(behind) - 2, attempts)
        )
    _show(kinds, rows)
    return claims


def _plain(kind: str) -> str:
    return kind.partition(",")[0]


def _claim(homes: Homes, what: str, caller: int, called: int, attempts: int) -> Claim:
    """The median of the milliseconds; 0 when no attempt came to a hole."""
    met = [homes.meet(caller, called) for _ in range(attempts)]
    found = [1e3 * each.seconds for each in met if each]
    return Claim(f"{what}: {len(found)} holes in {attempts}", median(found) if found else 0.0, "ms")


def _must(claim: Claim) -> Claim:
    _, _, count = claim.claim.rpartition(": ")
    made, _, attempts = count.partition(" holes in ")
    return Claim(claim.claim, claim.value, claim.unit, "a hole each time", made == attempts)


def _show(kinds: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    width = max(map(len, kinds))
    print(f"{'calls, ms':>{width}}  " + "  ".join(kinds))
    for kind, cells in zip(kinds, rows, strict=True):
        shown = [f"{cell:.0f}" if cell else "-" for cell in cells]
        print(f"{kind:>{width}}  " + "  ".join(text.rjust(len(each)) for text, each in zip(shown, kinds, strict=True)))


# swaps


def middle(pipe: Connection, namespace: str, address: str) -> None:
    """Run a bootstrap. It sends its multiaddrs, and on each request the number of bytes that it has forwarded."""

    async def serve() -> None:
        with tempfile.TemporaryDirectory() as folder:
            node = await _node(Path(folder) / "key", address)
            relay = Relay(node)
            await relay.start()
            mirror = Mirror()
            relay.mirror_port = await mirror.start(address, 0)
            pipe.send(node.multiaddrs())
            while await asyncio.to_thread(pipe.recv):
                pipe.send(relay.passed_bytes)
            await node.stop()

    enter(namespace)
    asyncio.run(serve())


class Swapper(BarePeer):
    """A peer with its own p2pd. Its `tunnels` reach the other peer, whose multiaddrs are `ways`."""

    def __init__(self, name: str, address: str, num_elements: int, folder: Path) -> None:
        self.key = folder / "key"
        self.ways: dict[str, Sequence[str]] = {}
        session = Session(Identity.load_or_create(self.key))
        super().__init__(name, SPEC, host=address, session=session)
        self.begin(num_elements)
        self.address = address
        self.peer_id = session.identity.peer_id

    async def enter(self, doors: Sequence[str]) -> list[str]:
        """Wait until the relay holds a reservation, and return the multiaddrs through which this peer can be called."""
        self.node = await _node(self.key, self.address)
        relay = doors[0].rpartition("/")[2]
        self.reservations = Reservations(self.node, doors=lambda: {relay: doors}, wanted=lambda: True)
        self.tunnels = Tunnels(
            self.node,
            multiaddrs=lambda: self.ways,
            wanted=lambda: True,
            relays=self.reservations.relays,
        )
        await self.tunnels.start(self.server.take)
        self.keeping = asyncio.create_task(self.reservations.run())
        async with asyncio.timeout(PATIENCE_S):
            while not self.reservations.circuits():  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.05)
        return self.reservations.circuits()


async def _node(key: Path, address: str) -> SwarmNode:
    return await SwarmNode(
        key, Identity.load_or_create(key).peer_id, ListenOn(address), guard=DialGuard(only_public=True)
    ).start()


def side(
    name: str,
    pipe: Connection,
    namespace: str,
    address: str,
    outside: str,
    doors: Sequence[str],
    num_elements: int,
) -> None:
    """Swap by "hole", "relay" or "direct", as requested, and send (seconds, payload bytes, way that was taken).

    `outside` is the host at which others call this side, if they can.
    """
    enter(namespace)
    with tempfile.TemporaryDirectory() as folder:
        peer = Swapper(name, address, num_elements, Path(folder))
        assert peer.session is not None
        ways = peer.on_loop(peer.enter(doors)) if doors else []
        pipe.send((peer.peer_id, peer.session.key, f"{outside}:{peer.server.port}", ways))
        peer_id, key, other_address, peer.ways[""] = pipe.recv()
        peer.ways = {peer_id: peer.ways[""]}
        while way := pipe.recv():
            if name == "a":
                peer.directory.others = [Candidate(peer_id, other_address, session_key=key)]
            if name == "a" and doors:
                closed = [Candidate(peer_id, "", session_key=key, can_be_called=False)]
                peer.tunnels._no_hole_before_s[peer_id] = math.inf if way == "relay" else 0.0
                peer.directory.others = peer.on_loop(_reached(peer, closed))
            began_s = time.monotonic()
            num_bytes = peer.swap()
            seconds = time.monotonic() - began_s
            took = str(peer.tunnels.last_ways.get(peer_id, "")) if doors else "direct"
            pipe.send((seconds, num_bytes, took))


async def _reached(peer: Swapper, candidates: Sequence[Candidate]) -> list[Candidate]:
    return list(peer.tunnels.reached(candidates))


class Pair:
    """Two sides in their own processes, each of which has the other's address."""

    def __init__(self, nodes: Sequence[Any], outside: Sequence[str], doors: Sequence[str], num_elements: int) -> None:
        context = get_context("spawn")
        self._pipes: list[Any] = []
        for name, node, address in zip("ab", nodes, outside, strict=True):
            pipe, theirs = context.Pipe()
            arguments = (name, theirs, node.namespace, node.address, address, doors, num_elements)
            context.Process(target=side, args=arguments, daemon=True).start()
            self._pipes.append(pipe)
        told = [pipe.recv() for pipe in self._pipes]
        for pipe, other in zip(self._pipes, reversed(told), strict=True):
            pipe.send(other)

    def swap(self, way: str) -> float:
        """Swap once, and return the Mbit/s in each direction."""
        for pipe in self._pipes:
            pipe.send(way)
        (a_s, a_bytes, took), (b_s, b_bytes, _) = (pipe.recv() for pipe in self._pipes)
        assert took == {"hole": "punched", "relay": "relayed", "direct": "direct"}[way], took
        return (a_bytes + b_bytes) / 2 * 8e-6 / max(a_s, b_s)


def swaps(rate_mbit_s: float, num_elements: int, repeats: int) -> list[Claim]:
    name = f"{rate_mbit_s:g} Mbit/s"
    line = home(rate_mbit_s=rate_mbit_s, round_trip_ms=ROUND_TRIP_MS)
    ways = ("hole", "relay", "direct")
    routers = [router("endpoint/port") for _ in range(4)]
    routers += [Router("endpoint", "port", forwards_to=node) for node in (5, 6)]
    outside = [outer_address(number, each) for number, each in enumerate(routers)]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    passed: dict[str, list[float]] = {"hole": [], "relay": []}
    with NetLab([line] * 7, routers=routers, behind=[None, *range(6)]) as lab:
        context = get_context("spawn")
        relay, theirs = context.Pipe()
        node = lab.nodes[0]
        context.Process(target=middle, args=(theirs, node.namespace, node.address), daemon=True).start()
        doors = relay.recv()
        pairs = {
            way: Pair(lab.nodes[first : first + 2], outside[first - 1 :][:2], doors if first < 5 else (), num_elements)
            for way, first in zip(ways, (1, 3, 5), strict=True)
        }

        def passed_on() -> int:
            relay.send("bytes")
            return relay.recv()

        for _ in range(repeats):
            rates["direct"].append(pairs["direct"].swap("direct"))
            for way in ("hole", "relay"):
                before = passed_on()
                rates[way].append(pairs[way].swap(way))
                passed[way].append(passed_on() - before)
    ratio = median(hole / direct for hole, direct in zip(rates["hole"], rates["direct"], strict=True))
    return [
        *(Claim(f"{name}: swap, {way}", median(found), "Mbit/s") for way, found in rates.items()),
        Claim(f"{name}: swap by a hole / direct one", ratio, "ratio", ">= 0.95", ratio >= 0.95),
        *(Claim(f"{name}: the relay passed on, {way}", median(found), "bytes") for way, found in passed.items()),
    ]


def measure(quick: bool) -> list[Claim]:
    if quick:
        return table(1) + swaps(20, 6_000_000, 1)
    return table(3) + swaps(20, 12_000_000, 3) + swaps(100, 25_000_000, 3)


if __name__ == "__main__":
    try:
        run(measure, doc=__doc__)
    except LabError as failure:
        sys.exit(f"punching: {failure}")
