"""The interfaces of gossip: what it needs from a network and from a directory, and what it offers to both.

`net` and `swarm` implement them for real, `testing` in memory. Nothing here knows gRPC or hivemind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from noloco_p2p.gossip.frames import FetchItem, FetchWant, Frame, Hello, PeerStatus


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live peer as the directory knows it: enough to dial it and to decide whether to make it an offer."""

    peer_id: str
    address: str  # HOST:PORT of its gRPC server
    state: str = "training"
    round: int = 0
    progress: float = 0.0
    session_key: bytes = b""  # identifies its gRPC server, from its signed record
    sketch: str = ""  # of its slow weights, packed, from its record
    can_be_called: bool = True  # False: it cannot be called from here, but makes offers itself
    stage: int = 0  # in a run with stages: the one that it holds
    capacity: float = 0.0  # tokens/s that it can compute there; 0 = not measured yet


class FrameStream(Protocol):
    """One side of a bidirectional stream of frames. Raises only PeerError and its subclasses."""

    @property
    def peer(self) -> str:
        """The peer id (initiator's side) or network address (acceptor's side, before the Offer) of the other end."""
        ...

    async def send(self, frame: Frame) -> None:
        """Hand the frame to the network; waits under back-pressure. Raises Unreachable."""
        ...

    async def receive(self, timeout_s: float) -> Frame:
        """Return the next frame.

        Raises TimedOut, Unreachable when the other side is gone, and CorruptPayload when it is not a frame.
        """
        ...

    async def close(self) -> None:
        """End the stream, from either side, at any time. Never raises."""
        ...


class Transport(Protocol):
    """Calls to other peers. Every call has a deadline and raises only PeerError and its subclasses."""

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream: ...

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> PeerStatus: ...

    def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncGenerator[FetchItem]:
        """Yield the spec (one item), the manifest (one item), or chunks in the requested order; `timeout_s` is per
        item.
        """
        ...


class Service(Protocol):
    """What a peer answers. A transport's server calls it; Refused and Unreachable are sent back as messages."""

    def admit(self, hello: Hello) -> None:
        """Raises Refused when the caller may not ask anything here."""
        ...

    async def on_swap(self, stream: FrameStream) -> None: ...

    async def on_status(self, swap_id: bytes) -> PeerStatus: ...

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]: ...


class Directory(Protocol):
    """The live peers of this run, as far as this peer knows. Advisory: only a call shows whether a peer answers."""

    def live(self) -> Sequence[Candidate]:
        """Peers to draw a partner from, without this one: all of a small run, a changing sample of a large one. Never
        waits.
        """
        ...

    def num_live(self) -> int:
        """The number of live peers, including this one: an estimate if `live` is a sample. Never waits."""
        ...

    def knows(self, peer_id: str) -> bool:
        """Whether a live record of this peer was read, whether or not it is in `live` now. Never waits."""
        ...

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """Find one particular peer, also when `live` does not have it now; None when it is unknown."""
        ...
