"""Test doubles that admit the callers of a peer that serves nothing, or the states of donors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, StateManifest, other_kind
from noloco_p2p.gossip.seams import Candidate, FrameStream


class Admitting:
    """A Service that admits callers of its own run and serves nothing."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello

    def admit(self, hello: Hello) -> None:
        if refuse := other_kind(self._hello, hello):
            raise Refused(refuse.sentence, code=refuse.code.name)

    async def on_swap(self, stream: FrameStream) -> None:
        raise AssertionError("not of this test")

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        raise AssertionError("not of this test")

    async def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        raise AssertionError("not of this test")
        yield


class AnyState:
    """A `transfer.fetch.Admission` that accepts every state."""

    async def check_position(self, donor: Candidate, manifest: StateManifest) -> None: ...

    async def check_state(self, donor: Candidate, manifest: StateManifest, path: Path) -> None: ...

    def refuse(self, donor: Candidate, why: str) -> None: ...
