"""Provide a peer that tries to be everybody's partner: it makes offers to all at once, and accepts every offer.

Its vector is noise. Swaps are real: partners treat it as they treat any other peer.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress

import torch
from torch import Tensor

from harness.swap_swarm import SPEC, Swarm, profile
from noloco_p2p.errors import PeerError, Unreachable
from noloco_p2p.gossip.coder import Coder
from noloco_p2p.gossip.deadlines import INTERNET
from noloco_p2p.gossip.frames import Accept, FetchItem, FetchWant, Hello, Offer, PeerStatus, Refuse, Slice, Standing
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.gossip.swap import Agreed, Ledger, Swap, Traffic
from noloco_p2p.gossip.units import Ages, Units
from noloco_p2p.simulate.clock import InlineExecutor
from noloco_p2p.simulate.network import Link, LinkTransport

NAME = "the-greedy"
NUM_CALLS = 3  # at once to each victim
PAUSE_S = 0.02  # from an answer to the next offer
NUM_ELEMENTS = 60_000
CODEC = "fp32"
STANDING = Standing(0.0, 1.0, 0.0)


class GreedyPeer:
    """A `gossip.seams.Service` that also makes offers, while `run` runs. `refusals` counts the answers by code."""

    def __init__(self, swarm: Swarm) -> None:
        self.refusals: Counter[str] = Counter()
        self._victims = [Candidate(trainer.name, trainer.name) for trainer in swarm.trainers]
        self._hello = Hello(NAME, SPEC.name, SPEC.digest())
        self._transport = LinkTransport(swarm.network, lambda: self._hello)
        self._coder = Coder(CODEC, Units(NUM_ELEMENTS))
        self._rng = random.Random(NAME)

    async def run(self) -> None:
        """Make offers until this task is cancelled."""
        async with asyncio.TaskGroup() as calls:
            for victim in self._victims:
                for _ in range(NUM_CALLS):
                    calls.create_task(self._pester(victim))

    async def _pester(self, victim: Candidate) -> None:
        while True:
            with suppress(PeerError):
                await self._offer(victim)
            await asyncio.sleep(PAUSE_S)

    async def _offer(self, victim: Candidate) -> None:
        stream = await self._transport.open_swap(victim, timeout_s=INTERNET.dial_s)
        try:
            swap_id, num_units = self._rng.randbytes(16), self._coder.units.num_units
            await stream.send(Offer(self._hello, swap_id, STANDING, b"\xff" * num_units, num_units))
            answer = await stream.receive(INTERNET.offer_s)
            if isinstance(answer, Accept):
                await self._swap(stream, swap_id, victim.peer_id, answer.part)
            elif isinstance(answer, Refuse):
                self.refusals[answer.code.name] += 1
        finally:
            await stream.close()

    async def _swap(self, stream: FrameStream, swap_id: bytes, partner: str, part: Slice) -> None:
        swap = Swap(
            Agreed(stream, swap_id, partner, progress=0.0, told_step=0, step_s=1.0, part=part),
            self._coder,
            snapshot=self._noise,
            turn=asyncio.Lock(),
            on_moving=_nothing,
            executor=InlineExecutor(),
            traffic=Traffic(),
            ledger=Ledger(),
            ask_partner=_no,
        )
        await swap.run()

    async def _noise(self, part: Slice) -> tuple[Tensor, int]:
        start, stop = self._coder.units.bounds(part)
        return torch.randn(stop - start), 0

    # its service

    def admit(self, hello: Hello) -> None:
        """Admit every peer."""

    async def on_swap(self, stream: FrameStream) -> None:
        with suppress(PeerError):
            offer = await stream.receive(INTERNET.offer_s)
            if isinstance(offer, Offer):
                part = Ages(len(offer.ages)).choose(offer.ages, 0, at_most=offer.at_most)
                assert part
                await stream.send(Accept(self._hello, STANDING, part))
                await self._swap(stream, offer.swap_id, offer.hello.peer_id, part)
        await stream.close()

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(self._hello, "training", 0.0)

    async def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise Unreachable("a liar gives nothing away", peer=NAME)
        yield


async def _nothing() -> None:
    pass


async def _no() -> bool:
    return False


async def meet_greedy(num_honest: int, num_steps: int, *, is_listed: bool) -> tuple[Swarm, GreedyPeer]:
    """Let honest peers swap among themselves and with a greedy one. `is_listed` says whether it has a live record."""
    swarm = Swarm([profile(20.0)] * num_honest, num_elements=NUM_ELEMENTS, codec=CODEC)
    greedy = GreedyPeer(swarm)
    swarm.network.links[NAME] = Link.of(profile(1000.0), seed=len(swarm.trainers))
    swarm.network.add(NAME, greedy)
    if not is_listed:
        del swarm.network.listed[NAME]
    running = asyncio.create_task(greedy.run())
    await swarm.run(num_steps)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return swarm, greedy
