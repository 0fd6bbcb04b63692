"""Both sides of a tunnel, over socket pairs in place of relays: what strangers and faults leave behind."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Coroutine
from typing import Any, cast

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.swarm.relay import CIRCUIT, YES
from noloco_p2p.swarm.tunnel import ANSWER, HELLO, MAX_SESSIONS, Ends, Tunnels
from noloco_p2p.testing.patience import PATIENCE_S


def run(main: Coroutine[Any, Any, None]) -> None:
    async def to_its_end() -> None:
        await asyncio.wait_for(main, PATIENCE_S)
        for _ in range(5):  # what was closed is gone
            await asyncio.sleep(0)

    asyncio.run(to_its_end())


async def pair() -> tuple[Ends, Ends]:
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


class RelayNode:
    """Each stream ends at a peer that does not know the connection."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.answering: list[asyncio.Task[None]] = []

    async def hosts_of(self, relay: str) -> set[str]:
        return {"127.0.0.1"} if self.num_calls else set()

    async def open_stream(self, *_: object) -> Ends:
        self.num_calls += 1
        near, far = await pair()
        self.answering.append(asyncio.create_task(self._answer(*far)))
        return near

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(YES)
        await reader.readexactly(HELLO.size)
        writer.write(ANSWER.pack(0, 0))
        writer.close()


def tunnels_to(node: RelayNode, port: int = 9) -> Tunnels:
    return Tunnels(
        cast(Any, node),
        live=lambda: [Candidate("peer", "", can_be_called=False)],
        multiaddrs=lambda: {"peer": [f"/ip4/127.0.0.1/tcp/9/p2p/relay{CIRCUIT}/p2p/peer"]},
        wanted=lambda: True,
        server=lambda: ("127.0.0.1", port),
        relays=lambda: {"relay"},
        guard=DialGuard(),
    )


async def call(tunnels: Tunnels) -> Ends:
    [candidate] = tunnels.live()
    return await asyncio.open_connection(*candidate.address.split(":"))


async def come_in(tunnels: Tunnels, session_ids: list[bytes], relay: str = "relay") -> list[int]:
    """A stream for each; what each is answered (-1: nothing)."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await tunnels._on_tunnel(relay, reader, writer)
        finally:
            writer.close()

    ends, serving = [], []
    for _ in session_ids:
        near, far = await pair()
        ends.append(far)
        serving.append(asyncio.create_task(serve(*near)))
    for session_id, (_, writer) in zip(session_ids, ends, strict=True):
        writer.write(HELLO.pack(session_id, 0))
    told = []
    for reader, writer in ends:
        answer = await reader.read(ANSWER.size)
        told.append(answer[0] if answer else -1)
        writer.close()
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)
    return told


def test_a_connection_that_is_not_known_there_ends_at_once() -> None:
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


async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The own gRPC server, which hears nothing."""
    await reader.read()
    writer.close()


def test_two_streams_that_name_one_connection_make_one() -> None:
    async def main() -> None:
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        tunnels = tunnels_to(RelayNode(), server.sockets[0].getsockname()[1])
        await come_in(tunnels, [secrets.token_bytes(16)] * 2)
        assert (len(tunnels._sessions), len(tunnels.local_ports)) == (1, 1)
        await tunnels.stop()
        server.close()

    run(main())


def test_a_burst_makes_no_more_connections_than_may_be() -> None:
    async def main() -> None:
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        tunnels = tunnels_to(RelayNode(), server.sockets[0].getsockname()[1])
        told = await come_in(tunnels, [secrets.token_bytes(16) for _ in range(MAX_SESSIONS + 20)])
        assert (told.count(1), told.count(0)) == (MAX_SESSIONS, 20)
        await tunnels.stop()
        server.close()

    run(main())


def test_only_a_relay_that_holds_a_place_for_this_peer_brings_calls() -> None:
    """Else a stranger would call from this machine's own address, as often as it likes."""

    async def main() -> None:
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        tunnels = tunnels_to(RelayNode(), server.sockets[0].getsockname()[1])
        assert await come_in(tunnels, [secrets.token_bytes(16)], relay="a stranger") == [-1]
        assert await come_in(tunnels, [secrets.token_bytes(16)]) == [1]
        await tunnels.stop()
        server.close()

    run(main())
