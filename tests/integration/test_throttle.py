"""Caps on upload and download hold over real gRPC on loopback, without bursts, and all streams share them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from admitting import admission_of
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.specs import FP32
from harness.swapping import Swapping, random_vector, swap_all

from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.frames import (
    Chunk,
    FetchItem,
    FetchWant,
    Hello,
    PeerStatus,
)
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.swap_stream import WINDOW_FRAMES
from noloco_p2p.net.throttle import DEPTH_S, READ_AHEAD_S, Limits, Throttle
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.spec import OuterSpec, TrainerSpec
from noloco_p2p.transfer.donor import StateServer, describe_state
from noloco_p2p.transfer.fetch import fetch_state

SPEC = TrainerSpec(name="throttle", codec=FP32, outer=OuterSpec(wait=True))
RATE = 4e6  # 32 Mbit/s
CHUNK_BYTES = 256 * 1024  # an int8 chunk
NUM_CHUNKS = 48  # three seconds


def is_about(seconds: float, expected_s: float) -> bool:
    """Return whether the time is at most a tenth below the expected one; on a busy machine it may be somewhat above."""
    return 0.9 * expected_s <= seconds <= 1.4 * expected_s


class Sink:
    """A Service that reads everything and records the arrival times."""

    def __init__(self, states: StateServer | None = None) -> None:
        self.arrived: list[tuple[float, int]] = []
        self.num_bytes = 0
        self.has_all = asyncio.Event()
        self._states = states

    def admit(self, hello: Hello) -> None: ...

    async def on_swap(self, stream: FrameStream) -> None:
        try:
            while True:
                frame = await stream.receive(PATIENCE_S)
                assert isinstance(frame, Chunk)
                self.arrived.append((time.monotonic(), len(frame.payload)))
                self.num_bytes += len(frame.payload)
                if self.num_bytes >= NUM_CHUNKS * CHUNK_BYTES:
                    self.has_all.set()
        except PeerError:
            await stream.close()

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        return PeerStatus(Hello("sink", SPEC.name, SPEC.digest()), "training", 0.0)

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        assert self._states is not None
        return self._states.serve(want)


def upload(bytes_per_s: float | None) -> Limits:
    return Limits.of(upload_bytes_per_s=bytes_per_s, download_bytes_per_s=None)


def download(bytes_per_s: float | None) -> Limits:
    return Limits.of(upload_bytes_per_s=None, download_bytes_per_s=bytes_per_s)


async def send_chunks(stream: FrameStream, num_chunks: int, on_sent: Callable[[int], None] = lambda sent: None) -> None:
    payload = bytes(CHUNK_BYTES)
    for _ in range(num_chunks):
        await stream.send(Chunk(payload))
        on_sent(CHUNK_BYTES)


async def send_all(
    sink: Sink, server: GrpcServer, transports: list[GrpcTransport], on_sent: Callable[[int], None] = lambda sent: None
) -> float:
    """Send NUM_CHUNKS over streams of these transports at once; return the seconds until the last one has arrived."""
    await server.start("127.0.0.1", 0)
    candidate = Candidate("sink", f"127.0.0.1:{server.port}")
    streams = [await each.open_swap(candidate, timeout_s=PATIENCE_S) for each in transports]
    began_s = time.monotonic()
    try:
        await asyncio.gather(*(send_chunks(stream, NUM_CHUNKS // len(streams), on_sent) for stream in streams))
        await sink.has_all.wait()
        return time.monotonic() - began_s
    finally:
        await asyncio.gather(*(stream.close() for stream in streams))
        await server.stop(0.0)


def caller(limits: Limits) -> GrpcTransport:
    return GrpcTransport(lambda: Hello("caller", SPEC.name, SPEC.digest()), limits)


def largest_burst(arrived: list[tuple[float, int]], *, window_s: float) -> int:
    """Return the largest number of bytes that arrived within a window."""
    return max(sum(size for at_s, size in arrived if start_s <= at_s < start_s + window_s) for start_s, _ in arrived)


@pytest.mark.parametrize("num_streams", [1, 2], ids=["one swap", "two swaps share"])
async def test_an_upload_takes_what_the_cap_says_without_bursts(num_streams: int) -> None:
    sink, limits = Sink(), upload(RATE)
    seconds = await send_all(sink, GrpcServer(sink), [caller(limits)] * num_streams)
    assert is_about(seconds, NUM_CHUNKS * CHUNK_BYTES / RATE)
    # Messages arrive whole, so each stream may add one that was due before the window.
    assert largest_burst(sink.arrived, window_s=0.5) <= (0.5 + DEPTH_S) * RATE + (1 + num_streams) * CHUNK_BYTES


@pytest.mark.parametrize("num_streams", [1, 2], ids=["one swap", "two swaps share"])
async def test_a_download_takes_what_the_cap_says_and_slows_the_sender(num_streams: int) -> None:
    """The senders have no cap: flow control holds them back, except for the data that is read ahead."""
    sent: list[int] = []
    ahead: list[int] = []

    def on_sent(num_bytes: int) -> None:
        sent.append(num_bytes)
        ahead.append(sum(sent) - sink.num_bytes)

    sink = Sink()
    server = GrpcServer(sink, download(RATE))
    seconds = await send_all(sink, server, [caller(Limits()) for _ in range(num_streams)], on_sent)
    assert is_about(seconds, NUM_CHUNKS * CHUNK_BYTES / RATE)
    # About a second in all: data unread in HTTP/2, the window, and a frame held by the receiver and two by the
    # sender.
    per_stream = READ_AHEAD_S * RATE + (WINDOW_FRAMES + 4) * CHUNK_BYTES
    assert max(ahead) <= num_streams * per_stream
    assert largest_burst(sink.arrived, window_s=0.5) <= (0.5 + DEPTH_S) * RATE + (1 + num_streams) * CHUNK_BYTES


def test_without_caps_nothing_is_counted_and_no_window_is_set() -> None:
    limits = Limits.of(upload_bytes_per_s=None, download_bytes_per_s=None)
    assert (limits.upload, limits.download, limits.options()) == (None, None, [])


@pytest.mark.parametrize("capped", ["a", "b"])
def test_a_swap_of_a_capped_peer_takes_what_the_cap_says_and_the_measured_link_shows_it(capped: str) -> None:
    """Data flows in both directions and one of them is capped, whichever peer made the offer."""
    num_elements, rate = 1_000_000, RATE / 12  # twelve seconds, so that what a busy processor adds is within the bound
    with LoopbackSwarm(SPEC) as swarm:
        swarm.rates[capped] = (rate, None)
        peers = [Swapping(swarm.peer(name), random_vector(seed, num_elements)) for seed, name in enumerate("ab")]
        began_s = time.monotonic()
        assert len(swap_all(peers)) == 2
        assert is_about(time.monotonic() - began_s, 4 * num_elements / rate)  # includes the time to code the vectors
        links = [peer.peer.service.gossip.link for peer in peers if peer.peer.service.gossip]
        assert is_about(num_elements / links["ab".index(capped)].elements_per_s, 4 * num_elements / rate)


@pytest.mark.parametrize("side", ["donor", "newcomer"])
async def test_a_first_fetch_is_capped_on_either_side(side: str, tmp_path: Path) -> None:
    source, num_bytes = tmp_path / "state", 8 << 20
    source.write_bytes(bytes(num_bytes))
    states = StateServer(SPEC)
    states.saved = describe_state(source, layout="layout", num_elements=10, progress=0.0)
    server = GrpcServer(Sink(states), upload(RATE) if side == "donor" else Limits())
    await server.start("127.0.0.1", 0)
    began_s = time.monotonic()
    transport = caller(download(RATE) if side == "newcomer" else Limits())
    manifest = await fetch_state(
        transport,
        [Candidate("sink", f"127.0.0.1:{server.port}")],
        admission_of(SPEC, transport, num_bytes=num_bytes),
        target=tmp_path / "fetched",
    )
    assert manifest is not None
    assert is_about(time.monotonic() - began_s, num_bytes / RATE)
    await server.stop(0.0)


def test_a_small_message_does_not_wait_behind_chunks() -> None:
    async def main() -> None:
        throttle = Throttle(1e6)
        chunk = asyncio.create_task(throttle.take(5_000_000))
        await asyncio.sleep(0)
        await asyncio.wait_for(throttle.take(100), 0.5)
        assert not chunk.done()
        chunk.cancel()

    run_virtual(main())


def test_unused_time_is_not_saved_up() -> None:
    async def main() -> None:
        throttle = Throttle(1e6)
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.5)
        began_s = loop.time()
        await throttle.take(200_000)
        assert loop.time() - began_s == pytest.approx(0.2 - DEPTH_S)

    run_virtual(main())
