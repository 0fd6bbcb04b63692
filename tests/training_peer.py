"""A peer in memory that has what a trainer needs beyond the needs of the outer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from noloco_p2p.gossip.layout import ModelLayout
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
    is_fetching = False

    @contextmanager
    def fetching(self, layout: ModelLayout, target: Path) -> Iterator[None]:
        """Act as if a state arrived while the trainer builds a model, which must have this layout."""
        self.is_fetching = True
        yield
        self.is_fetching = False
        assert self.states.layout == layout

    def live_peers(self) -> int:
        return len(self.others)

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
