"""The one way by which the state of another peer is taken: first fetch, catch-up, merge and fork all go through it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from noloco_p2p.errors import CheckpointError, PeerError
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.outer.state_checks import (
    MIN_POSITIONS,
    SLOW_WEIGHTS,
    check_position,
    check_sketches,
    read_state,
    vectors_of,
)
from noloco_p2p.spec import Spec

PLACES_ASKED = 5  # peers that are asked where they stand
PLACE_S = 5.0  # for the answer


class StateAdmission:
    """A `transfer.fetch.Admission` that compares a state with what the live peers of the run tell of theirs.

    live: the peers that the directory knows now. refused: of each peer whose state was not taken, why.
    """

    def __init__(self, spec: Spec, transport: Transport, *, live: Callable[[], Sequence[Candidate]]) -> None:
        self.refused: dict[str, str] = {}
        self._spec = spec
        self._transport = transport
        self._live = live

    async def check_position(self, donor: Candidate, manifest: StateManifest) -> None:
        """Records are up to a heartbeat old, which can be more short rounds than a state may be away from the swarm: a
        position that does not fit them is compared with what some peers say when they are asked."""
        live = self._live()
        try:
            check_position(manifest.round, manifest.progress, positions(live), self._spec)
        except CheckpointError:
            fresh = positions(await ask_for_positions(self._transport, live))
            if len(fresh) < MIN_POSITIONS:
                raise
            check_position(manifest.round, manifest.progress, fresh, self._spec)

    async def check_state(self, donor: Candidate, manifest: StateManifest, path: Path) -> None:
        """Reads the whole file, off the event loop."""
        published = [each.sketch for each in self._live() if each.sketch and each.peer_id != donor.peer_id]
        await asyncio.to_thread(self._check_state, manifest, path, published)

    def refuse(self, donor: Candidate, why: str) -> None:
        self.refused[donor.peer_id] = why

    def _check_state(self, manifest: StateManifest, path: Path, published: Sequence[str]) -> None:
        tensors = read_state(path, vectors_of(self._spec.outer, manifest.num_elements))
        check_sketches(tensors[SLOW_WEIGHTS], published, progress=manifest.progress, spec=self._spec)


def positions(live: Sequence[Candidate]) -> list[tuple[int, float]]:
    """Round and progress of those who stand where the swarm does."""
    return [(each.round, each.progress) for each in live if each.state in ("training", "done")]


async def ask_for_positions(transport: Transport, live: Sequence[Candidate]) -> Sequence[Candidate]:
    """A few of the live peers, as they are now; those who do not answer are left out."""

    async def ask(peer: Candidate) -> Candidate | None:
        try:
            status = await transport.status(peer, timeout_s=PLACE_S)
        except PeerError:
            return None
        return replace(peer, state=status.state, round=status.round, progress=status.progress)

    callable_ = [peer for peer in live if peer.can_be_called]
    asked = random.sample(callable_, min(len(callable_), PLACES_ASKED))
    return [peer for peer in await asyncio.gather(*map(ask, asked)) if peer]
