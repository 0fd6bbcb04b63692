"""Peers in one process: real exchanges, swaps and pairing over a MemoryNetwork, without sockets and without a DHT."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.fetch import SavedState, StateServer
from noloco_p2p.gossip.frames import Hello, StateManifest
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.runner import RoundRunner
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.spec import RunSpec
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.testing.memory import MemoryDirectory, MemoryNetwork, MemoryTransport


class MemorySwarm:
    """A network thread with a MemoryNetwork; `peer(...)` adds a peer to it. Use as a context manager."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.loop = asyncio.new_event_loop()
        self.network = MemoryNetwork()
        self.peers: list[MemoryPeer] = []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> MemorySwarm:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self.loop).result(10.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10.0)
        self.loop.close()

    def peer(
        self,
        peer_id: str,
        *,
        run_folder: Path = Path("."),
        spec: RunSpec | None = None,
        wrap: Callable[[FrameStream], FrameStream] = lambda stream: stream,
    ) -> MemoryPeer:
        """Add a live peer. `spec` for one of another run; `wrap` puts something around the streams that it opens."""
        making = _make(self, peer_id, spec or self.spec, run_folder, wrap)
        peer = asyncio.run_coroutine_threadsafe(making, self.loop).result(10.0)
        self.peers.append(peer)
        return peer

    def kill(self, peer: MemoryPeer) -> None:
        """The peer vanishes: nobody can call it any more, and its streams break."""

        async def vanish() -> None:
            self.network.remove(peer.peer_id)
            await peer.runner.stop()

        asyncio.run_coroutine_threadsafe(vanish(), self.loop).result(10.0)

    async def _stop(self) -> None:
        for peer in self.peers:
            await peer.runner.stop()
        await self.network.close()
        for peer in self.peers:
            peer.executor.shutdown()


class MemoryPeer:
    """What `NoLoCo` needs of a peer, in memory."""

    def __init__(
        self,
        peer_id: str,
        *,
        spec: RunSpec,
        run_folder: Path,
        runner: RoundRunner,
        exchange: Exchange,
        states: StateServer,
        executor: ThreadPoolExecutor,
    ) -> None:
        self.peer_id = peer_id
        self.spec = spec
        self.run_folder = run_folder
        self.runner = runner
        self.exchange = exchange
        self.states = states
        self.executor = executor
        self.layout = ""
        self.metrics = Metrics()

    def enter(self, *, layout: str, num_elements: int, target: Path | None) -> StateManifest | None:
        self.layout = layout
        return None

    def serve_state(self, saved: SavedState) -> None:
        self.states.saved = saved


async def _make(
    swarm: MemorySwarm, peer_id: str, spec: RunSpec, run_folder: Path, wrap: Callable[[FrameStream], FrameStream]
) -> MemoryPeer:
    executor = ThreadPoolExecutor(1)
    pace = Pace(spec.outer.inner_steps)
    made: list[MemoryPeer] = []

    def hello() -> Hello:
        return Hello(peer_id, spec.name, spec.digest(), layout=made[0].layout if made else "")

    runner = RoundRunner(
        hello=hello,
        transport=MemoryTransport(swarm.network, hello, wrap=wrap),
        directory=MemoryDirectory(swarm.network, own_id=peer_id),
        pace=pace,
        executor=executor,
        rng=random.Random(peer_id),
    )
    exchange = Exchange(spec=spec, loop=swarm.loop, runner=runner, pace=pace)
    states = StateServer(spec)
    made.append(
        MemoryPeer(
            peer_id,
            spec=spec,
            run_folder=run_folder,
            runner=runner,
            exchange=exchange,
            states=states,
            executor=executor,
        )
    )
    service = PeerService(runner=runner, states=states, status=lambda: (hello(), runner.state, 0, 0.0))
    swarm.network.add(peer_id, service)
    return made[0]
