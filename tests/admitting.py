"""Test doubles that admit the callers of a peer that serves nothing, or any state of a donor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, other_kind
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import Candidate, FrameStream, Transport
from noloco_p2p.spec import Spec
from noloco_p2p.transfer.fetch import Admission


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


def admission_of(
    spec: Spec, transport: Transport, *, num_bytes: int = 0, live: Callable[[], Sequence[Candidate]] = tuple
) -> Admission:
    """Return an admission for states with the layout "layout" and 10 elements.

    It accepts every file, and every position while no live peer is known.
    """
    admission = Admission(spec, transport, ModelLayout(()), live=live, check_file=lambda path: None)
    admission.layout, admission.num_elements, admission.num_bytes = "layout", 10, num_bytes
    return admission
