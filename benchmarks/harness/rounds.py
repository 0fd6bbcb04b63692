"""Run rounds of peers without a model, with vectors from a seed, one thread per peer, and the calls of the exchange."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from harness.patience import PATIENCE_S
from noloco_p2p.codec import chunk_bounds
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Outcome
from noloco_p2p.testing.peers import MemoryPeer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors that one peer swaps in a round, which are flat fp32 vectors of the same size."""

    slow_weights: Tensor
    outer_momentum: Tensor
    outer_gradient: Tensor

    @classmethod
    def random(cls, seed: int, *, num_elements: int = 100) -> Vectors:
        generator = torch.Generator().manual_seed(seed)
        return cls(*(torch.randn(num_elements, generator=generator) for _ in range(3)))

    def state(self) -> dict[SectionName, Tensor]:
        return {SectionName.SLOW_WEIGHTS: self.slow_weights, SectionName.OUTER_MOMENTUM: self.outer_momentum}

    def gradient_chunks(self) -> list[Tensor]:
        return [self.outer_gradient[start:stop] for start, stop in chunk_bounds(self.outer_gradient.numel())]


def open_round(peer: MemoryPeer, vectors: Vectors, *, round_index: int = 0, progress: float = 0.0) -> None:
    peer.exchange.open(round_index, progress=progress, state=vectors.state())


def end_round(peer: MemoryPeer, vectors: Vectors, *, wait_s: float) -> Outcome:
    peer.exchange.stage(vectors.gradient_chunks)
    return peer.exchange.collect(wait_s)


def one_round(
    peers: Sequence[MemoryPeer], vectors: Sequence[Vectors], *, wait_s: float, round_index: int = 0
) -> list[Outcome]:
    """Run one round of all peers, each in its own thread. All peers open the round before any of them ends it."""
    opened = Barrier(len(peers))

    def take(peer: MemoryPeer, own: Vectors) -> Outcome:
        open_round(peer, own, round_index=round_index)
        opened.wait(PATIENCE_S)
        return end_round(peer, own, wait_s=wait_s)

    return together(*(lambda peer=peer, own=own: take(peer, own) for peer, own in zip(peers, vectors, strict=True)))


def together(*calls: Callable[[], T]) -> list[T]:
    """Run each call in its own thread, and return the results. An exception in a call is raised again."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(PATIENCE_S) for future in [threads.submit(call) for call in calls]]


def wait_until(holds: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true. Raises TimeoutError."""
    until_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(0.001)
