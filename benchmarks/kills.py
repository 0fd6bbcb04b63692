"""Check that a swap in which a connection breaks, a peer is killed or a bit flips is applied by both peers or by none.

    python benchmarks/kills.py [--quick] [--json FILE]

Two peers with the codec of `noloco init` swap with the code of real peers: on a virtual clock, and over gRPC in one
process. At a random frame of a random kind, before or after it is sent, the connection breaks, or one peer is killed:
its streams break, its tasks are cancelled, and nobody can ask it anything. Swaps that both peers have applied must have
opposite half-differences, bit for bit. After a broken connection, no swap may have been applied by one peer only. After
a kill, the survivor may have applied one that its partner had verified (it had sent Ready) and did not live to commit.
The dead peer may have committed one of which the survivor does not know; its process is gone with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from claims import Claim, run
from harness.loopback import LoopbackSwarm
from harness.swap_swarm import Swarm, profile
from harness.swapping import Swapping, apply_until, random_vector

from noloco_p2p.gossip.exchange import Committed
from noloco_p2p.gossip.frames import Accept, Chunk, Frame, Grid, Header, Offer, Ready, Received
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.faults import Faults, flip_bit

KINDS: tuple[type[Frame], ...] = (Offer, Accept, Grid, Header, Chunk, Received, Ready)
MOST_NTH = 8
NUM_ELEMENTS = 30_000  # eight units, so slices have several chunks, and two swaps may run at a time
LINKS = [profile(100.0, delay_ms=50.0)] * 2
NUM_STEPS = 12
SPEC = RunSpec(name="kills")
FULL = {"kills": 600, "grpc": 50, "flips": 300}
QUICK = {"kills": 40, "grpc": 6, "flips": 20}


class Fault:
    """A random fault of the second peer. `kill` is called on the loop of the peers if it is killed."""

    def __init__(self, rng: random.Random, *, is_kill: bool) -> None:
        is_after = is_kill and rng.random() < 0.5
        self.kill: Callable[[], Awaitable[Any]] | None = None
        self.is_kill = is_kill
        self.verified: Mapping[bytes, bool] = {}  # of the dead peer
        self.faults = Faults(
            rng.choice(KINDS),
            (lambda frame: frame) if is_after else "cut",
            nth=rng.randrange(1, MOST_NTH + 1),
            on_fault=self._strike,
        )
        self._tasks: list[asyncio.Future[Any]] = []

    def _strike(self) -> None:
        if self.is_kill and self.kill:
            self._tasks.append(asyncio.ensure_future(self.kill()))


def judge(fault: Fault, survivor: Sequence[Committed], other: Sequence[Committed]) -> str:
    """Return in one word what has become of the swaps. Raises AssertionError if one was applied in part."""
    ours, theirs = ({swap.swap_id: swap.halves.values for swap in swaps} for swaps in (survivor, other))
    for swap_id in ours.keys() & theirs.keys():
        assert torch.equal(ours[swap_id], -theirs[swap_id]), "the half-differences are not opposite"
    alone, lost = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    if not fault.faults.fired:
        return "no such frame"
    if not alone and not lost:
        return "both or none"
    allowed = fault.is_kill and alone <= fault.verified.keys()
    return f"{'dead' if lost else 'survivor'} only" if allowed else "wrong"


def in_virtual_time(fault: Fault) -> str:
    async def main() -> str:
        swarm = Swarm(LINKS, num_elements=NUM_ELEMENTS, wrap=[lambda stream: stream, fault.faults])
        survivor, other = swarm.trainers

        async def kill() -> None:
            assert other.service.gossip
            fault.verified = other.service.gossip._shared.verified
            swarm.network.vanish(other.name)
            await other.service.stop()

        fault.kill = kill
        asyncio.get_running_loop().call_later(4.0, setattr, other, "noise", 0.1)  # chunks need several passes
        await swarm.run(NUM_STEPS)
        return judge(fault, survivor.swaps, other.swaps)

    return run_virtual(main())


def over_grpc(fault: Fault) -> str:
    with LoopbackSwarm(SPEC) as swarm:
        peers = [swarm.peer("a"), swarm.peer("b", wrap=fault.faults)]
        server = swarm.servers["b"]

        async def kill() -> None:
            assert peers[1].service.gossip
            fault.verified = peers[1].service.gossip._shared.verified
            await asyncio.gather(server.stop(0.0), peers[1].service.stop())

        fault.kill = kill
        both = [Swapping(peer, random_vector(seed, NUM_ELEMENTS)) for seed, peer in enumerate(peers)]
        apply_until(lambda: fault.faults.fired or len(both[0].swaps) > 4 * MOST_NTH, both)
        for peer in both:
            peer.settle()
        return judge(fault, both[0].swaps, both[1].swaps)


def is_found(rng: random.Random) -> bool:
    """Return whether both peers have applied the same swaps, and the receiver of a wrong bit has noticed it."""

    async def main() -> bool:
        flip = flip_bit(rng.randrange(1 << 15))
        faults = Faults(Chunk, flip, nth=rng.randrange(1, 12))
        swarm = Swarm(LINKS, num_elements=NUM_ELEMENTS, wrap=[lambda stream: stream, faults])
        await swarm.run(NUM_STEPS)
        receiver, sender = swarm.trainers
        same = {swap.swap_id for swap in receiver.swaps} == {swap.swap_id for swap in sender.swaps}
        return bool(faults.fired) and same and len(receiver.corrupt) == 1 and not sender.corrupt

    return run_virtual(main())


def measure(quick: bool) -> list[Claim]:
    logging.getLogger("noloco_p2p").setLevel(logging.CRITICAL)
    num, rng, claims = QUICK if quick else FULL, random.Random(7), list[Claim]()
    for where, swap, total in (("virtual clock", in_virtual_time, num["kills"]), ("gRPC", over_grpc, num["grpc"])):
        for what, is_kill in (("broken connections", False), ("kills", True)):
            ends: Counter[str] = Counter()
            while ends.total() - ends["no such frame"] < total // 2:
                ends[swap(Fault(rng, is_kill=is_kill))] += 1
            bad = ends.pop("wrong", 0)
            ends.pop("no such frame", 0)
            for end, count in sorted(ends.items()):
                claims.append(Claim(f"{where}, {what}: {end}", count, f"of {total // 2}"))
            claims.append(Claim(f"{where}, {what}: wrong", bad, f"of {total // 2}", "0", not bad))
    found = sum(is_found(rng) for _ in range(num["flips"]))
    return [*claims, Claim("wrong bits: noticed", found, f"of {num['flips']}", "all", found == num["flips"])]


if __name__ == "__main__":
    run(measure, doc=__doc__)
