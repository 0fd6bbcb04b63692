"""Punch holes between peers behind the routers of netlab.py, with real sockets in namespaces and a relay of two pipes.

The sockets of a thread belong to the namespace of the thread, so each side has a thread with its own loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop
from netlab import NetLab, Node, enter

from harness.nat import Router
from harness.patience import PATIENCE_S
from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.swarm.punch import answer_through_hole, call_through_hole
from noloco_p2p.swarm.relay import BROKEN, Ends, splice
from noloco_p2p.tcp import Endpoint, Mirror

T = TypeVar("T")
BLOCK = bytes(range(256)) * 64


class Inside:
    """A thread in a namespace, which runs coroutines one after another."""

    def __init__(self, node: Node) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(enter, node.namespace).result(PATIENCE_S)
        self._loop = uvloop.new_event_loop()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self._thread.submit(self._loop.run_until_complete, asyncio.wait_for(work, PATIENCE_S))

    def stop(self) -> None:
        self._thread.submit(self._loop.close).result(PATIENCE_S)
        self._thread.shutdown()


class Middle:
    """A node on the internet that tells callers their public address, and joins connections in pairs."""

    def __init__(self, node: Node) -> None:
        self._address = node.address
        self._inside = Inside(node)
        self._done: asyncio.Event | None = None
        self._ports: Future[tuple[int, int]] = Future()
        self._serving = self._inside.start(self._serve())
        self._mirror_port, self._relay_port = self._ports.result(PATIENCE_S)

    @property
    def mirror(self) -> Endpoint:
        return self._address, self._mirror_port

    @property
    def relay(self) -> Endpoint:
        return self._address, self._relay_port

    def stop(self) -> None:
        assert self._done is not None
        self._inside._loop.call_soon_threadsafe(self._done.set)
        self._serving.result(PATIENCE_S)
        self._inside.stop()

    async def _serve(self) -> None:
        self._done, mirror = asyncio.Event(), Mirror()
        waiting: list[Ends] = []
        joined: list[asyncio.Task[None]] = []

        def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            waiting.append((reader, writer))
            if len(waiting) == 2:
                joined.append(asyncio.create_task(splice(*waiting)))
                waiting.clear()

        server = await asyncio.start_server(join, self._address, 0)
        self._ports.set_result((await mirror.start(self._address, 0), server.sockets[0].getsockname()[1]))
        await self._done.wait()
        await mirror.stop()
        server.close()
        await asyncio.gather(*joined)


@dataclass(frozen=True, slots=True)
class Met:
    """How two sides met. `far` is the address that the caller connected to."""

    seconds: float
    far: str


class Homes:
    """A lab with node 0 on the internet and the others behind routers. `behind[k]` is the router of node k + 1."""

    def __init__(self, routers: Sequence[Router], behind: Sequence[int], *, round_trip_ms: float) -> None:
        self.lab = NetLab(1 + len(behind), round_trip_ms=round_trip_ms, routers=routers, behind=[None, *behind])

    def __enter__(self) -> Homes:
        self.lab.__enter__()
        self.middle = Middle(self.lab.nodes[0])
        self._homes = [Inside(node) for node in self.lab.nodes[1:]]
        return self

    def __exit__(self, *_: object) -> None:
        self.middle.stop()
        for home in self._homes:
            home.stop()
        self.lab.close()

    def meet(self, caller: int, called: int) -> Met | None:
        """Connect two nodes (not node 0) by hole punching, and exchange data. Returns None if no hole opens in time."""
        calling = self._homes[caller - 1].start(self._side(is_caller=True))
        answering = self._homes[called - 1].start(self._side(is_caller=False))
        sides = calling.result(PATIENCE_S), answering.result(PATIENCE_S)
        assert (sides[0] is None) == (sides[1] is None), sides
        return sides[0]

    async def _side(self, *, is_caller: bool) -> Met | None:
        guard = DialGuard(only_public=True)
        relay = await asyncio.open_connection(*self.middle.relay)
        began_s = time.monotonic()
        try:
            if is_caller:
                connection = await call_through_hole(guard, "partner", relay, self.middle.mirror)
            else:
                connection = await answer_through_hole(guard, relay, self.middle.mirror)
        except (*BROKEN, TimeoutError):
            return None
        finally:
            relay[1].close()
        seconds = time.monotonic() - began_s
        with connection:
            await _echo(connection)
            return Met(seconds, connection.getpeername()[0])


async def _echo(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, BLOCK)
    got = b""
    while len(got) < len(BLOCK):
        data = await loop.sock_recv(connection, len(BLOCK) - len(got))
        assert data, "the connection ended"
        got += data
    assert got == BLOCK
