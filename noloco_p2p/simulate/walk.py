"""Peers that walk through rounds without a model: the production driver and swap with short vectors, virtual time.

Training takes time and no work, so a thousand peers fit in one process. A vector changes by swaps alone (plain
averaging), which shows how fast the pairs that come about mix the swarm.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.gossip.donor import StateServer
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, SectionName
from noloco_p2p.gossip.outcome import Alone
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.round_driver import RoundDriver
from noloco_p2p.gossip.round_events import Opening
from noloco_p2p.gossip.seams import Candidate, Directory, FrameStream
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.simulate.clock import InlineExecutor, run_virtual
from noloco_p2p.simulate.network import Link, LinkNetwork, LinkTransport
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec
from noloco_p2p.swarm.buckets import Bucket, Draw, best_depth, bucket_of
from noloco_p2p.testing.link_proxy import LinkProfile
from noloco_p2p.testing.memory import MemoryDirectory

LINE = LinkProfile("line", down_mbit_s=float("inf"), up_mbit_s=float("inf"), delay_ms=20, jitter_ms=5)
NUM_ELEMENTS = 64
VIEW_S = 10.0  # how often one of two buckets is drawn anew, as in `swarm.lookout`


@dataclass(frozen=True, slots=True)
class Walk:
    """How many peers walk how far.

    speeds: one for each peer, used again from the front. is_in_step: all begin at once; else each at a random moment of
    its first round.
    """

    num_peers: int
    num_rounds: int  # of a peer of speed 1; a faster one takes more in the same time
    inner_steps: int = 10
    step_s: float = 2.0
    speeds: tuple[float, ...] = (1.0,)
    is_in_step: bool = True
    max_wait_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Walked:
    """One round of one peer."""

    peer: str
    round: int
    partner: str  # empty: alone
    partner_round: int
    num_offers: int  # of its own
    reason: str


@dataclass(frozen=True, slots=True)
class WalkResult:
    rounds: list[Walked]
    vectors: list[tuple[float, Tensor]]  # (virtual seconds, one row a peer), about once a round of speed 1

    def in_two_swaps(self) -> list[Walked]:
        """Rounds whose partner tells of a swap with somebody else in that round of its: none may be."""
        by_round = {(each.peer, each.round): each for each in self.rounds}
        pairs = ((each, by_round.get((each.partner, each.partner_round))) for each in self.rounds if each.partner)
        return [each for each, other in pairs if other and other.partner not in ("", each.peer)]


def walk(plan: Walk) -> WalkResult:
    """Run it; the same plan gives the same result."""

    async def run() -> WalkResult:
        return await _Walkers(plan).run()  # made where its clock runs

    return run_virtual(run())


class _Walkers:
    def __init__(self, plan: Walk) -> None:
        self.plan = plan
        self.network = LinkNetwork(seed=plan.seed)
        self.rounds: list[Walked] = []
        self.spec = RunSpec(
            name="walk",
            outer=OuterSpec(inner_steps=plan.inner_steps, max_wait_s=plan.max_wait_s),
            codec=CodecSpec(slow_weights="fp32", outer_gradient="fp32"),
        )
        names = [f"walker-{plan.seed}-{number}" for number in range(plan.num_peers)]
        depth = best_depth(plan.num_peers)
        self.buckets: dict[Bucket, list[Candidate]] = {}
        for name in names:
            self.buckets.setdefault(bucket_of(name, depth), []).append(Candidate(name, address=name))
        self.depth = depth
        self.walkers = [_Walker(self, number, name) for number, name in enumerate(names)]

    async def run(self) -> WalkResult:
        plan = self.plan
        round_s = plan.inner_steps * plan.step_s
        runs = [asyncio.create_task(walker.run(plan.num_rounds * round_s)) for walker in self.walkers]
        vectors = []
        for index in range(plan.num_rounds + 1):
            vectors.append((asyncio.get_running_loop().time(), torch.stack([w.vector for w in self.walkers])))
            if index < plan.num_rounds:
                await asyncio.sleep(round_s)
        await asyncio.gather(*runs)
        await asyncio.gather(*(walker.driver.stop() for walker in self.walkers))
        await self.network.close()
        return WalkResult(self.rounds, vectors)


class _Walker:
    def __init__(self, walkers: _Walkers, number: int, name: str) -> None:
        plan = walkers.plan
        self.name = name
        self.vector = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(1000 * plan.seed + number))
        self.rng = random.Random(f"walk/{plan.seed}/{name}")
        self.step_s = plan.step_s / plan.speeds[number % len(plan.speeds)]
        self.walkers = walkers
        self.pace = Pace(plan.inner_steps)
        self.hello = Hello(name, walkers.spec.name, walkers.spec.digest(), layout="walk")
        self.plans = section_plans(walkers.spec.codec, swap_momentum=False, num_elements=NUM_ELEMENTS)
        self.transport = _CountingTransport(LinkTransport(walkers.network, lambda: self.hello))
        self.driver = RoundDriver(
            hello=lambda: self.hello,
            transport=self.transport,
            directory=_directory(walkers, name),
            pace=self.pace,
            executor=InlineExecutor(),
            rng=random.Random(f"pairing/{plan.seed}/{name}"),
            clock=lambda: asyncio.get_running_loop().time(),
        )
        service = PeerService(
            driver=self.driver,
            states=StateServer(walkers.spec),
            status=lambda: (self.hello, self.driver.peer_state, 0, 0.0),
        )
        walkers.network.links[name] = Link.of(LINE, seed=number)
        walkers.network.add(name, service)

    async def run(self, seconds: float) -> None:
        """Whole rounds until the time is over."""
        loop, plan = asyncio.get_running_loop(), self.walkers.plan
        if not plan.is_in_step:
            await asyncio.sleep(self.rng.uniform(0.0, plan.inner_steps * self.step_s))
        index = 0
        while loop.time() < seconds:
            await self._round(index)
            index += 1

    async def _round(self, index: int) -> None:
        loop, plan = asyncio.get_running_loop(), self.walkers.plan
        self.transport.num_offers = 0
        self.pace.open_round(loop.time())
        state = {SectionName.SLOW_WEIGHTS: self.vector}
        self.driver.open(Opening(index, 0.0, plan.num_rounds * plan.inner_steps, plan.inner_steps, state), self.plans)
        for _ in range(plan.inner_steps):
            await asyncio.sleep(self.step_s * self.rng.uniform(0.98, 1.02))
            self.pace.step(loop.time())
            await self._late(index)
        if self.driver.reach_boundary():
            self.driver.stage(self.plans[-1].codec.encode(torch.zeros(NUM_ELEMENTS)))
        outcome = await self.driver.collect(plan.max_wait_s)
        await self._late(index + 1)
        partner, partner_round, reason = "", 0, ""
        if isinstance(outcome, Alone):
            reason = outcome.reason
        else:
            received = outcome.received
            partner, partner_round = received.partner, received.partner_round
            self.vector = self.vector + received.sections[SectionName.SLOW_WEIGHTS].half_difference(0)
        offers = self.transport.num_offers
        self.walkers.rounds.append(Walked(self.name, index, partner, partner_round, offers, reason))

    async def _late(self, index: int) -> None:
        if self.driver.take_correction(index):
            self.driver.corrected()


class _CountingTransport:
    def __init__(self, inner: LinkTransport) -> None:
        self.num_offers = 0
        self._inner = inner

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream:
        self.num_offers += 1
        return await self._inner.open_swap(candidate, timeout_s=timeout_s)

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> PeerStatus:
        return await self._inner.status(candidate, swap_id=swap_id, timeout_s=timeout_s)

    def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncGenerator[FetchItem]:
        return self._inner.fetch(candidate, want, timeout_s=timeout_s)


def _directory(walkers: _Walkers, name: str) -> Directory:
    return _Drawn(walkers, name) if walkers.depth else MemoryDirectory(walkers.network, own_id=name)


class _Drawn:
    """The buckets of a swarm in which nobody comes or goes: two at a time, one of them drawn anew every VIEW_S."""

    def __init__(self, walkers: _Walkers, own_id: str) -> None:
        self._walkers = walkers
        self._own_id = own_id
        self._rng = random.Random(f"buckets/{own_id}")
        self._draw = Draw(self._rng)
        self._due_s = [self._rng.uniform(-VIEW_S, 0.0)] * 2
        self._live: list[Candidate] = []

    def live(self) -> Sequence[Candidate]:
        now_s = asyncio.get_running_loop().time()
        while len(self._due_s) > 1 or self._due_s[0] <= now_s:  # at first two buckets are read
            self._due_s = self._due_s[1:] or [self._due_s[0] + VIEW_S]
            bucket = self._draw.next(self._walkers.depth)
            self._draw.took(bucket, [peer.peer_id for peer in self._walkers.buckets.get(bucket, [])])
            ids = sorted(self._draw.peers() - {self._own_id})
            self._live = [Candidate(peer, address=peer) for peer in ids]
        return self._live

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return Candidate(peer_id, address=peer_id)
