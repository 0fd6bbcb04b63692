"""Let the peers of a MemorySwarm swap flat vectors without a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from harness.patience import PATIENCE_S
from noloco_p2p.gossip.exchange import Committed, Exchange
from noloco_p2p.gossip.swap import Counts
from noloco_p2p.testing.peers import MemoryPeer

T = TypeVar("T")


def random_vector(seed: int, num_elements: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


class Swapping:
    """A peer that swaps `vector`, without inner steps. `swaps` are those that have been applied."""

    def __init__(self, peer: MemoryPeer, vector: Tensor) -> None:
        self.peer = peer
        self.vector = vector
        self.swaps: list[Committed] = []
        self._changing = Lock()
        self.exchange = peer._swarm.call(self._begin())  # private, because no swap may begin before `read` is set

    async def _begin(self) -> Exchange:
        exchange = await self.peer.service.begin(self.vector.numel())
        exchange.read = self._read
        return exchange

    @property
    def counts(self) -> Counts:
        return self.peer.service.counts

    def _read(self, start: int, stop: int) -> Tensor:
        with self._changing:
            return self.vector[start:stop].clone()

    def apply(self) -> None:
        """Apply the swaps that have arrived."""
        with self._changing:
            for swap in self.exchange.collect():
                half = swap.halves.values
                self.vector[swap.start : swap.start + half.numel()] += half
                self.exchange.applied(swap, seconds=0.0)
                self.swaps.append(swap)

    def settle(self) -> None:
        """Let the running swaps end, begin none, and apply the last ones."""
        self.peer.hold_swaps()
        self.apply()


def swap_all(peers: Sequence[Swapping]) -> list[Committed]:
    """Let peers with `outer.wait` swap their whole vectors once. Returns the swaps, which are not applied."""

    def settled(peer: Swapping) -> list[Committed]:
        peer.exchange.wait_until_settled(PATIENCE_S)
        swaps = peer.exchange.collect()
        for swap in swaps:
            peer.exchange.applied(swap, seconds=0.0)
        return swaps

    return [swap for swaps in together(*(lambda peer=peer: settled(peer) for peer in peers)) for swap in swaps]


def apply_until(holds: Callable[[], object], peers: Sequence[Swapping]) -> None:
    """Apply what arrives until `holds()` is true."""

    def applied() -> object:
        for peer in peers:
            peer.apply()
        return holds()

    wait_until(applied)


def together(*calls: Callable[[], T]) -> list[T]:
    """Run each call in its own thread, and return the results. An exception in a call is raised again."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(PATIENCE_S) for future in [threads.submit(call) for call in calls]]


def wait_until(holds: Callable[[], object], *, timeout_s: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true. Raises TimeoutError."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(0.001)
