"""Provide a peer that tries to be everybody's partner: it makes offers to all at once, on many calls, with false times.

It also accepts every offer. A `Liar` makes its vectors. Swaps are real: partners treat it as they treat any other peer.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.rounds import Vectors, one_round
from noloco_p2p.codec import chunk_bounds
from noloco_p2p.codec.modulo import Bounds
from noloco_p2p.errors import PeerError, Unreachable
from noloco_p2p.gossip.deadlines import INTERNET, Deadlines
from noloco_p2p.gossip.frames import (
    Accept,
    Boundary,
    FetchItem,
    FetchWant,
    Hello,
    Offer,
    Part,
    PeerStatus,
    SectionName,
    SwapState,
)
from noloco_p2p.gossip.outcome import Alone, Traffic
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.pipeline import Staged
from noloco_p2p.gossip.seams import Candidate, FrameStream, Transport
from noloco_p2p.gossip.sections import SectionPlan, section_plans
from noloco_p2p.gossip.swap import Swap
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemoryPeer

NAME = "the-greedy"


class Liar(Protocol):
    """Makes the boundary and the vectors that are sent to a partner."""

    def boundary(self, partner: str) -> Boundary: ...

    def vectors(self, partner: str) -> dict[SectionName, Tensor]:
        """Return the flat fp32 vectors of the early part."""
        ...

    def gradient(self, partner: str) -> Tensor | None:
        """Return the vector of the late part, or None if it is not available yet. In that case, call this again."""
        ...


class GreedyPeer:
    """A `gossip.seams.Service` that also makes offers, while `run` runs.

    `victims` are the peers that get offers, and `plans` are the sections of a swap. `num_calls` is the number of
    concurrent calls to each victim. `pause_s` is the time from an answer to the next offer of the same call. `swaps`
    counts the committed early parts for each partner.
    """

    def __init__(
        self,
        liar: Liar,
        *,
        hello: Hello,
        transport: Transport,
        victims: Callable[[], Sequence[Candidate]],
        plans: Callable[[], tuple[SectionPlan, ...]],
        executor: Executor,
        num_calls: int = 3,
        pause_s: float = 0.5,
        deadlines: Deadlines = INTERNET,
    ) -> None:
        self.swaps: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()  # of its offers, by code
        self._liar = liar
        self._hello = hello
        self._transport = transport
        self._victims = victims
        self._plans = plans
        self._executor = executor
        self._num_calls = num_calls
        self._pause_s = pause_s
        self._deadlines = deadlines
        self._memory = PayloadMemory()
        self._rng = random.Random(hello.peer_id)
        self._bounds: dict[tuple[str, SectionName], Bounds] = {}

    async def run(self) -> None:
        """Make offers until this task is cancelled."""
        calls: dict[tuple[str, int], asyncio.Task[None]] = {}
        try:
            while True:
                for victim in self._victims():
                    for number in range(self._num_calls):
                        call = calls.get((victim.peer_id, number))
                        if call is None or call.done():
                            calls[victim.peer_id, number] = asyncio.create_task(self._offer(victim))
                await asyncio.sleep(self._pause_s)
        finally:
            for call in calls.values():
                call.cancel()
            await asyncio.gather(*calls.values(), return_exceptions=True)

    async def _offer(self, victim: Candidate) -> None:
        with suppress(PeerError):
            stream = await self._transport.open_swap(victim, timeout_s=self._deadlines.dial_s)
            try:
                swap_id = self._rng.randbytes(16)
                await stream.send(Offer(self._hello, swap_id, self._liar.boundary(victim.peer_id)))
                answer = await stream.receive(self._deadlines.offer_s)
                if isinstance(answer, Accept):
                    await self._swap(stream, swap_id, victim.peer_id)
                else:
                    self.refusals[getattr(getattr(answer, "code", None), "name", "")] += 1
            finally:
                await stream.close()

    async def _swap(self, stream: FrameStream, swap_id: bytes, partner: str) -> None:
        plans, staged = self._plans(), Staged()
        state = self._liar.vectors(partner)
        swap = Swap(
            stream,
            swap_id=swap_id,
            partner=partner,
            plans=plans,
            early_state=state,
            bounds={plan.name: self._bounds_of(partner, plan) for plan in plans if plan.modulo},
            staged=staged,
            executor=self._executor,
            memory=self._memory,
            traffic=Traffic(),
            on_commit=self._committed,
            ask_partner=self._ask_nobody,
            deadlines=self._deadlines,
        )
        staging = asyncio.create_task(self._stage(partner, plans[-1], staged))
        try:
            await swap.run()
        finally:
            staging.cancel()
            await asyncio.gather(staging, return_exceptions=True)

    def _bounds_of(self, partner: str, plan: SectionPlan) -> Bounds:
        assert plan.modulo
        return self._bounds.setdefault((partner, plan.name), Bounds(plan.num_elements))

    async def _stage(self, partner: str, plan: SectionPlan, staged: Staged) -> None:
        """Stage the gradient once the liar has it. plan: of the last section."""
        if plan.part is not Part.LATE:
            return
        while (gradient := self._liar.gradient(partner)) is None:  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(self._pause_s)
        slab = self._memory.take(plan.num_bytes)
        for start, stop in chunk_bounds(plan.num_elements):
            staged.put(slab.code(plan.codec, gradient[start:stop]))

    def _committed(self, swap: Swap, part: Part) -> None:
        self.swaps[swap.partner] += part is Part.EARLY

    async def _ask_nobody(self, partner: str, swap_id: bytes) -> SwapState:
        return SwapState()

    # its service

    def admit(self, hello: Hello) -> None:
        """Admit every peer."""

    async def on_swap(self, stream: FrameStream) -> None:
        with suppress(PeerError):
            try:
                offer = await stream.receive(self._deadlines.offer_s)
                if isinstance(offer, Offer):
                    partner = offer.hello.peer_id
                    await stream.send(Accept(self._hello, self._liar.boundary(partner)))
                    await self._swap(stream, offer.swap_id, partner)
            finally:
                await stream.close()

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(self._hello, "training", 0, 0.0)

    async def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise Unreachable("a liar gives nothing away", peer=self._hello.peer_id)
        yield


# among real peers


class Noise:
    """A `Liar` that sends random vectors and no times, and claims a position in the run that suits every partner."""

    def __init__(self, lie: Vectors) -> None:
        self._lie = lie

    def boundary(self, partner: str) -> Boundary:
        return Boundary(0, None, None, 0.0)

    def vectors(self, partner: str) -> dict[SectionName, Tensor]:
        return self._lie.state()

    def gradient(self, partner: str) -> Tensor:
        return self._lie.outer_gradient


class GreedyNode:
    """A `GreedyPeer` over gRPC among the peers of `swarm`. Each of its calls has its own connection.

    `is_listed` says whether it has a live record in the directory.
    """

    def __init__(self, swarm: LoopbackSwarm, spec: RunSpec, *, is_listed: bool, pause_s: float = 0.02) -> None:
        self._swarm = swarm
        self._is_listed = is_listed
        lie = Vectors.random(666)
        hello = Hello(NAME, spec.name, spec.digest())
        self._executor = ThreadPoolExecutor(1)
        self.peer = GreedyPeer(
            Noise(lie),
            hello=hello,
            transport=GrpcTransport(lambda: hello),
            victims=lambda: [Candidate(peer.peer_id, swarm.addresses[peer.peer_id]) for peer in swarm.peers],
            plans=lambda: section_plans(spec.codec, swap_momentum=True, num_elements=lie.slow_weights.numel()),
            executor=self._executor,
            pause_s=pause_s,
        )

    async def _start(self) -> tuple[GrpcServer, asyncio.Task[None]]:
        server = GrpcServer(self.peer)
        await server.start("127.0.0.1", 0)
        if self._is_listed:
            self._swarm.addresses[NAME] = f"127.0.0.1:{server.port}"
        return server, asyncio.create_task(self.peer.run())

    async def _stop(self, server: GrpcServer, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0.0)

    def __enter__(self) -> GreedyPeer:
        self._running = asyncio.run_coroutine_threadsafe(self._start(), self._swarm.loop).result(PATIENCE_S)
        return self.peer

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(*self._running), self._swarm.loop).result(PATIENCE_S)
        self._executor.shutdown()


def count_swaps(peers: list[MemoryPeer], num_rounds: int, *, wait_s: float) -> Iterator[tuple[int, int]]:
    """Yield (number of swaps of all `peers`, number of those with a `GreedyNode`) after each round, since the start."""
    swaps = bad = 0
    vectors = [Vectors.random(seed) for seed in range(len(peers))]
    for index in range(num_rounds):
        for outcome in one_round(peers, vectors, wait_s=wait_s, round_index=index):
            if not isinstance(outcome, Alone):
                swaps += 1
                bad += outcome.received.partner == NAME
        yield swaps, bad
