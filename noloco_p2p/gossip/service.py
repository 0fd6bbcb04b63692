"""Answer the calls of other peers, and swap the weights of the model that this peer trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from noloco_p2p.errors import PeerError, Refused
from noloco_p2p.gossip.coder import Coder
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, Refuse, RefuseCode, other_kind
from noloco_p2p.gossip.gossip import PAUSED_S, Gossip
from noloco_p2p.gossip.seams import FrameStream, Outside
from noloco_p2p.gossip.swap import Counts
from noloco_p2p.gossip.units import Units
from noloco_p2p.owned_tasks import OwnedTasks

Serve = Callable[[FetchWant], AsyncGenerator[FetchItem]]


async def serve_nothing(want: FetchWant) -> AsyncGenerator[FetchItem]:
    """Refuse every request. Peers that have no state to serve use this function."""
    raise Refused("this peer does not serve its state", code=RefuseCode.NO_STATE.name)
    yield


class PeerService:
    """One peer, as others see it. It implements `gossip.seams.Service`, which a transport's server calls.

    `serve` answers the requests of newcomers; it is usually a method of a `StateServer`. A peer has no `gossip` until
    it knows its model.
    """

    def __init__(self, outside: Outside, *, serve: Serve = serve_nothing) -> None:
        self.gossip: Gossip | None = None
        self.counts = Counts()
        self.num_calls = 0  # calls from other peers, including the ones that were refused
        self._outside = outside
        self._serve = serve
        self._state = "training"
        self._exchange: Exchange | None = None
        self._tasks = OwnedTasks("swapping")

    @property
    def state(self) -> str:
        """The state of the peer. Swaps begin only in the state "training"."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        self._state = state
        if self.gossip:
            self.gossip.state = state

    async def begin(self, num_elements: int, *, progress: float = 0.0) -> Exchange:
        """Begin to swap a vector of this size at this position in the run, and end the swaps of the vector before.

        An offer with another position could be refused at once, with the advice to ask again much later.
        """
        before = self._exchange
        await self.stop()
        if before:
            before.is_replaced = True
        units = Units(num_elements)
        exchange = self._exchange = Exchange(units, asyncio.get_running_loop(), progress=progress)
        coder = Coder(self._outside.spec.codec.weights, units)
        self.gossip = Gossip(exchange, coder, self._outside, self.counts)
        self.gossip.state = self._state
        self._tasks.start(self.gossip.run())
        return exchange

    async def hold(self, *, timeout_s: float) -> None:
        """Begin no swap any more, until `state` is set, and wait until the running ones have ended."""
        self._state = "paused" if self._state == "training" else self._state
        if self.gossip:
            await self.gossip.finish(timeout_s=timeout_s)

    def hurry(self) -> None:
        """End a wait of the training thread. This is safe on any thread and in a signal handler."""
        if self._exchange:
            self._exchange.hurry()

    def take_refused_as_stale(self) -> bool:
        """Return whether any peer has refused this peer as stale since the last call. The call is thread-safe."""
        refused, self.counts.refused_as_stale = self.counts.refused_as_stale, False
        return refused

    async def stop(self) -> None:
        if self._exchange:
            self._exchange.close()
        await self._tasks.stop(grace_s=0.0)
        self.gossip = None

    # calls from other peers

    def admit(self, hello: Hello) -> None:
        """Raise Refused if the caller has a different protocol version, run, spec or model."""
        self.num_calls += 1
        if refuse := other_kind(self._outside.hello(), hello):
            raise Refused(refuse.sentence, peer=hello.peer_id, code=refuse.code.name)

    async def on_swap(self, stream: FrameStream) -> None:
        self.num_calls += 1
        if self.gossip:
            await self.gossip.on_swap(stream)
            return
        try:
            await stream.send(Refuse(RefuseCode.NOT_TRAINING, "I have no model yet", PAUSED_S))
        except PeerError:
            pass
        finally:
            await stream.close()

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        progress = self._exchange.progress if self._exchange else 0.0
        has_verified = self.gossip is not None and self.gossip.is_verified(swap_id)
        return PeerStatus(self._outside.hello(), self._state, progress, has_verified)

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        return self._serve(want)
