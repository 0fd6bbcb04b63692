"""A peer in memory that has what a trainer needs beyond the needs of the outer step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.peer.peer import Peer
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm


class TrainingPeer(MemoryPeer):
    """A peer in a swarm in which the directory lists `others`. Those of its own stage answer."""

    settings: PeerSettings
    progress: Progress
    others: Sequence[Candidate] = ()
    address = "memory"
    stage: int | None = None

    def live_peers(self) -> int:
        return len(self.others)

    def restore_metrics(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.metrics, name, value)

    # stages

    def look_around(self) -> None: ...

    def members(self) -> Sequence[Candidate]:
        return self.others

    def answering(self) -> Sequence[Candidate]:
        return [other for other in self.others if other.stage == self.stage]

    def hold(self, stage: int) -> None:
        self.stage = stage


def training_peer(swarm: MemorySwarm, folder: Path, *, others: Sequence[Candidate] = (), **settings: Any) -> Peer:
    """Add a peer whose files are in `folder`. It has the same id if it is the first peer of another swarm."""
    peer = swarm.peer(f"peer {len(swarm.peers)}", run_folder=folder)
    peer.__class__ = TrainingPeer
    made = cast("TrainingPeer", peer)
    made.settings = PeerSettings(state_dir=folder, device="cpu", **settings)
    made.progress, made.others = Progress(), others
    folder.mkdir(parents=True, exist_ok=True)
    return cast("Peer", made)
