"""One connection gives a stranger two greetings, one refused call and one name; after that it must reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress

import grpc
import grpc.aio
import pytest
from harness.identities import identity_of
from harness.patience import AT_ONCE_S, PATIENCE_S
from peer_stub import PeerStub

from adversarial.victim import DIGEST, PROGRESS, victim
from noloco_p2p.errors import PeerError, Refused, Unreachable
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net import options
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.connection import translate
from noloco_p2p.net.handshake import Greeting, Metadata
from noloco_p2p.net.proxy import WAITING_OF_ONE
from noloco_p2p.net.session import SERVER_NAME, Session
from noloco_p2p.net.wire.v1 import peer_pb2 as pb

NUM_NEWCOMERS = 20
MANY_GREETINGS = 200
NUM_LEFT = 80


def connection(there: Candidate) -> grpc.aio.Channel:
    credentials = Session(identity_of("stranger")).channel_credentials(there)
    return grpc.aio.secure_channel(
        there.address, credentials, options=[*options.CLIENT, ("grpc.ssl_target_name_override", SERVER_NAME)]
    )


async def proof(stub: PeerStub, there: Candidate, name: str) -> Metadata:
    greeting = Greeting.to(there.peer_id, there.session_key)
    return greeting.prove(await stub.Greet(greeting.request(), timeout=AT_ONCE_S), Session(identity_of(name)))


async def status(stub: PeerStub, name: str, metadata: Metadata = ()) -> pb.StatusReply:
    request = pb.StatusRequest(hello=pb.Hello(peer_id=identity_of(name).peer_id, run_name="r", spec_digest=DIGEST))
    return await stub.Status(request, metadata=metadata, timeout=AT_ONCE_S)


async def ask_for_a_state(stub: PeerStub, name: str, metadata: Metadata) -> grpc.aio.UnaryStreamCall:
    """Start a call that holds an upload slot of the donor."""
    hello = pb.Hello(peer_id=identity_of(name).peer_id, run_name="r", spec_digest=DIGEST)
    request = pb.FetchRequest(hello=hello, chunks=pb.ChunksRequest(manifest_digest=bytes(32), indices=[0]))
    call = stub.Fetch(request, metadata=metadata, timeout=PATIENCE_S)
    assert (await call.read()).HasField("chunk")
    return call


async def fault_of(call: Coroutine[None, None, object]) -> PeerError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return translate(raised.value, "victim")


class Greeter:
    """Greets in a loop, and reconnects whenever the server ends its connection."""

    def __init__(self, there: Candidate) -> None:
        self.num_greetings = 0
        self._there = there

    async def greet(self) -> None:
        while True:
            channel = connection(self._there)
            stub = PeerStub(channel)
            with suppress(grpc.aio.AioRpcError):
                while True:
                    self.num_greetings += 1
                    await self._once(stub)
            await channel.close()

    async def _once(self, stub: PeerStub) -> None:
        try:
            await stub.Greet(pb.GreetRequest(nonce=bytes(16)), timeout=AT_ONCE_S)
        except grpc.aio.AioRpcError as error:
            if "one connection" in str(error.details()):
                raise


async def is_served(there: Candidate, name: str) -> bool:
    """Return whether the first call of a new peer is answered."""
    session = Session(identity_of(name))
    transport = GrpcTransport(lambda: Hello(session.identity.peer_id, "r", DIGEST), session=session)
    try:
        return (await transport.status(there, timeout_s=AT_ONCE_S)).progress == PROGRESS
    except PeerError:
        return False


async def test_who_greets_in_a_loop_keeps_nobody_of_its_network_out() -> None:
    """All callers here share one address, as callers through one relay do."""
    async with victim() as there:
        greeters = [Greeter(there.candidate) for _ in range(2)]
        tasks = [asyncio.create_task(greeter.greet()) for greeter in greeters]
        try:
            while sum(greeter.num_greetings for greeter in greeters) < MANY_GREETINGS:  # noqa: ASYNC110 - both count
                await asyncio.sleep(0.01)
            served = [await is_served(there.candidate, f"newcomer {index}") for index in range(NUM_NEWCOMERS)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert served == [True] * NUM_NEWCOMERS


async def test_a_connection_greets_twice_and_no_more() -> None:
    async with victim() as there, connection(there.candidate) as channel:
        stub = PeerStub(channel)
        for _ in range(2):
            await proof(stub, there.candidate, "stranger")
        fault = await fault_of(proof(stub, there.candidate, "stranger"))
        assert isinstance(fault, Refused)
        assert "more than 2 greetings" in str(fault)


async def test_a_call_that_is_refused_is_the_last_of_its_connection() -> None:
    """The server ends the connection even if the next call would carry a proof."""
    async with victim() as there, AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(connection(there.candidate)) for _ in range(2)]
        for stub, is_proven in zip(map(PeerStub, channels), (False, True), strict=True):
            metadata = await proof(stub, there.candidate, "stranger")
            refused = await fault_of(status(stub, "stranger"))
            assert isinstance(refused, Refused)
            assert "call Greet first" in str(refused)
            again = await fault_of(status(stub, "stranger", metadata if is_proven else ()))
            assert isinstance(again, Unreachable), again
        assert await is_served(there.candidate, "newcomer")


async def test_one_connection_has_one_name() -> None:
    """Otherwise one connection could serve 30 names and count for the first one only."""
    async with victim() as there, connection(there.candidate) as channel:
        stub = PeerStub(channel)
        assert (await status(stub, "one", await proof(stub, there.candidate, "one"))).progress == PROGRESS
        fault = await fault_of(status(stub, "other", await proof(stub, there.candidate, "other")))
        assert isinstance(fault, Refused)
        assert "another peer" in str(fault)


async def test_connections_whose_calls_are_over_are_few() -> None:
    """An accepted call exempts its connection from the limits only while it runs. Otherwise one caller could fill the
    512 connections of the server within seconds and lock everybody out."""
    async with victim() as there:
        most = 0
        async with AsyncExitStack() as stack:
            for _ in range(NUM_LEFT):
                stub = PeerStub(await stack.enter_async_context(connection(there.candidate)))
                call = await ask_for_a_state(stub, "stranger", await proof(stub, there.candidate, "stranger"))
                call.cancel()
                most = max(most, there.num_connections())
            assert await is_served(there.candidate, "newcomer")
        assert most < 2 * WAITING_OF_ONE  # the server learns of an end a moment later


async def test_a_connection_with_a_running_call_does_not_make_room() -> None:
    async with victim() as there, AsyncExitStack() as stack:
        stub = PeerStub(await stack.enter_async_context(connection(there.candidate)))
        metadata = [await proof(stub, there.candidate, "stranger") for _ in range(2)]
        running = await ask_for_a_state(stub, "stranger", metadata[0])
        await status(stub, "stranger", metadata[1])
        for _ in range(2 * WAITING_OF_ONE):
            other = PeerStub(await stack.enter_async_context(connection(there.candidate)))
            await status(other, "stranger", await proof(other, there.candidate, "stranger"))
        assert await is_served(there.candidate, "newcomer")
        assert not running.done()
