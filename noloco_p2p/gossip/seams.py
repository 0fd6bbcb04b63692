"""The seams of the gossip room: what it needs from a network and from a directory, and what it offers to both.

`net` and `swarm` implement them for real, `testing` in memory. Nothing here knows gRPC or hivemind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from noloco_p2p.gossip.frames import FetchItem, FetchWant, Frame, Hello, PeerStatus


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live peer as the directory knows it: enough to dial it and to decide whether it is worth an offer."""

    peer_id: str
    address: str  # HOST:PORT of its gRPC server
    state: str = "training"
    round: int = 0
    progress: float = 0.0
    session_key: bytes = b""  # by which its gRPC server is known, from its signed record
    sketch: str = ""  # of its slow weights, packed, from its record
    can_be_called: bool = True  # False: it takes no calls from here, and makes offers itself
    stage: int = 0  # of a run with stages: the one that it holds
    capacity: float = 0.0  # tokens/s that it can compute there; 0 = not measured yet


class FrameStream(Protocol):
    """One side of a bidirectional stream of frames. Errors are PeerError and its children, nothing else."""

    @property
    def peer(self) -> str:
        """Peer id (initiator's side) or network address (acceptor's side, before the Offer) of the other end."""
        ...

    async def send(self, frame: Frame) -> None:
        """Returns when the frame is handed to the network (back-pressure applies). Raises Unreachable."""
        ...

    async def receive(self, timeout_s: float) -> Frame:
        """The next frame.

        Raises TimedOut, Unreachable when the other side is gone, CorruptPayload when it is no frame.
        """
        ...

    async def close(self) -> None:
        """End the stream, from either side, at any time. Never raises."""
        ...


class Transport(Protocol):
    """Calls to other peers. Every call has a deadline and raises PeerError and its children only."""

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream: ...

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> PeerStatus: ...

    def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncGenerator[FetchItem]:
        """The spec (one item), the manifest (one item), or chunks in the order asked; `timeout_s` is for each item."""
        ...


class Service(Protocol):
    """What a peer answers. A transport's server calls it; Refused and Unreachable go back in words."""

    def admit(self, hello: Hello) -> None:
        """Raises Refused when the caller may not ask anything here."""
        ...

    async def on_swap(self, stream: FrameStream) -> None: ...

    async def on_status(self, swap_id: bytes) -> PeerStatus: ...

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]: ...


class Directory(Protocol):
    """Who is alive in this run, as far as this peer has heard. Advisory: the truth is whether a peer answers."""

    def live(self) -> Sequence[Candidate]:
        """Peers to draw a partner from, without this one: all of a small run, ever new ones of a large. Never waits."""
        ...

    def num_live(self) -> int:
        """How many peers are alive, with this one: an estimate where `live` is a part of them. Never waits."""
        ...

    def knows(self, peer_id: str) -> bool:
        """Whether a live record of this peer was read, be it among `live` now or not. Never waits."""
        ...

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """One particular peer, also when `live` does not have it now; None when nobody knows it."""
        ...
