"""These interfaces connect gossip with the network and the directory.

`net` and `swarm` implement them for real networks, and `testing` implements them in memory. Nothing in this package
depends on gRPC or hivemind.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from noloco_p2p.gossip.frames import FetchItem, FetchWant, Frame, Hello, PeerStatus
from noloco_p2p.spec import Spec


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live peer as listed in the directory, with everything that is needed to dial it and to send it an offer."""

    peer_id: str
    address: str  # HOST:PORT of its gRPC server
    state: str = "training"
    progress: float = 0.0
    session_key: bytes = b""  # identifies its gRPC server, from its signed record
    can_be_called: bool = True  # False if this peer cannot call the candidate, which can still make offers
    stage: int = 0  # its stage, in a run with stages
    capacity: float = 0.0  # tokens/s that its stage can process; 0 = not measured yet
    loss: float | None = None  # its mean training loss, according to itself
    name: str = ""  # chosen by itself
    nearby: str = ""  # HOST:PORT on the local network, which is tried first, if it seems to be behind the same router


class FrameStream(Protocol):
    """One end of a bidirectional stream of frames. Its methods raise only PeerError or one of its subclasses."""

    @property
    def peer(self) -> str:
        """The partner's peer id if this peer opened the stream, and otherwise the partner's network address."""
        ...

    async def send(self, frame: Frame) -> None:
        """Send a frame, and wait if there is back-pressure. Raises Unreachable if the partner is gone."""
        ...

    async def receive(self, timeout_s: float) -> Frame:
        """Return the next frame.

        Raises TimedOut if none arrives in time, Unreachable if the partner is gone, and CorruptPayload if the message
        is not a frame.
        """
        ...

    async def close(self) -> None:
        """End the stream. Either end can call this at any time. It never raises an exception."""
        ...


class Transport(Protocol):
    """Makes calls to other peers. Every call has a deadline and raises only PeerError or one of its subclasses."""

    async def open_swap(self, candidate: Candidate, *, timeout_s: float) -> FrameStream: ...

    async def status(self, candidate: Candidate, *, swap_id: bytes = b"", timeout_s: float) -> PeerStatus: ...

    def fetch(self, candidate: Candidate, want: FetchWant, *, timeout_s: float) -> AsyncGenerator[FetchItem]:
        """Yield the requested item (spec, manifest or layout), or the requested chunks in order.

        `timeout_s` applies to each item.
        """
        ...


class Service(Protocol):
    """Answers calls from other peers.

    A transport's server calls it and reports Refused and Unreachable to the caller.
    """

    def admit(self, hello: Hello) -> None:
        """Raise Refused if this peer does not serve the caller."""
        ...

    async def on_swap(self, stream: FrameStream) -> None: ...

    async def on_status(self, swap_id: bytes) -> PeerStatus: ...

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]: ...


class Directory(Protocol):
    """The live peers of this run, as far as this peer knows. Only a call shows whether a listed peer still answers."""

    def live(self) -> Sequence[Candidate]:
        """Return the peers from which a partner can be drawn, excluding this one. The call never blocks.

        In a small run, these are all live peers; in a large run, they are a changing sample of the live peers.
        """
        ...

    def num_live(self) -> int:
        """Return the number of live peers, including this one. It is an estimate if `live` returns a sample.

        The call never blocks.
        """
        ...

    def knows(self, peer_id: str) -> bool:
        """Return whether a live record of a peer has been read, even if `live` does not list it. This never blocks."""
        ...

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        """Look up one particular peer, even if `live` does not list it now. Return None if it is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines in seconds. The defaults suit the internet; tests use shorter deadlines."""

    dial_s: float = 5.0
    offer_s: float = 5.0  # from the offer to its answer
    status_s: float = 3.0  # for a request for the state of a swap
    progress_s: float = 10.0  # for one chunk; detects dead partners
    farewell_s: float = 1.0  # for sending the partner an Abort with the reason


INTERNET = Deadlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What the swaps of a peer need from the rest of the program.

    `rng` draws partners and ids of swaps, which must be unpredictable. `on_corrupt` is called with the id of a partner
    that sent data which no honest peer sends, and with the reason. Encoding runs in `executor`, and `cpu_clock` returns
    the CPU time of a thread.
    """

    spec: Spec
    hello: Callable[[], Hello]
    transport: Transport
    directory: Directory
    executor: Executor
    rng: random.Random
    deadlines: Deadlines = INTERNET
    on_corrupt: Callable[[str, str], None] = lambda peer_id, reason: None
    cpu_clock: Callable[[], float] = time.thread_time
