"""Peers in one process, with real gossip over a MemoryNetwork, without sockets or a DHT."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import PROTOCOL_VERSION, Hello, StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import INTERNET, Deadlines, Directory, Outside, Transport
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.spec import Spec
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.testing.memory import MemoryDirectory, MemoryNetwork, MemoryTransport, Wrap, unchanged
from noloco_p2p.transfer.donor import SavedState, StateServer

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")

POLL_S = 0.01
HOLD_S = 10.0
THREAD_S = 300.0  # timeout of calls on the network thread; its only purpose is to catch hangs


class MemorySwarm:
    """A network thread with a MemoryNetwork, used as a context manager. `peer(...)` adds a peer to it."""

    def __init__(self, spec: Spec, *, deadlines: Deadlines = INTERNET) -> None:
        self.spec = spec
        self.deadlines = deadlines
        self.loop = self._new_loop()
        self.network = MemoryNetwork()
        self.wraps: dict[str, Wrap] = {}
        self.peers: list[MemoryPeer] = []
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.call(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(THREAD_S)

    def _main(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def peer(
        self,
        peer_id: str,
        *,
        run_folder: Path = Path("."),
        spec: Spec | None = None,
        protocol_version: str = PROTOCOL_VERSION,
        wrap: Wrap = unchanged,
    ) -> MemoryPeer:
        """Add a live peer. A different `spec` or `protocol_version` makes it incompatible with the others.

        `wrap` is applied to its ends of the streams that it or others open.
        """
        self.wraps[peer_id] = wrap

        async def make() -> MemoryPeer:
            made = MemoryPeer(
                self,
                peer_id,
                spec=spec or self.spec,
                run_folder=run_folder,
                protocol_version=protocol_version,
            )
            await self._connect(peer_id, made.service)
            return made

        peer = self.call(make())
        self.peers.append(peer)
        return peer

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the network thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(THREAD_S)

    def kill(self, peer: MemoryPeer) -> None:
        """Make the peer vanish, so that nobody can call it and its streams break."""

        async def vanish() -> None:
            await self._disconnect(peer.peer_id)
            await peer.service.stop()

        self.call(vanish())

    # Subclasses with sockets override these methods.

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def _outside(self, peer_id: str, hello: Callable[[], Hello]) -> tuple[Transport, Directory]:
        """Return the transport and the directory through which a peer reaches the others."""
        return MemoryTransport(self.network, hello), MemoryDirectory(self.network, own_id=peer_id)

    async def _connect(self, peer_id: str, service: PeerService) -> None:
        """Make the peer reachable."""
        self.network.add(peer_id, service, wrap=self.wraps[peer_id])

    async def _disconnect(self, peer_id: str) -> None:
        self.network.remove(peer_id)

    async def _disconnect_all(self) -> None:
        await self.network.close()

    async def _stop(self) -> None:
        for peer in self.peers:
            await peer.service.stop()
        await self._disconnect_all()
        for peer in self.peers:
            peer.executor.shutdown()


class MemoryPeer:
    """A peer in memory, which `NoLoCo` and the callbacks of other trainers can use."""

    def __init__(
        self,
        swarm: MemorySwarm,
        peer_id: str,
        *,
        spec: Spec,
        run_folder: Path,
        protocol_version: str = PROTOCOL_VERSION,
    ) -> None:
        self.peer_id = peer_id
        self.spec = spec
        self.run_folder = run_folder
        self.protocol_version = protocol_version
        self.layout = ""
        self.metrics = Metrics()
        self.membership = self
        self.leave_requested = threading.Event()
        self.pause_requested = threading.Event()
        self.states = StateServer(spec, position=lambda: self.metrics.progress)
        self.executor = ThreadPoolExecutor(1)
        self._swarm = swarm
        transport, directory = swarm._outside(peer_id, self._hello)
        outside = Outside(
            spec=spec,
            hello=self._hello,
            transport=transport,
            directory=directory,
            executor=self.executor,
            rng=random.Random(peer_id),
            deadlines=swarm.deadlines,
        )
        self.service = PeerService(outside, serve=self.states.serve)

    def _hello(self) -> Hello:
        return Hello(
            self.peer_id,
            self.spec.name,
            self.spec.digest(),
            protocol_version=self.protocol_version,
            layout=self.layout,
        )

    def wait_while_paused(self) -> None:
        """Wait until another thread clears `pause_requested` or sets `leave_requested`."""
        while self.pause_requested.is_set() and not self.leave_requested.wait(POLL_S):
            pass
        self.service.state = "training"

    def count_traffic(self) -> None:
        """Do nothing, because peers in memory publish no counters."""

    def restore_metrics(self, values: Mapping[str, Any]) -> None:
        self.metrics.restore(values)

    # what the outer step needs

    def enter(
        self, *, layout: ModelLayout, target: Path | None, loss_of: Callable[[Path | None], float] | None = None
    ) -> StateManifest | None:
        self.layout = layout.digest()
        self.states.layout = layout
        return None

    def begin_swaps(self, num_elements: int, *, progress: float) -> Exchange:
        return self._swarm.call(self.service.begin(num_elements, progress=progress))

    def hold_swaps(self) -> None:
        self._swarm.call(self.service.hold(timeout_s=HOLD_S))

    def catch_up(self, *, progress: float, target: Path) -> StateManifest | None:
        """Return None, because peers in memory are never far ahead of each other."""
        return None

    def rescue(self, *, target: Path) -> StateManifest | None:
        """Return None, because peers in memory do not fetch states."""
        return None

    def serve_state(self, saved: SavedState) -> None:
        self.states.saved = saved

    def take_state_wanted(self) -> bool:
        return self.states.take_wanted()
