"""Both ends of a tunnel, over socket pairs in place of relays: nothing leaks after faults or hostile peers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

from harness.patience import PATIENCE_S, until

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.swarm.relay import CIRCUIT, PUNCH, YES
from noloco_p2p.swarm.streams import Ends
from noloco_p2p.swarm.tunnel import MAX_SERVED, Tunnels


def run(main: Coroutine[Any, Any, None]) -> None:
    async def to_its_end() -> None:
        await asyncio.wait_for(main, PATIENCE_S)
        for _ in range(5):  # let closed sockets disappear
            await asyncio.sleep(0)

    asyncio.run(to_its_end())


async def pair() -> tuple[Ends, Ends]:
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


class RelayNode:
    """A relay of a version without hole punching; each stream leads to a peer that ends it."""

    guard = DialGuard()

    def __init__(self) -> None:
        self.num_calls = 0
        self.answering: list[asyncio.Task[None]] = []

    async def handle_streams(self, protocol: str, handler: object) -> None: ...

    async def hosts_of(self, relay: str) -> set[str]:
        return {"127.0.0.1"} if self.num_calls else set()

    async def open_stream(self, relay: str, protocol: str, *, at: str = "") -> Ends:
        if protocol == PUNCH:
            raise DirectoryError("protocol not supported")
        self.num_calls += 1
        near, far = await pair()
        self.answering.append(asyncio.create_task(self._answer(*far)))
        return near

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(YES)
        writer.close()


def tunnels_to(node: RelayNode) -> Tunnels:
    return Tunnels(
        cast(Any, node),
        multiaddrs=lambda: {"peer": [f"/ip4/127.0.0.1/tcp/9/p2p/relay{CIRCUIT}/p2p/peer"]},
        wanted=lambda: True,
        relays=lambda: {"relay"},
    )


async def call(tunnels: Tunnels) -> Ends:
    [candidate] = tunnels.reached([Candidate("peer", "", can_be_called=False)])
    return await asyncio.open_connection(*candidate.address.split(":"))


class Server:
    """Stands in for the own gRPC server: greets each connection and ignores its data."""

    def __init__(self) -> None:
        self.num_open = 0
        self.relays: list[str] = []
        self._serving: list[asyncio.Task[None]] = []

    def take(self, connection: socket.socket, relay: str) -> None:
        self.relays.append(relay)
        self._serving.append(asyncio.create_task(self._serve(connection)))

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        self.num_open += 1
        writer.write(b"!")
        await reader.read()
        self.num_open -= 1
        writer.close()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Server, Tunnels]]:
    server, tunnels = Server(), tunnels_to(RelayNode())
    await tunnels.start(server.take)
    yield server, tunnels
    await tunnels.stop()
    await asyncio.gather(*server._serving)


async def come_in(tunnels: Tunnels, relay: str = "relay") -> tuple[bytes, asyncio.StreamWriter]:
    """Return the first byte of a stream that a relay brings, or nothing if it ends instead; and the stream's writer."""
    near, (reader, writer) = await pair()

    async def serve() -> None:
        try:
            await tunnels._on_tunnel(relay, *near)
        finally:
            near[1].close()

    tunnels._tasks.start(serve())
    return await reader.read(1), writer


def test_a_connection_ends_with_its_tunnel() -> None:
    async def main() -> None:
        node = RelayNode()
        tunnels = tunnels_to(node)
        reader, writer = await call(tunnels)
        assert await reader.read() == b""
        assert node.num_calls == 1
        writer.close()
        await asyncio.gather(*node.answering)
        await tunnels.stop()

    run(main())


def test_a_port_goes_on_after_a_connection_that_could_not_be_taken() -> None:
    async def main() -> None:
        loop, node = asyncio.get_running_loop(), RelayNode()
        tunnels, accept, faults = tunnels_to(node), loop.sock_accept, [OSError(24, "Too many open files")]

        async def accept_later(sock: socket.socket) -> Any:
            if faults:
                raise faults.pop()
            return await accept(sock)

        loop.sock_accept = accept_later
        reader, writer = await call(tunnels)
        assert await reader.read() == b""
        assert not faults
        writer.close()
        await asyncio.gather(*node.answering)
        await tunnels.stop()

    run(main())


def test_no_more_connections_come_in_at_once_than_may_be() -> None:
    async def main() -> None:
        async with served() as (server, tunnels):
            first = [await come_in(tunnels) for _ in range(MAX_SERVED + 4)]
            assert [said for said, _ in first].count(b"!") == server.num_open == MAX_SERVED
            for _, writer in first:
                writer.close()
            await until(lambda: not server.num_open and not tunnels.num_served)
            said, writer = await come_in(tunnels)
            assert said == b"!", "there is room again"
            writer.close()

    run(main())


def test_only_a_relay_that_holds_a_place_for_this_peer_brings_calls() -> None:
    """Otherwise a stranger could call from this machine's own address, as often as it likes."""

    async def main() -> None:
        async with served() as (server, tunnels):
            for relay, expected in (("a stranger", b""), ("relay", b"!")):
                said, writer = await come_in(tunnels, relay)
                assert said == expected
                assert server.relays == ["relay"] * len(expected), "calls are counted by relay"
                writer.close()

    run(main())
