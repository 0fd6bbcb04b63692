"""Admit or refuse another peer's state. A newcomer, a peer that catches up, a merge and a fork use this module."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from noloco_p2p.errors import CheckpointError, PeerError
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.outer.saved_state import read_state
from noloco_p2p.outer.weights import vectors_of
from noloco_p2p.spec import Spec

POSITIONS_ASKED = 5  # the number of peers that are asked
MIN_POSITIONS = 3  # with fewer positions, it is unclear which one is wrong
POSITION_S = 5.0  # the time that each peer has to answer


class StateAdmission:
    """A `transfer.fetch.Admission` that checks a state, and compares its position with those of the live peers.

    `live` returns the live peers in the directory. `refused` holds, by peer id, the reason why a state was refused.
    """

    def __init__(self, spec: Spec, transport: Transport, *, live: Callable[[], Sequence[Candidate]]) -> None:
        self.refused: dict[str, str] = {}
        self._spec = spec
        self._transport = transport
        self._live = live

    async def check_position(self, donor: Candidate, manifest: StateManifest) -> None:
        """Check the position that a donor claims against the records of live peers.

        If the difference is too large, ask some of these peers for their current positions, because a record can be as
        old as one heartbeat, and a short run moves far in that time.
        """
        live = self._live()
        try:
            check_position(manifest.progress, positions(live), self._spec)
        except CheckpointError:
            fresh = positions(await ask_for_positions(self._transport, live))
            if len(fresh) < MIN_POSITIONS:
                raise
            check_position(manifest.progress, fresh, self._spec)

    async def check_state(self, donor: Candidate, manifest: StateManifest, path: Path) -> None:
        """Read and check the whole file on another thread."""
        await asyncio.to_thread(read_state, path, vectors_of(self._spec.outer, manifest.num_elements))

    def refuse(self, donor: Candidate, why: str) -> None:
        self.refused[donor.peer_id] = why


def check_position(progress: float, others: Sequence[float], spec: Spec) -> None:
    """Raise CheckpointError if a position in the schedule is far from the median of the live peers, `others`."""
    if len(others) < MIN_POSITIONS:
        return
    middle = median(others)
    if not abs(progress - middle) <= 2 * spec.furthest:  # NaN is refused, too
        raise CheckpointError(
            f"the state is at {100 * progress:.1f} % of the schedule, but the swarm is at {100 * middle:.1f} %"
        )


def positions(live: Sequence[Candidate]) -> list[float]:
    """Return the progress of each peer that is training or done."""
    return [each.progress for each in live if each.state in ("training", "done")]


async def ask_for_positions(transport: Transport, live: Sequence[Candidate]) -> Sequence[Candidate]:
    """Ask a few live peers for their current position. Peers that do not answer are left out."""

    async def ask(peer: Candidate) -> Candidate | None:
        try:
            status = await transport.status(peer, timeout_s=POSITION_S)
        except PeerError:
            return None
        return replace(peer, state=status.state, progress=status.progress)

    callable_ = [peer for peer in live if peer.can_be_called]
    asked = random.sample(callable_, min(len(callable_), POSITIONS_ASKED))
    return [peer for peer in await asyncio.gather(*map(ask, asked)) if peer]
