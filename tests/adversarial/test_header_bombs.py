"""A caller cannot make a peer expand compressed headers: neither before it has proved its key nor afterwards."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import psutil
import pytest
from harness.header_bombs import FRAME_BYTES, Bombers, bomb, port_of, trusting
from harness.identities import identity_of
from harness.processes import PeerProcess, small_spec, write_spec

from adversarial.test_one_connection import is_served
from adversarial.victim import victim
from noloco_p2p.net.session import Session

ONE_NETWORK = ["127.0.1.1"]
MANY_NETWORKS = [f"127.0.{index}.1" for index in range(1, 9)]
SIZES = [14_000, 16_300, 60_000, 500_000]  # bytes of headers on one connection
NUM_BOMBS = 200
BOMBER = Session(identity_of("bomber"))
NUM_NEWCOMERS = 8
MOST_MIB = 16.0
MOST_OF_A_PEER_MIB = 64.0  # a peer that trains grows a little by itself


async def test_one_bomb_of_any_size_takes_little_memory() -> None:
    async with victim() as there:
        assert await is_served(there.candidate, "the first")  # allocates what the server keeps
        watching = asyncio.create_task(there.watch())
        for num_bytes, acknowledges in product(SIZES, (False, True)):
            reader, writer = await asyncio.open_connection("127.0.0.1", there.port, ssl=trusting(BOMBER))
            writer.write(bomb(num_bytes, acknowledges=acknowledges))
            with suppress(ConnectionError):
                await reader.read(1)
            assert await is_served(there.candidate, "a newcomer")
            writer.transport.abort()
        watching.cancel()
        assert there.most_grown_mib < MOST_MIB


@pytest.mark.parametrize("hosts", [ONE_NETWORK, MANY_NETWORKS], ids=["one network", "many networks"])
async def test_a_flood_of_bombs_takes_little_memory_and_keeps_no_newcomer_out(hosts: list[str]) -> None:
    """The headers come at once or after the settings, in large or in small frames."""
    async with victim() as there:
        assert await is_served(there.candidate, "the first")
        watching = asyncio.create_task(there.watch())
        for acknowledges, frame_bytes in product((False, True), (FRAME_BYTES, 64)):
            data = bomb(16_000, acknowledges=acknowledges, frame_bytes=frame_bytes)
            bombers = Bombers(there.port, data, num=16 if hosts is ONE_NETWORK else 60, hosts=hosts)
            try:
                await bombers.thrown(NUM_BOMBS)
                served = [await is_served(there.candidate, f"newcomer {index}") for index in range(NUM_NEWCOMERS)]
            finally:
                await bombers.end()
            assert served == [True] * NUM_NEWCOMERS
            assert there.most_grown_mib < MOST_MIB
        watching.cancel()


async def test_bombs_neither_stop_the_swaps_of_a_real_peer_nor_make_it_grow(tmp_path: Path) -> None:
    with ExitStack() as stack:
        spec = write_spec(small_spec("bombed"), tmp_path)
        peer = stack.enter_context(PeerProcess(spec, tmp_path / "a"))
        partner = stack.enter_context(PeerProcess(peer.ticket, tmp_path / "b"))
        peer.swap_with(partner)
        there = psutil.Process(peer.process.pid)
        before_bytes = there.memory_info().rss
        flood = Bombers(port_of(there), bomb(14_000, acknowledges=False), num=16, hosts=ONE_NETWORK)
        try:
            await flood.thrown(NUM_BOMBS)
            await asyncio.to_thread(peer.swap_with, partner)
        finally:
            await flood.end()
        assert (there.memory_info().rss - before_bytes) / 2**20 < MOST_OF_A_PEER_MIB
