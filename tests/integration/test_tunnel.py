"""Calls to an unreachable peer go through relays, over real libp2p streams, and take another relay when one dies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from harness.patience import until

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.swarm.daemon import ListenOn
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.relay import CIRCUIT, NUM_RESERVATIONS, Relay, Reservations, relays_of
from noloco_p2p.swarm.tunnel import MAX_PORTS, Tunnels

BLOCK = bytes(range(256)) * 256
NUM_BLOCKS = 320  # 20 MiB, more than the buffers on the way hold


@asynccontextmanager
async def node(folder: Path, name: str) -> AsyncIterator[SwarmNode]:
    path = folder / f"{name}.key"
    identity = Identity.load_or_create(path)
    started = await SwarmNode(path, identity.peer_id, ListenOn("127.0.0.1")).start()
    try:
        yield started
    finally:
        await started.stop()


async def echo(connection: socket.socket) -> None:
    """Stand in for the gRPC server of the called peer: send back the bytes that arrive."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


class Scene:
    """`caller`, `called` and two relays; `called` keeps a reservation at both."""

    def __init__(self, caller: SwarmNode, called: SwarmNode, relays: dict[str, SwarmNode]) -> None:
        self.called = called
        self.relays = relays
        self.reservations = Reservations(
            called,
            doors=lambda: {peer: relay.multiaddrs() for peer, relay in relays.items()},
            wanted=lambda: True,
        )
        self.peer = Candidate(called.peer_id, "", can_be_called=False)
        self.tunnels = [
            Tunnels(
                end,
                multiaddrs=lambda: {called.peer_id: self.reservations.circuits()},
                wanted=lambda: True,
                relays=self.reservations.relays,
            )
            for end in (caller, called)
        ]


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node(folder, name)) for name in ("caller", "called", "r1", "r2")]
        echoing: list[asyncio.Task[None]] = []
        for relay in nodes[2:]:
            await Relay(relay).start()
        made = Scene(nodes[0], nodes[1], {relay.peer_id: relay for relay in nodes[2:]})
        for tunnels in made.tunnels:
            await tunnels.start(lambda connection, _: echoing.append(asyncio.create_task(echo(connection))))
            stack.push_async_callback(tunnels.stop)
        keeping = asyncio.create_task(made.reservations.run())
        stack.push_async_callback(end_tasks, [keeping])
        await until(lambda: len(made.reservations.circuits()) == NUM_RESERVATIONS, "a reservation at both relays")
        yield made
        await asyncio.gather(*echoing)


async def test_a_connection_ends_with_its_relay_and_the_next_one_takes_another(tmp_path: Path) -> None:
    async with scene(tmp_path) as made:
        assert all(way.endswith(f"{CIRCUIT}/p2p/{made.called.peer_id}") for way in made.reservations.circuits())
        [candidate] = made.tunnels[0].reached([made.peer])
        assert candidate.can_be_called
        host, _, port = candidate.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        in_use = made.relays[next(iter(relays_of(made.reservations.circuits())))]

        async def say(num_blocks: int) -> None:
            for _ in range(num_blocks):
                writer.write(BLOCK)
                await writer.drain()

        saying = asyncio.create_task(say(NUM_BLOCKS))
        for _ in range(NUM_BLOCKS):
            assert await reader.readexactly(len(BLOCK)) == BLOCK
        await saying
        await in_use.stop()
        assert await reader.read() == b""
        writer.close()

        reader, writer = await asyncio.open_connection(host, int(port))
        await say(1)
        assert await reader.readexactly(len(BLOCK)) == BLOCK
        writer.close()
        await until(lambda: in_use.peer_id not in relays_of(made.reservations.circuits()), "the reservation is lost")


async def test_a_peer_without_a_relay_stays_out_of_reach(tmp_path: Path) -> None:
    async with node(tmp_path, "caller") as caller:
        peer = Candidate("closed", "", can_be_called=False)
        tunnels = Tunnels(
            caller,
            multiaddrs=lambda: {"closed": ["/ip4/127.0.0.1/tcp/9/p2p/closed"]},
            wanted=lambda: True,
            relays=list,
        )
        assert list(tunnels.reached([peer])) == [peer]


async def test_ports_of_peers_that_are_gone_serve_others(tmp_path: Path) -> None:
    async with node(tmp_path, "caller") as caller:
        there: list[str] = []
        tunnels = Tunnels(
            caller,
            multiaddrs=lambda: {peer: [f"/ip4/127.0.0.1/tcp/9/p2p/relay{CIRCUIT}/p2p/{peer}"] for peer in there},
            wanted=lambda: True,
            relays=list,
        )

        def live() -> Sequence[Candidate]:
            return tunnels.reached([Candidate(peer, "", can_be_called=False) for peer in there])

        there[:] = [f"peer-{number}" for number in range(MAX_PORTS + 1)]
        assert sum(peer.can_be_called for peer in live()) == MAX_PORTS
        there[:] = there[1:]
        assert all(peer.can_be_called for peer in live())
        await tunnels.stop()
