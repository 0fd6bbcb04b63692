"""What a peer answers to others: the Service that a transport's server calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from noloco_p2p.gossip.donor import StateServer
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus
from noloco_p2p.gossip.round_driver import RoundDriver
from noloco_p2p.gossip.seams import FrameStream


class PeerService:
    def __init__(
        self, *, driver: RoundDriver, states: StateServer, status: Callable[[], tuple[Hello, str, int, float]]
    ) -> None:
        self._driver = driver
        self._states = states
        self._status = status
        self.num_calls = 0  # of other peers that got through, whatever the answer was

    def admit(self, hello: Hello) -> None:
        self.num_calls += 1
        self._driver.admit(hello)

    async def on_swap(self, stream: FrameStream) -> None:
        self.num_calls += 1
        await self._driver.on_swap(stream)

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        hello, state, round_index, progress = self._status()
        return PeerStatus(hello, state, round_index, progress, self._driver.swap_state(swap_id))

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        return self._states.serve(want)
