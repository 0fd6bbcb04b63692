"""Strangers that open connections and prove nothing keep no newcomer out, and the server holds little memory for them.

The proxy groups addresses by /24, so 127.0.1.x counts as another network than 127.0.0.x.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from harness.identities import identity_of
from harness.patience import AT_ONCE_S, PATIENCE_S

from adversarial.connections import Silent, elsewhere
from adversarial.victim import DIGEST, PROGRESS, Victim, victim
from noloco_p2p.errors import PeerError, Unreachable
from noloco_p2p.gossip.frames import Chunk, Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import options
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.session import Session

NUM_SILENT = 120
NUM_NEWCOMERS = 20
MOST_MIB = 16.0
MIB = 1 << 20


@asynccontextmanager
async def watched() -> AsyncIterator[Victim]:
    async with victim() as there:
        assert await is_served(there.candidate, "the first")  # allocates what the server keeps after its first call
        watching = asyncio.create_task(there.watch())
        try:
            yield there
        finally:
            watching.cancel()


def transport(name: str) -> GrpcTransport:
    session = Session(identity_of(name))
    return GrpcTransport(lambda: Hello(session.identity.peer_id, "r", DIGEST), session=session)


async def is_served(there: Candidate, name: str) -> bool:
    """Return whether the first call of a new peer is answered."""
    try:
        return (await transport(name).status(there, timeout_s=AT_ONCE_S)).progress == PROGRESS
    except PeerError:
        return False


async def test_silent_sockets_of_another_network_keep_no_newcomer_out() -> None:
    async with watched() as there:
        silent = Silent(there.port, NUM_SILENT, ["127.0.1.1", "127.0.1.2"])
        try:
            await silent.all_open()
            served = [await is_served(there.candidate, f"newcomer {index}") for index in range(NUM_NEWCOMERS)]
        finally:
            await silent.end()
        assert served == [True] * NUM_NEWCOMERS
        assert there.most_grown_mib < MOST_MIB


async def test_peers_behind_one_address_with_an_attacker_get_in_between() -> None:
    """Peers behind one NAT share an address. They handshake within milliseconds, so silent connections are replaced."""
    async with watched() as there:
        silent = Silent(there.port, 30, ["127.0.0.1"])
        try:
            await silent.all_open()
            while not await is_served(there.candidate, "neighbour"):  # `run` has the limit
                pass
        finally:
            await silent.end()


def stranger(there: Candidate) -> grpc.aio.Channel:
    """Return a channel of a caller that nobody knows."""
    credentials = Session(identity_of("stranger")).channel_credentials(there)
    return grpc.aio.secure_channel(
        there.address, credentials, options=[*options.CLIENT, ("grpc.ssl_target_name_override", there.peer_id)]
    )


async def shout(channel: grpc.aio.Channel, method: str) -> None:
    """Send 1 MiB before the request is accepted."""
    call = channel.stream_stream(f"/noloco_p2p.wire.v1.Peer/{method}")()
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, grpc.aio.UsageError, asyncio.InvalidStateError):
        await call.write(bytes(MIB))
        await call.read()
    call.cancel()


async def test_large_messages_of_callers_without_an_accepted_request_take_little_memory() -> None:
    """The callers open 60 connections from 15 networks, with 4 streams each, and send 1 MiB on each stream."""
    async with watched() as there, AsyncExitStack() as stack:
        channels: list[grpc.aio.Channel] = []
        for index in range(15):
            port = await stack.enter_async_context(elsewhere(there.port, f"127.0.{index + 1}.1"))
            channels += [stranger(replace(there.candidate, address=f"127.0.0.1:{port}")) for _ in range(4)]
        for channel in channels:
            stack.push_async_callback(channel.close)
        for method in ("Status", "Swap"):
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(shout(channel, method) for channel in channels for _ in range(4)))
            assert there.most_grown_mib < MOST_MIB, method


async def test_who_brings_much_before_its_offer_is_accepted_is_cut_off() -> None:
    async with watched() as there:
        stream = await transport("pusher").open_swap(there.candidate, timeout_s=PATIENCE_S)
        with suppress(Unreachable):  # the end may show in the send or in the receive
            await stream.send(Chunk(memoryview(bytes(MIB))))
        with pytest.raises(Unreachable):
            await stream.receive(AT_ONCE_S)
        await stream.close()
