"""Relays calls to peers that cannot be dialled.

A peer that cannot be dialled keeps a stream to a relay open; this stream is its reservation. p2pd also has relays, but
measurements show that they carry at most 128 KiB per call, regardless of p2pd's flags. Here, the relaying node connects
two libp2p streams and carries the traffic itself, so this limit does not apply. The streams carry gRPC over TLS, so a
relay can interrupt a call, but cannot read it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.identity import short_id
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.rates import Rates
from noloco_p2p.swarm.addresses import CIRCUIT, split_peer_id
from noloco_p2p.swarm.node import SwarmNode
from noloco_p2p.swarm.streams import Ends, count_down, read_line

logger = logging.getLogger(__name__)

RESERVE, CALL, TUNNEL = (f"/noloco_p2p/{name}/1" for name in ("place", "call", "tunnel"))
PUNCH, HOLE = (f"/noloco_p2p/{name}/1" for name in ("punch", "hole"))  # like CALL and TUNNEL, but to agree on a hole
YES, NO = b"yes\n", b"no\n"
BEAT_S = 5.0  # interval between the heartbeats of a peer that keeps a reservation
SILENT_S = 15.0
ANSWER_S = 10.0
MAX_RESERVATIONS = 32
MAX_STREAMS_OF_A_RESERVATION = 2  # the second is for a peer that reconnects before the first is known to be lost
BEATS_PER_S, BEATS_AT_ONCE = 1.0, 5  # heartbeats per stream; the first two arrive together
MAX_CALLS = 32
MAX_CALLS_OF_ONE = 9  # per caller; a swap has up to eight connections
MAX_CALL_BYTES = 4 << 30  # per direction; beyond this, the connection ends
MAX_CALL_S = 1800.0
CALLS_A_MINUTE_OF_ONE = 120  # per caller; bursts are allowed
NUM_RESERVATIONS = 2  # per peer, so that one remains when the other relay dies
RETRY_S = 30.0  # the pause after a relay refused or was lost
LOOK_S = 1.0
BLOCK_BYTES = 256 * 1024
BROKEN = (OSError, EOFError, ValueError, RuntimeError, DirectoryError)  # broken streams; uvloop raises RuntimeError


class Relay:
    """Holds reservations for peers that cannot be dialled, and relays calls to them.

    By default, every peer serves as a relay, but a peer that cannot be dialled is never chosen.
    """

    def __init__(self, node: SwarmNode) -> None:
        self.passed_bytes = 0  # total over all calls and both directions
        self.mirror_port = 0  # the port on which this node tells callers their external addresses (tcp.py); 0 = none
        self._node = node
        self._reservations: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._called = Rates(per_s=CALLS_A_MINUTE_OF_ONE / 60, at_once=CALLS_A_MINUTE_OF_ONE)

    async def start(self) -> None:
        await self._node.handle_streams(RESERVE, self._on_reserve)
        await self._node.handle_streams(CALL, partial(self._on_call, TUNNEL))
        await self._node.handle_streams(PUNCH, partial(self._on_call, HOLE))

    async def _on_reserve(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_full = peer not in self._reservations and len(self._reservations) >= MAX_RESERVATIONS
        if is_full or self._reservations[peer] >= MAX_STREAMS_OF_A_RESERVATION:
            writer.write(NO)
            return
        self._reservations[peer] += 1
        try:
            writer.write(YES)
            beats = Rates(per_s=BEATS_PER_S, at_once=BEATS_AT_ONCE)
            while beats.take(peer):
                async with asyncio.timeout(SILENT_S):
                    if not await reader.read(64):
                        return
                    writer.write(b".")
                    await writer.drain()
        except (*BROKEN, TimeoutError) as error:
            logger.debug("%s lost its reservation: %s", short_id(peer), error)
        finally:
            count_down(self._reservations, peer)

    async def _on_call(
        self, protocol: str, caller: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect a caller to a peer with a reservation.

        If they punch a hole, both first receive the port on which this node tells them their external addresses.
        """
        yes = b"%d\n" % self.mirror_port if protocol == HOLE else YES
        async with asyncio.timeout(ANSWER_S):
            wanted = (await read_line(reader)).decode("ascii", errors="replace").strip()
        is_full = self._calls.total() >= MAX_CALLS or self._calls[caller] >= MAX_CALLS_OF_ONE
        is_known = wanted in self._reservations and (protocol != HOLE or self.mirror_port)
        if not is_known or is_full or not self._called.take(caller):
            writer.write(NO)
            return
        self._calls[caller] += 1
        try:
            far_reader, far_writer = await self._node.open_stream(wanted, protocol)
            writer.write(yes)
            if protocol == HOLE:
                far_writer.write(yes)
            await splice((reader, writer), (far_reader, far_writer), on_passed=self._count)
        except BROKEN as error:
            logger.debug("a call from %s to %s ended: %s", short_id(caller), short_id(wanted), error)
        finally:
            count_down(self._calls, caller)

    def _count(self, num_bytes: int) -> None:
        self.passed_bytes += num_bytes


