"""Swaps, status calls and fetches over real gRPC on loopback keep the promises that are tested in memory."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from admitting import admission_of
from harness.loopback import LoopbackSwarm
from harness.patience import AT_ONCE_S, PATIENCE_S, PATIENT, until
from harness.processes import free_port
from harness.specs import FP32
from harness.swapping import Swapping, apply_until, random_vector, swap_all, wait_until
from rogue_server import rogue

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, SettingsError, TimedOut, Unreachable
from noloco_p2p.gossip.frames import (
    STATE_CHUNK_BYTES,
    Abort,
    AbortCode,
    Accept,
    Chunk,
    FetchItem,
    FetchWant,
    Frame,
    Header,
    Hello,
    Offer,
    PeerStatus,
    Ready,
    Refuse,
    RefuseCode,
    StateManifest,
    WantManifest,
    WantSpec,
)
from noloco_p2p.gossip.seams import Candidate, FrameStream, Service
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.options import MAX_MESSAGE_BYTES
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.spec import OuterSpec, RunSpec, TrainerSpec
from noloco_p2p.tcp import ask_from_where
from noloco_p2p.testing.faults import Faults
from noloco_p2p.transfer.donor import SavedState, StateServer, describe_state
from noloco_p2p.transfer.fetch import fetch_spec, fetch_state

SPEC = TrainerSpec(name="grpc", codec=FP32)
WAIT = RunSpec(name="wait", codec=FP32, outer=OuterSpec(wait=True))
SWAP = "/noloco_p2p.wire.v1.Peer/Swap"
HELLO = Hello("caller", SPEC.name, SPEC.digest())
NUM_ELEMENTS = 600_000


@pytest.fixture
def swarm() -> Iterator[LoopbackSwarm]:
    with LoopbackSwarm(SPEC, deadlines=PATIENT) as swarm:
        yield swarm


def vectors() -> list[torch.Tensor]:
    return [random_vector(seed, NUM_ELEMENTS) for seed in (1, 2)]


# swaps


def test_both_partners_get_half_of_their_difference() -> None:
    with LoopbackSwarm(WAIT, deadlines=PATIENT) as swarm:
        peers = [Swapping(swarm.peer(name), vector) for name, vector in zip("ab", vectors(), strict=True)]
        for _ in range(3):
            ours, theirs = (swap.halves.values for swap in swap_all(peers))
            assert torch.equal(ours, peers[1].vector * 0.5 - peers[0].vector * 0.5)
            assert torch.equal(theirs, -ours)


def test_bits_by_need_travel_over_grpc() -> None:
    """One number leaves the range of four bits in the second swap, and that of six bits in the third."""
    with LoopbackSwarm(WAIT.with_changes({"codec.weights": "modulo"}), deadlines=PATIENT) as swarm:
        peers = [Swapping(swarm.peer(name), vector) for name, vector in zip("ab", vectors(), strict=True)]
        repeated = []
        for index in range(3):
            peers[0].vector[300_000] += 30.0 * index  # a step is 1 to 2
            ours, theirs = (swap.halves.values for swap in swap_all(peers))
            assert torch.equal(ours, -theirs)
            assert (ours - (peers[1].vector - peers[0].vector) / 2).abs().max() <= 1.01
            repeated.append([peer.counts.repeated_chunks for peer in peers])
        assert repeated == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("kind", [Offer | Accept, Header, Chunk, Ready], ids=["offer", "header", "chunk", "ready"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_connection_that_breaks_leaves_both_sides_alike(swarm: LoopbackSwarm, kind: type[Frame], nth: int) -> None:
    faults, sums = Faults(kind, "cut", nth=nth), vectors()
    total = sums[0] + sums[1]
    one = Swapping(swarm.peer("a", wrap=faults), sums[0])
    other = Swapping(swarm.peer("b"), sums[1])
    apply_until(lambda: faults.fired, [one, other])
    for peer in (one, other):
        peer.settle()
    assert len(one.swaps) == len(other.swaps)
    assert torch.allclose(one.vector + other.vector, total, atol=1e-5)


def test_after_a_kill_others_are_found_at_once(swarm: LoopbackSwarm) -> None:
    a, b, c = (swarm.peer(name) for name in "abc")
    swarm.kill(a)
    began_s = time.monotonic()
    both = [Swapping(peer, vector) for peer, vector in zip((b, c), vectors(), strict=True)]
    apply_until(lambda: all(peer.swaps for peer in both), both)
    assert time.monotonic() - began_s < AT_ONCE_S, "a refused connection is reported at once"


def test_a_peer_of_another_spec_is_refused_with_the_difference(swarm: LoopbackSwarm) -> None:
    stranger = swarm.peer("b", spec=TrainerSpec(name="grpc", outer=OuterSpec(alpha=0.25)))
    both = [Swapping(peer, vector) for peer, vector in zip((swarm.peer("a"), stranger), vectors(), strict=True)]
    wait_until(lambda: any(peer.counts.last_failure for peer in both))
    told = "".join(peer.counts.last_failure for peer in both)
    assert "spec digest" in told
    assert SPEC.digest()[:16] in told
    assert not any(peer.counts.swaps for peer in both)


# one server and one client, without swaps


class Answering:
    """A Service whose answers the test provides."""

    def __init__(
        self,
        *,
        on_swap: Callable[[FrameStream], Coroutine[None, None, None]] | None = None,
        states: StateServer | None = None,
        has_verified: bool = False,
    ) -> None:
        self._on_swap = on_swap
        self._states = states
        self._has_verified = has_verified

    def admit(self, hello: Hello) -> None:
        if hello.run_name != SPEC.name:
            raise Refused("another run", code=RefuseCode.OTHER_RUN.name, retry_after_s=7.0)

    async def on_swap(self, stream: FrameStream) -> None:
        if self._on_swap:
            await self._on_swap(stream)

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(HELLO, "training", 0.5, self._has_verified)

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        assert self._states is not None
        return self._states.serve(want)


@asynccontextmanager
async def serving(service: Service) -> AsyncGenerator[Candidate]:
    server = GrpcServer(service)
    await server.start("127.0.0.1", 0)
    try:
        yield Candidate("server", f"127.0.0.1:{server.port}")
    finally:
        await server.stop(0.0)


def transport(run_name: str = SPEC.name) -> GrpcTransport:
    return GrpcTransport(lambda: Hello("caller", run_name, SPEC.digest()))


async def test_a_port_in_use_is_a_setting_that_is_wrong() -> None:
    async with serving(Answering()) as there:
        port = int(there.address.rpartition(":")[2])
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}.*--listen"):
            await GrpcServer(Answering()).start("127.0.0.1", port)


async def test_a_connection_that_asks_hears_where_it_comes_from_and_a_call_is_served_beside_it() -> None:
    async with serving(Answering()) as there:
        host, _, port = there.address.rpartition(":")
        with socket.socket() as asking:
            asking.setblocking(False)
            await asyncio.get_running_loop().sock_connect(asking, (host, int(port)))
            assert await ask_from_where(asking) == asking.getsockname()
            assert await asyncio.get_running_loop().sock_recv(asking, 64) == b""
        assert (await transport().status(there, timeout_s=PATIENCE_S)).state == "training"


async def test_a_dead_address_is_unreachable_at_once() -> None:
    nobody, began_s = Candidate("nobody", f"127.0.0.1:{free_port()}"), time.monotonic()
    with pytest.raises(Unreachable, match=nobody.address):
        await transport().open_swap(nobody, timeout_s=PATIENCE_S)
    with pytest.raises(Unreachable):
        await transport().status(nobody, timeout_s=PATIENCE_S)
    with pytest.raises(Unreachable):
        await fetch_spec(transport(), [nobody], expected_digest=SPEC.digest())
    assert time.monotonic() - began_s < AT_ONCE_S


async def test_an_address_that_answers_nothing_is_given_up_within_the_time_out() -> None:
    """The owner of a listening socket is frozen: the connection is established, but gRPC never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as frozen:
        there, began_s = Candidate("frozen", f"127.0.0.1:{frozen.getsockname()[1]}"), time.monotonic()
        for call in (
            transport().open_swap(there, timeout_s=0.3),
            transport().status(there, timeout_s=0.3),
            anext(transport().fetch(there, WantSpec(), timeout_s=0.3)),
        ):
            with pytest.raises((Unreachable, TimedOut)):
                await call
        assert time.monotonic() - began_s < AT_ONCE_S


