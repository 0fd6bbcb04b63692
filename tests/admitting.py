"""A peer's service for tests of the stream between stages: it admits callers, and serves nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, other_kind
from noloco_p2p.gossip.seams import FrameStream


class Admitting:
    """A Service that admits the callers of its own run."""

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