async def splice(near: Ends, far: Ends, *, on_passed: Callable[[int], None] = lambda _: None) -> None:
    """Copy in both directions until one end closes or the call reaches a limit, then close both ends.

    After each write, `on_passed` is called with the number of bytes.
    """
    ways = ((near[0], far[1]), (far[0], near[1]))
    tasks = [asyncio.create_task(_pass_on(reader, writer, on_passed)) for reader, writer in ways]
    try:
        await asyncio.wait(tasks, timeout=MAX_CALL_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        near[1].close()  # before any await, because another cancellation may follow
        far[1].close()
        await end_tasks(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_passed: Callable[[int], None]
) -> None:
    num_bytes = 0
    with suppress(*BROKEN):
        while num_bytes < MAX_CALL_BYTES and (data := await reader.read(BLOCK_BYTES)):
            writer.write(data)
            await writer.drain()
            num_bytes += len(data)
            on_passed(len(data))


class Reservations:
    """Keeps reservations at two relays while this peer cannot be dialled.

    `doors` returns the multiaddrs of possible relays by peer id. `wanted` returns whether reservations are needed.
    """

    def __init__(
        self,
        node: SwarmNode,
        *,
        doors: Callable[[], Mapping[str, Sequence[str]]],
        wanted: Callable[[], bool],
    ) -> None:
        self._node = node
        self._doors = doors
        self._wanted = wanted
        self._held: dict[str, str] = {}  # relay -> its multiaddr
        self._not_before_s: dict[str, float] = {}  # relay -> when it may be asked; never while it is asked

    def relays(self) -> Collection[str]:
        """Return the peer ids of the relays that currently hold a reservation for this peer."""
        return self._held.keys()

    def circuits(self) -> list[str]:
        """Return the multiaddrs at which this peer can be called through its relays, in libp2p's format."""
        return [f"{multiaddr}{CIRCUIT}/p2p/{self._node.peer_id}" for multiaddr in self._held.values()]

    async def run(self) -> None:
        self._node.streams.relays = self.relays
        async with asyncio.TaskGroup() as keepers:
            for _ in range(NUM_RESERVATIONS):
                keepers.create_task(self._keep())

    async def _keep(self) -> None:
        """Keep one reservation while reservations are needed, at one relay after the other."""
        while True:
            now_s, doors = time.monotonic(), self._doors() if self._wanted() else {}
            free = [relay for relay in doors if doors[relay] and self._not_before_s.get(relay, 0.0) <= now_s]
            if free:
                relay = random.choice(free)
                self._not_before_s[relay] = math.inf
                try:
                    await self._hold(relay, doors[relay][0])
                except (*BROKEN, TimeoutError, Unreachable) as error:
                    logger.debug("could not get or keep a reservation at %s: %s", short_id(relay), error)
                finally:
                    self._held.pop(relay, None)
                    self._not_before_s[relay] = time.monotonic() + RETRY_S
            await asyncio.sleep(LOOK_S)

    async def _hold(self, relay: str, multiaddr: str) -> None:
        reader, writer = await self._node.open_stream(relay, RESERVE, at=split_peer_id(multiaddr)[0])
        try:
            writer.write(b".")
            async with asyncio.timeout(ANSWER_S):
                if await read_line(reader) != YES:
                    raise DirectoryError("the relay has no reservations left")
            self._held[relay] = multiaddr
            logger.info("%s is now relaying calls to this peer", short_id(relay))
            await self._beat(reader, writer)
        finally:
            writer.close()

    async def _beat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._wanted():
            writer.write(b".")
            await writer.drain()
            async with asyncio.timeout(SILENT_S):
                _expect(await reader.read(64))
            with suppress(TimeoutError):  # until the next heartbeat; the end of the stream is noticed at once
                async with asyncio.timeout(BEAT_S):
                    _expect(await reader.read(64))


def _expect(data: bytes) -> None:
    if not data:
        raise DirectoryError("the relay closed the stream")


def relays_of(multiaddrs: Sequence[str]) -> dict[str, str]:
    """Return the addresses of the relays in these multiaddrs, by the peer id of the relay."""
    ways = [multiaddr.partition(CIRCUIT)[0] for multiaddr in multiaddrs if CIRCUIT in multiaddr]
    return {relay: address for address, relay in map(split_peer_id, ways)}
