"""Run the rounds and swaps of real peers without a model, on a virtual clock and with short vectors.

Training takes virtual time but no computation, so a thousand peers fit in one process. Only swaps change a vector (by
plain averaging), which shows how fast the resulting pairs mix the swarm.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.gossip.exchange import LoopExchange
from noloco_p2p.gossip.frames import Chunk, FetchItem, FetchWant, Hello, PeerStatus, SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, Outcome
from noloco_p2p.gossip.round_stack import build_round_stack
from noloco_p2p.gossip.seams import Candidate, Directory, FrameStream
from noloco_p2p.outer.rounds import Rounds
from noloco_p2p.simulate.clock import InlineExecutor, run_virtual
from noloco_p2p.simulate.network import Link, LinkNetwork, LinkTransport
from noloco_p2p.simulate.peer import now_s
from noloco_p2p.spec import CodecSpec, OuterSpec, TrainerSpec, TrainSpec
from noloco_p2p.swarm.buckets import Bucket, BucketSampler, best_depth, bucket_of
from noloco_p2p.testing.faults import At, FaultPlan, Stall
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.testing.memory import MemoryDirectory, unchanged

LINE = LinkProfile("line", down_mbit_s=float("inf"), up_mbit_s=float("inf"), delay_ms=20, jitter_ms=5)
NUM_ELEMENTS = 64
STALLED = FaultPlan().fail_at(At(Chunk, section=SectionName.OUTER_GRADIENT), send=Stall())
VIEW_S = 10.0  # interval at which one of two buckets is replaced, as in `swarm.membership_view`


@dataclass(frozen=True, slots=True)
class Walk:
    """The number and speed of peers and the length of their run.

    `speeds` has one item per peer; if there are fewer items, they are repeated. If `is_in_step` is true, all peers
    start at once; otherwise, each of them waits for up to a round. If `late_parts_stall` is true, outer gradients never
    arrive, and no error is raised.
    """

    num_peers: int
    num_rounds: int  # of a peer at speed 1; a faster one takes more in the same time
    inner_steps: int = 10
    step_s: float = 2.0
    speeds: tuple[float, ...] = (1.0,)
    is_in_step: bool = True
    max_wait_s: float = 0.0
    late_parts_stall: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Walked:
    """One round of one peer."""

    peer: str
    round: int
    partner: str  # "" = a solo round
    partner_round: int
    num_offers: int  # made by this peer
    reason: str
    boundary_s: float


@dataclass(frozen=True, slots=True)
class WalkResult:
    rounds: list[Walked]
    vectors: list[tuple[float, Tensor]]  # (virtual seconds, one row per peer), once per round at speed 1

    def in_two_swaps(self) -> list[Walked]:
        """Return the rounds whose partner reports a swap with another peer for its round. There must be none."""
        by_round = {(each.peer, each.round): each for each in self.rounds}
        pairs = ((each, by_round.get((each.partner, each.partner_round))) for each in self.rounds if each.partner)
        return [each for each, other in pairs if other and other.partner not in ("", each.peer)]


def walk(plan: Walk) -> WalkResult:
    """Run the plan. The same plan gives the same result."""

    async def run() -> WalkResult:
        return await _Walkers(plan).run()  # created on the virtual loop, for its clock

    return run_virtual(run())


class _Walkers:
    def __init__(self, plan: Walk) -> None:
        self.plan = plan
        self.network = LinkNetwork(seed=plan.seed)
        self.rounds: list[Walked] = []
        self.spec = TrainerSpec(
            name="walk",
            outer=OuterSpec(inner_steps=plan.inner_steps, max_wait_s=plan.max_wait_s, swap_momentum=False),
            codec=CodecSpec(slow_weights="fp32", outer_gradient="fp32"),
            train=TrainSpec(total_steps=plan.num_rounds * plan.inner_steps, warmup_steps=0),
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
        self.hello = Hello(name, walkers.spec.name, walkers.spec.digest(), layout="walk")
        wrap = STALLED.wrapper() if plan.late_parts_stall else unchanged
        self.transport = _CountingTransport(LinkTransport(walkers.network, lambda: self.hello, wrap=wrap))
        stack = build_round_stack(
            walkers.spec,
            hello=lambda: self.hello,
            transport=self.transport,
            directory=_directory(walkers, name),
            executor=InlineExecutor(),
            rng=random.Random(f"pairing/{plan.seed}/{name}"),
            clock=now_s,
        )
        self.driver = stack.driver
        exchange = LoopExchange(walkers.spec, self.driver)
        self.rounds = Rounds(walkers.spec, exchange, self, self, follows_caller=True, clock=now_s)
        walkers.network.links[name] = Link.of(LINE, seed=number)
        walkers.network.add(name, stack.service, wrap=wrap)

    async def run(self, seconds: float) -> None:
        """Run whole rounds until the time is over."""
        plan = self.walkers.plan
        if not plan.is_in_step:
            await asyncio.sleep(self.rng.uniform(0.0, plan.inner_steps * self.step_s))
        while now_s() < seconds:
            await self._round()

    async def _round(self) -> None:
        self.transport.num_offers = 0
        self.rounds.open()
        is_at_boundary = False
        while not is_at_boundary:
            await asyncio.sleep(self.step_s * self.rng.uniform(0.98, 1.02))
            is_at_boundary = self.rounds.step_taken()
        self.rounds.reach_boundary()
        while True:
            await self.driver.wait_until_over(self.rounds.wait_left_s)
            if end := self.rounds.poll():
                break
        partner, partner_round, reason = "", 0, ""
        if isinstance(end.outcome, Alone):
            reason = end.outcome.reason
        else:
            partner, partner_round = end.outcome.received.partner, end.outcome.received.partner_round
        offers = self.transport.num_offers
        walked = Walked(self.name, end.round, partner, partner_round, offers, reason, end.boundary_s)
        self.walkers.rounds.append(walked)

    # vectors and outer step of its rounds: plain averaging

    def sections(self) -> dict[SectionName, Tensor]:
        return {SectionName.SLOW_WEIGHTS: self.vector}

    def outer_gradient(self) -> list[Tensor]:
        return [torch.zeros(NUM_ELEMENTS)]

    def step(self, outcome: Outcome, *, is_closing: bool) -> tuple[Outcome, bool]:
        if not isinstance(outcome, Alone):
            self.vector = self.vector + outcome.received.sections[SectionName.SLOW_WEIGHTS].half_difference(0)
        return outcome, False

    def correct(self, correction: Correction) -> None:
        """Do nothing, because gradients are zero."""


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
    """A directory that reads two buckets of an unchanging swarm, and replaces one of them every VIEW_S."""

    def __init__(self, walkers: _Walkers, own_id: str) -> None:
        self._walkers = walkers
        self._own_id = own_id
        self._rng = random.Random(f"buckets/{own_id}")
        self._sampler = BucketSampler(self._rng)
        self._due_s = [self._rng.uniform(-VIEW_S, 0.0)] * 2
        self._live: list[Candidate] = []

    def live(self) -> Sequence[Candidate]:
        now_s = asyncio.get_running_loop().time()
        while len(self._due_s) > 1 or self._due_s[0] <= now_s:  # read two buckets at first
            self._due_s = self._due_s[1:] or [self._due_s[0] + VIEW_S]
            bucket = self._sampler.next(self._walkers.depth)
            self._sampler.took(bucket, [peer.peer_id for peer in self._walkers.buckets.get(bucket, [])])
            ids = sorted(self._sampler.peers() - {self._own_id})
            self._live = [Candidate(peer, address=peer) for peer in ids]
        return self._live

    def num_live(self) -> int:
        return self._walkers.plan.num_peers

    def knows(self, peer_id: str) -> bool:
        return True

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return Candidate(peer_id, address=peer_id)
