"""Donors on a network in memory, which `noloco export --merge` and `noloco fork` ask in place of a live swarm."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from harness.identities import identity_of

from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.spec import Spec, TrainerSpec
from noloco_p2p.testing.memory import MemoryNetwork, MemoryTransport
from noloco_p2p.ticket import Ticket
from noloco_p2p.trainer import merge
from noloco_p2p.trainer.merge import LiveRun
from noloco_p2p.transfer.donor import SavedState, StateServer
from noloco_p2p.transfer.fetch import fetch_spec


class Donor:
    """A `Service` that serves a state and reports its progress."""

    def __init__(self, spec: Spec, candidate: Candidate, saved: SavedState | None) -> None:
        self._spec = spec
        self._candidate = candidate
        self.states = StateServer(spec)
        self.states.saved = saved

    def admit(self, hello: Hello) -> None: ...

    async def on_swap(self, stream: FrameStream) -> None: ...

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        hello = Hello("", self._spec.name, self._spec.digest())
        return PeerStatus(hello, "training", self._candidate.progress, False)

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        return self.states.serve(want)


class Crowd:
    """Donors, and what the directory reports about them."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.network = MemoryNetwork()
        self.candidates: list[Candidate] = []

    def add(self, candidate: Candidate, saved: SavedState | None) -> None:
        self.network.add(candidate.peer_id, Donor(self.spec, candidate, saved))
        self.candidates.append(candidate)

    def live(self) -> list[Candidate]:
        return self.candidates

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self.network, lambda: Hello("reader", self.spec.name, self.spec.digest()))


def use(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the commands ask this crowd, the first donor first; return a ticket for it."""

    @asynccontextmanager
    async def live_run(ticket: Ticket, **rest: Any) -> AsyncIterator[LiveRun]:
        transport = crowd.transport()
        spec = TrainerSpec.of(await fetch_spec(transport, crowd.candidates, expected_digest=ticket.spec_digest))
        yield LiveRun(spec, transport, live=crowd.live, **rest)

    monkeypatch.setattr(merge, "live_run", live_run)
    monkeypatch.setattr(merge.random, "shuffle", lambda peers: None)
    doors = ("/ip4/127.0.0.1/tcp/9/p2p/" + identity_of("reader").peer_id,)
    return Ticket(crowd.spec.name, crowd.spec.digest(), doors).encode()
