"""A connection allows one refused call, and counts again once its accepted calls are over."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest
from harness.identities import identity_of
from harness.patience import AT_ONCE_S, PATIENCE_S
from peer_stub import PeerStub

from adversarial.victim import DIGEST, PROGRESS, victim
from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import options
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.connection import SERVICE, translate
from noloco_p2p.net.proxy import LAST_WORDS_S, WAITING_OF_ONE
from noloco_p2p.net.server import MAX_CALLS_PER_PEER, MAX_FETCHES_PER_PEER
from noloco_p2p.net.session import Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

NUM_NEWCOMERS = 20
NUM_LEFT = 80


def connection(there: Candidate) -> grpc.aio.Channel:
    credentials = Session(identity_of("stranger")).channel_credentials(there)
    return grpc.aio.secure_channel(
        there.address, credentials, options=[*options.CLIENT, ("grpc.ssl_target_name_override", there.peer_id)]
    )


async def status(stub: PeerStub, name: str) -> pb.StatusReply:
    request = pb.StatusRequest(hello=pb.Hello(peer_id=identity_of(name).peer_id, run_name="r", spec_digest=DIGEST))
    return await stub.Status(request, timeout=AT_ONCE_S)


async def ask_for_a_state(stub: PeerStub, name: str) -> grpc.aio.UnaryStreamCall:
    """Start a call that holds an upload slot of the donor."""
    hello = pb.Hello(peer_id=identity_of(name).peer_id, run_name="r", spec_digest=DIGEST)
    request = pb.FetchRequest(hello=hello, chunks=pb.ChunksRequest(manifest_digest=bytes(32), indices=[0]))
    call = stub.Fetch(request, timeout=PATIENCE_S)
    assert (await call.read()).HasField("chunk")
    return call


async def fault_of(call: Coroutine[None, None, object]) -> PeerError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return translate(raised.value, "victim")


async def is_served(there: Candidate, name: str) -> bool:
    """Return whether the first call of a new peer is answered."""
    session = Session(identity_of(name))
    transport = GrpcTransport(lambda: Hello(session.identity.peer_id, "r", DIGEST), session=session)
    try:
        return (await transport.status(there, timeout_s=AT_ONCE_S)).progress == PROGRESS
    except PeerError:
        return False


async def test_a_call_that_is_refused_is_the_last_of_its_connection() -> None:
    """A caller that may have no further calls is refused, although its next call would be admitted."""
    async with victim() as there, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(connection(there.candidate)) for _ in range(MAX_CALLS_PER_PEER)]
        calls: list[Any] = [
            await ask_for_a_state(PeerStub(each), "stranger") for each in channels[:MAX_FETCHES_PER_PEER]
        ]
        for channel in channels[MAX_FETCHES_PER_PEER:]:
            calls.append(swap := channel.stream_stream(f"/{SERVICE}/Swap")())
            await swap.initial_metadata()
        stub = PeerStub(await stack.enter_async_context(connection(there.candidate)))
        assert "open calls" in str(await fault_of(status(stub, "stranger")))
        for call in calls:
            call.cancel()
        assert "an earlier call" in str(await fault_of(status(stub, "stranger")))
        num_open = there.num_connections()
        async with asyncio.timeout(2 * LAST_WORDS_S):
            while there.num_connections() == num_open:  # noqa: ASYNC110 - the other process closes it
                await asyncio.sleep(0.05)
        assert await is_served(there.candidate, "newcomer")


async def test_connections_whose_calls_are_over_are_few() -> None:
    """An accepted call exempts its connection from the limits only while it runs. Otherwise one caller could fill the
    512 connections of the server within seconds and lock everybody out."""
    async with victim() as there:
        most = 0
        async with AsyncExitStack() as stack:
            for _ in range(NUM_LEFT):
                stub = PeerStub(await stack.enter_async_context(connection(there.candidate)))
                call = await ask_for_a_state(stub, "stranger")
                call.cancel()
                most = max(most, there.num_connections())
            assert await is_served(there.candidate, "newcomer")
        assert most < 2 * WAITING_OF_ONE  # the server learns of an end a moment later


async def test_a_connection_with_a_running_call_does_not_make_room() -> None:
    async with victim() as there, AsyncExitStack() as stack:
        stub = PeerStub(await stack.enter_async_context(connection(there.candidate)))
        running = await ask_for_a_state(stub, "stranger")
        await status(stub, "stranger")
        for _ in range(2 * WAITING_OF_ONE):
            other = PeerStub(await stack.enter_async_context(connection(there.candidate)))
            await status(other, "stranger")
        assert await is_served(there.candidate, "newcomer")
        assert not running.done()
