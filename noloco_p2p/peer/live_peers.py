"""Find the live peers that this one can call, and the heads among them."""

from __future__ import annotations

from collections.abc import Sequence

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.swarm.directory import SwarmDirectory
from noloco_p2p.swarm.tunnel import Tunnels

LOOK_S = 5.0  # longest wait for the record of a head


class LivePeers:
    """The live peers that this one can call. It implements `gossip.seams.Directory`.

    In a run with stages, `stage` is the stage of this peer. Once it is set, the interface returns only peers of that
    stage. `live`, `find` and `reached` must be called on the network thread, because they may open a tunnel. The other
    methods are thread-safe.
    """

    def __init__(self, directory: SwarmDirectory, tunnels: Tunnels) -> None:
        self.stage: int | None = None
        self.heads = ListedHeads(directory)
        self._directory = directory
        self._tunnels = tunnels

    def live(self) -> Sequence[Candidate]:
        return self._of_own_stage(self.reached())

    def num_live(self) -> int:
        others = self._directory.headcount().others
        if self.stage is None:
            return 1 + others
        known = self.everyone()
        return 1 + round(others * len(self._of_own_stage(known)) / max(1, len(known)))

    def knows(self, peer_id: str) -> bool:
        return self._directory.knows(peer_id)

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        found = await self._directory.find(peer_id, timeout_s=timeout_s)
        return self.reached([found])[0] if found else None

    def everyone(self) -> Sequence[Candidate]:
        """Return the live peers of all stages from their records, without waiting."""
        return self._directory.live()

    def mates(self) -> Sequence[Candidate]:
        """Return the live peers of this peer's stage, or of all stages if it does not hold one yet."""
        return self._of_own_stage(self.everyone())

    def reached(self, candidates: Sequence[Candidate] | None = None) -> Sequence[Candidate]:
        """Return the same peers, or the live peers of all stages, each with a tunnel's address if it has no other."""
        return self._tunnels.reached(self.everyone() if candidates is None else candidates)

    def _of_own_stage(self, peers: Sequence[Candidate]) -> Sequence[Candidate]:
        return peers if self.stage is None else [peer for peer in peers if peer.stage == self.stage]


class ListedHeads:
    """The peers that the directory lists as heads now. It is a container of their peer ids.

    A peer of a private run has no record here without an invitation, because the records are kept under a secret key.
    """

    def __init__(self, directory: SwarmDirectory) -> None:
        self._directory = directory

    def __contains__(self, peer_id: object) -> bool:
        record = self._directory.record_of(peer_id) if isinstance(peer_id, str) else None
        return record is not None and record.stage == 0

    async def look_for(self, peer_id: str) -> None:
        """Read the record of a peer that is not listed as a head, because this peer may not have seen it yet."""
        if peer_id not in self:
            await self._directory.look_for(peer_id, timeout_s=LOOK_S)
