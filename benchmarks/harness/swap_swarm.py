"""A swarm of trainers with real gossip on a virtual clock. A trainer's inner step adds noise to its vector."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from noloco_p2p.gossip import service
from noloco_p2p.gossip.exchange import Committed, Exchange
from noloco_p2p.gossip.frames import Chunk, Frame, Hello
from noloco_p2p.gossip.gossip import Gossip
from noloco_p2p.gossip.seams import INTERNET, Deadlines, FrameStream, Outside
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.gossip.swap import Counts
from noloco_p2p.simulate.clock import InlineExecutor
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.links import Link, LinkProfile
from noloco_p2p.testing.memory import MemoryDirectory, MemoryNetwork, MemoryTransport, unchanged

SPEC = RunSpec(name="swarm")


def profile(mbit_s: float, delay_ms: float = 10.0) -> LinkProfile:
    return LinkProfile(f"{mbit_s} Mbit/s", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=delay_ms, jitter_ms=0.0)


class SlowStream:
    """A stream that sends each chunk just before its partner's patience ends."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream, self.peer = stream, stream.peer
        self.receive, self.close = stream.receive, stream.close

    async def send(self, frame: Frame) -> None:
        if isinstance(frame, Chunk):
            await asyncio.sleep(9.0)
        await self._stream.send(frame)


class Trainer:
    """One peer. `gained` is the sum of everything that its own inner steps added to its vector."""

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        *,
        num_elements: int,
        codec: str = "modulo",
        step_s: float = 1.0,
        at_steps: bool = False,
        noise: float = 1e-3,
        seed: int = 0,
        deadlines: Deadlines = INTERNET,
        gossip: type[Gossip] = Gossip,
    ) -> None:
        self.name = name
        self.swaps: list[Committed] = []
        self.ages: list[int] = []
        self.corrupt: list[str] = []
        self._rng = torch.Generator().manual_seed(seed)
        self.vector = torch.randn(num_elements, generator=torch.Generator().manual_seed(99))
        self.gained = torch.zeros(num_elements, dtype=torch.float64)
        self.step_s, self.noise = step_s, noise
        self._network = network
        hello = Hello(name, SPEC.name, SPEC.digest())
        self.service = PeerService(
            Outside(
                spec=SPEC.with_changes({"codec.weights": codec}),
                hello=lambda: hello,
                transport=MemoryTransport(network, lambda: hello),
                directory=MemoryDirectory(network, own_id=name),
                executor=InlineExecutor(),
                rng=random.Random(f"{name}/{seed}"),
                cpu_clock=asyncio.get_running_loop().time,
                deadlines=deadlines,
                on_corrupt=lambda peer, reason: self.corrupt.append(f"{peer}: {reason}"),
            )
        )
        self.exchange: Exchange
        self._at_steps = at_steps
        self._gossip = gossip

    @property
    def counts(self) -> Counts:
        return self.service.counts

    async def begin(self) -> None:
        with patch.object(service, "Gossip", self._gossip):
            self.exchange = await self.service.begin(len(self.vector))
        self.exchange.read = None if self._at_steps else lambda start, stop: self.vector[start:stop].clone()

    async def train(self, num_steps: int, *, noise: float | None = None, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        for _ in range(num_steps):
            await asyncio.sleep(self.step_s)
            gain = torch.randn(len(self.vector), generator=self._rng) * (self.noise if noise is None else noise)
            self.vector += gain
            self.gained += gain
            self.exchange.step_taken(asyncio.get_running_loop().time())
            self.between_steps()

    def between_steps(self) -> None:
        for swap in self.exchange.collect():
            self.swaps.append(swap)
            self.ages.append(self.exchange.step - swap.snapshot_step)
            self.exchange.applied(swap, seconds=0.0)
            self.vector[swap.start : swap.start + len(swap.halves.values)] += swap.halves.values
        self.exchange.serve(lambda start, stop: self.vector[start:stop].clone())


class Swarm:
    """Trainers with links. Use it within a running loop."""

    def __init__(self, links: Sequence[LinkProfile], *, lose: float = 0.0, seed: int = 0, **options: Any) -> None:
        self.network = MemoryNetwork(lose=lose, seed=seed)
        self.trainers = [self._trainer(number, link, seed, options) for number, link in enumerate(links)]

    def _trainer(self, number: int, link: LinkProfile, seed: int, options: dict[str, Any]) -> Trainer:
        name = f"peer-{number:03}"
        self.network.links[name] = Link.of(link, seed=number)
        mine = {key: value[number] if isinstance(value, list) else value for key, value in options.items()}
        wrap = mine.pop("wrap", unchanged)
        trainer = Trainer(name, self.network, seed=1000 * seed + number, **mine)
        self.network.add(name, trainer.service, wrap=wrap)
        return trainer

    async def run(self, num_steps: int, *, at_rest: int = 0) -> None:
        """Train, then mix for `at_rest` more steps without training, and stop."""
        for trainer in self.trainers:
            await trainer.begin()
        longest_s = num_steps * max(trainer.step_s for trainer in self.trainers)
        rng = random.Random(1)  # inner steps of different peers do not end at the same moment
        await asyncio.gather(
            *(trainer.train(round(longest_s / trainer.step_s), after_s=rng.random()) for trainer in self.trainers)
        )
        await asyncio.gather(*(trainer.train(at_rest, noise=0.0) for trainer in self.trainers))
        await self.stop()

    async def stop(self) -> None:
        """Let all swaps end, and apply what has been committed."""
        ends = asyncio.gather(*(trainer.service.hold(timeout_s=60.0) for trainer in self.trainers))
        while not ends.done():
            await asyncio.sleep(0.1)
            for trainer in self.trainers:
                trainer.between_steps()
        for trainer in self.trainers:
            await trainer.service.stop()
        await self.network.close()
        for trainer in self.trainers:
            trainer.between_steps()

    def drift(self) -> float:
        """Return by how much the mean differs from the mean of all own inner steps, relative to their size."""
        first = torch.randn(len(self.trainers[0].vector), generator=torch.Generator().manual_seed(99)).double()
        mean = torch.stack([trainer.vector.double() for trainer in self.trainers]).mean(0)
        gained = torch.stack([trainer.gained for trainer in self.trainers]).mean(0)
        return float((mean - first - gained).norm() / max(1e-30, gained.norm().item()))

    def spread(self) -> float:
        """Return the root mean square distance of an element from its mean."""
        vectors: Tensor = torch.stack([trainer.vector for trainer in self.trainers])
        return float((vectors - vectors.mean(0)).square().mean().sqrt())

    def use(self, seconds: float, mbit_s: Sequence[float]) -> list[float]:
        """Return the share of each peer's upload that payloads used."""
        return [
            trainer.counts.bytes_sent * 8 / (rate * 1e6 * seconds)
            for trainer, rate in zip(self.trainers, mbit_s, strict=True)
        ]