async def test_a_message_that_is_too_large_is_refused_and_the_peer_lives_on() -> None:
    seen: list[PeerError] = []
    largest = Chunk(bytes(1 << 20))

    async def on_swap(stream: FrameStream) -> None:
        try:
            while True:
                chunk = await stream.receive(PATIENCE_S)
                assert isinstance(chunk, Chunk)
                await stream.send(Refuse(RefuseCode.BUSY, f"{len(chunk.payload)} bytes came"))
        except PeerError as error:
            seen.append(error)

    async with serving(Answering(on_swap=on_swap)) as there:
        stream = await transport().open_swap(there, timeout_s=PATIENCE_S)
        await stream.send(largest)
        answer = await stream.receive(PATIENCE_S)
        assert isinstance(answer, Refuse)
        assert answer.sentence == f"{1 << 20} bytes came"
        await stream.close()
        async with grpc.aio.insecure_channel(there.address, options=[("grpc.max_send_message_length", -1)]) as rogue:
            call = rogue.stream_stream(SWAP)()
            await call.write(bytes(2 * MAX_MESSAGE_BYTES))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        again = await transport().open_swap(there, timeout_s=PATIENCE_S)
        await again.send(largest)
        assert isinstance(await again.receive(PATIENCE_S), Refuse)
        await again.close()
    assert len(seen) >= 2


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff", b"\x32\x05abc", os.urandom(1000)], ids=["varint", "chunk", "noise"]
)
async def test_garbage_ends_the_stream_with_a_sentence_on_either_side(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader reports an invalid frame at once, not at the next timeout."""
    seen: list[str] = []

    async def on_swap(stream: FrameStream) -> None:
        try:
            await stream.receive(PATIENCE_S)
        except CorruptPayload as error:
            seen.append(str(error))

    async def rogue_server(requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.write(garbage)

    caplog.set_level(logging.ERROR)
    began_s = time.monotonic()
    async with serving(Answering(on_swap=on_swap)) as there, grpc.aio.insecure_channel(there.address) as channel:
        call = channel.stream_stream(SWAP)()
        await call.write(garbage)
        await call.read()
    async with rogue("Swap", rogue_server) as there:
        stream = await transport().open_swap(there, timeout_s=PATIENCE_S)
        with pytest.raises(CorruptPayload):
            await stream.receive(PATIENCE_S)
        await stream.close()
    assert time.monotonic() - began_s < AT_ONCE_S
    assert len(seen) == 1


@pytest.mark.parametrize("who", ["caller", "called"])
async def test_the_last_words_of_a_peer_arrive_before_the_end_of_its_stream(who: str) -> None:
    abort, heard = Abort(AbortCode.LEAVING, "bye"), list[Frame]()

    async def speak(stream: FrameStream) -> None:
        await stream.send(abort)
        await stream.close()

    async def listen(stream: FrameStream) -> None:
        heard.append(await stream.receive(PATIENCE_S))
        with pytest.raises(Unreachable):
            await stream.receive(PATIENCE_S)
        await stream.close()

    async with serving(Answering(on_swap=speak if who == "called" else listen)) as there:
        stream = await transport().open_swap(there, timeout_s=PATIENCE_S)
        await (speak if who == "caller" else listen)(stream)
        await until(lambda: heard)
    assert heard == [abort]


async def test_callers_that_come_and_go_do_not_harm_the_peer() -> None:
    """A port scan connects, opens a swap and vanishes. Asking gRPC about a vanished caller once crashed the process."""
    peers: list[str] = []

    async def on_swap(stream: FrameStream) -> None:
        try:
            await stream.receive(PATIENCE_S)
        except PeerError:
            peers.append(stream.peer)
            with pytest.raises(PeerError):
                await stream.send(Ready())
            with pytest.raises(PeerError):
                await stream.receive(0.1)
            await stream.close()

    async with serving(Answering(on_swap=on_swap)) as there:
        for _ in range(10):
            stream = await transport().open_swap(there, timeout_s=PATIENCE_S)
            reading = asyncio.create_task(stream.receive(PATIENCE_S))
            await asyncio.sleep(0)  # the call starts
            await stream.send(Ready()) if len(peers) % 2 else None
            await stream.close()
            with pytest.raises(PeerError):
                await reading
        host, _, port = there.address.rpartition(":")
        for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(500), b""):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(noise)
            writer.transport.abort()
        last = await transport().open_swap(there, timeout_s=PATIENCE_S)
        await last.send(Ready())
        await last.close()


async def test_a_status_tells_what_became_of_a_swap() -> None:
    async with serving(Answering(has_verified=True)) as there:
        status = await transport().status(there, swap_id=bytes(16), timeout_s=PATIENCE_S)
        assert status == PeerStatus(HELLO, "training", 0.5, has_verified=True)
        with pytest.raises(Refused, match="another run") as refusal:
            await transport("other").status(there, timeout_s=PATIENCE_S)
        assert (refusal.value.code, refusal.value.retry_after_s) == ("OTHER_RUN", 7.0)


# the first fetch


NUM_BYTES = 4 * STATE_CHUNK_BYTES + 123


class Donor(Answering):
    """Serves a state from a file; `alter` wraps the items that it serves."""

    def __init__(
        self,
        folder: Path,
        name: str,
        alter: Callable[[AsyncGenerator[FetchItem]], AsyncGenerator[FetchItem]] = lambda items: items,
    ) -> None:
        self.data = os.urandom(NUM_BYTES)
        path = folder / name
        path.write_bytes(self.data)
        self.states = StateServer(SPEC)
        self.states.saved = self.saved = describe_state(path, layout="layout", num_elements=10, progress=0.5)
        self.asked: list[FetchWant] = []
        self._alter = alter
        super().__init__(states=self.states)

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        self.asked.append(want)
        return self._alter(super().on_fetch(want))


async def fetch_from(donors: list[Candidate], target: Path) -> StateManifest | None:
    here = transport()
    return await fetch_state(here, donors, admission_of(SPEC, here, num_bytes=NUM_BYTES), target=target)


async def test_spec_manifest_and_chunks_come_over_grpc(tmp_path: Path) -> None:
    donor = Donor(tmp_path, "donor")
    async with serving(donor) as there:
        assert await fetch_spec(transport(), [there], expected_digest=SPEC.digest()) == SPEC
        manifest = await fetch_from([there], tmp_path / "fetched")
        assert manifest == donor.saved.manifest
        assert (tmp_path / "fetched").read_bytes() == donor.data
        with pytest.raises(Unreachable, match="another run"):
            await fetch_spec(transport("other"), [there], expected_digest=SPEC.digest())


async def test_a_manifest_of_many_chunks_comes_whole(tmp_path: Path) -> None:
    """A model with billions of parameters has more digests than fit into one message (about 33,000)."""
    digests = tuple(index.to_bytes(32, "big") for index in range(70_000))
    manifest = StateManifest("layout", 9, 0.5, 70_000 * STATE_CHUNK_BYTES, digests)
    donor = Donor(tmp_path, "donor")
    donor.states.saved = SavedState(tmp_path / "donor", manifest)
    async with (
        serving(donor) as there,
        aclosing(transport().fetch(there, WantManifest(), timeout_s=PATIENCE_S)) as items,
    ):
        assert [item async for item in items] == [manifest]
