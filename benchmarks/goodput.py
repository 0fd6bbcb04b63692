"""Goodput of one swap on plain loopback, both ways at once, beside a bare gRPC stream and a raw TCP connection.

    python benchmarks/goodput.py [--quick] [--json FILE]

Two processes, one for each side, as in real life. The swap is the production one: coding, digests, verification, commit. The
bare stream sends messages of the same sizes and does nothing with them. All three are measured one after the other, several
times, and the best of each counts: the machine is shared. "Bytes" are payload bytes, both directions added up.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import torch
import uvloop
from claims import Claim, run

from noloco_p2p.codec import CHUNK_ELEMENTS, chunk_bounds, get_codec
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.fetch import StateServer
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.runner import RoundRunner
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.net import options
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.spec import OuterSpec, RunSpec

SPEC = RunSpec(name="goodput", outer=OuterSpec(inner_steps=1, max_wait_s=120.0))
CODECS = (SPEC.codec.slow_weights, SPEC.codec.outer_momentum, SPEC.codec.outer_gradient)


class OneOther:
    """A directory that knows one peer."""

    def __init__(self) -> None:
        self.others: list[Candidate] = []

    def live(self) -> Sequence[Candidate]:
        return self.others


def start_loop() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def on(loop: asyncio.AbstractEventLoop, coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(300)


def swap_side(name: str, pipe: Any, num_elements: int, repeats: int) -> None:
    """One side of the swap: a full peer but for the DHT and the model."""
    torch.set_num_threads(1)
    loop, pace, directory = start_loop(), Pace(1), OneOther()

    def hello() -> Hello:
        return Hello(name, SPEC.name, SPEC.digest())

    async def build() -> tuple[RoundRunner, GrpcServer]:
        runner = RoundRunner(
            hello=hello,
            transport=GrpcTransport(hello),
            directory=directory,
            pace=pace,
            executor=ThreadPoolExecutor(1),
            rng=random.Random(name),
        )
        service = PeerService(runner=runner, states=StateServer(SPEC), status=lambda: (hello(), "training", 0, 0.0))
        server = GrpcServer(service)
        await server.start("127.0.0.1", 0)
        return runner, server

    runner, server = on(loop, build())
    exchange = Exchange(spec=SPEC, loop=loop, runner=runner, pace=pace)
    pipe.send(server.port)
    other, port = pipe.recv()
    if name == "a":  # one side offers, so that every repeat takes the same path
        directory.others = [Candidate(other, f"127.0.0.1:{port}")]
    slow, momentum = torch.randn(num_elements), torch.randn(num_elements) * 1e-3
    for index in range(repeats):
        pipe.recv()
        began_s = time.monotonic()
        exchange.open(index, progress=0.0, slow_weights=slow, outer_momentum=momentum)
        if name == "b":  # the answering side has nobody to ask: it must not give up before it is asked
            while runner._round.wants_partner:
                time.sleep(0.0005)
        exchange.stage(lambda: (slow[start:stop] for start, stop in chunk_bounds(num_elements)))
        outcome = exchange.collect(120.0)
        assert isinstance(outcome, Swapped), outcome
        pipe.send((time.monotonic() - began_s, outcome.received.bytes_sent))
    on(loop, server.stop(0.1))


def bare_side(name: str, pipe: Any, num_elements: int, repeats: int) -> None:
    """The same messages over a bidirectional stream of bytes, without coding them or looking at them."""
    loop = start_loop()
    sizes = [get_codec(codec).num_bytes(stop - start) for codec in CODECS for start, stop in chunk_bounds(num_elements)]
    payloads = {size: bytes(size) for size in set(sizes)}
    served = threading.Event()

    async def messages() -> AsyncIterator[bytes]:
        for size in sizes:
            yield payloads[size]

    async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
        async def send() -> None:
            async for message in messages():
                await context.write(message)

        sender = asyncio.create_task(send())
        async for _ in requests:
            pass
        await sender
        served.set()

    async def serve() -> tuple[Any, int]:
        server = grpc.aio.server(options=options.SERVER)
        method = grpc.stream_stream_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", {"Stream": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    async def call(port: int) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options.CLIENT) as channel:
            stream = channel.stream_stream("/bare.Bare/Stream")(messages())
            async for _ in stream:
                pass

    server, port = on(loop, serve())
    pipe.send(port)
    _, other_port = pipe.recv()
    for _ in range(repeats):
        pipe.recv()
        began_s = time.monotonic()
        if name == "a":
            on(loop, call(other_port))
        else:
            assert served.wait(300)
            served.clear()
        pipe.send((time.monotonic() - began_s, sum(sizes)))
    on(loop, server.stop(0.1))


def tcp_side(name: str, pipe: Any, num_elements: int, repeats: int) -> None:
    """The same number of bytes through a socket each way, in writes of one chunk."""
    total = sum(
        get_codec(codec).num_bytes(stop - start) for codec in CODECS for start, stop in chunk_bounds(num_elements)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    _, port = pipe.recv()
    connection = socket.create_connection(("127.0.0.1", port)) if name == "a" else listener.accept()[0]
    block, inbox = bytes(512 * 1024), bytearray(1 << 20)

    def send() -> None:
        for start in range(0, total, len(block)):
            connection.sendall(block[: min(len(block), total - start)])

    for _ in range(repeats):
        pipe.recv()
        began_s = time.monotonic()
        sender = threading.Thread(target=send)
        sender.start()
        left = total
        while left:
            left -= connection.recv_into(inbox, min(left, len(inbox)))
        sender.join()
        pipe.send((time.monotonic() - began_s, total))


def both_sides(side: Callable[..., None], num_elements: int, repeats: int) -> list[float]:
    """MB/s of each repeat, both directions added up."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in "ab":
        pipes[name], theirs = context.Pipe()
        process = context.Process(target=side, args=(name, theirs, num_elements, repeats))
        process.start()
        processes.append(process)
    ports = {name: pipes[name].recv() for name in "ab"}
    pipes["a"].send(("b", ports["b"]))
    pipes["b"].send(("a", ports["a"]))
    rates = []
    for _ in range(repeats):
        for pipe in pipes.values():
            pipe.send("go")
        (seconds_a, bytes_a), (seconds_b, bytes_b) = pipes["a"].recv(), pipes["b"].recv()
        rates.append((bytes_a + bytes_b) / max(seconds_a, seconds_b) / 1e6)
    for process in processes:
        process.join(30)
    return rates


def codec_speed(name: str) -> tuple[float, float]:
    """GB/s of fp32 (encode, decode) on one thread, best of many full chunks."""
    torch.set_num_threads(1)
    codec, values = get_codec(name), torch.randn(CHUNK_ELEMENTS)
    payload = codec.encode(values)

    def best(action: Callable[[], object]) -> float:
        times = []
        for _ in range(200):
            began_s = time.perf_counter()
            action()
            times.append(time.perf_counter() - began_s)
        return 4 * CHUNK_ELEMENTS / min(times) / 1e9

    return best(lambda: codec.encode(values)), best(lambda: codec.decode(payload, num_elements=CHUNK_ELEMENTS))


def measure(quick: bool) -> list[Claim]:
    num_elements, repeats = (12_500_000, 5) if quick else (125_000_000, 4)
    bare = max(both_sides(bare_side, num_elements, repeats))
    swap = max(both_sides(swap_side, num_elements, repeats))
    tcp = max(both_sides(tcp_side, num_elements, repeats))
    claims = [
        Claim("raw TCP, both ways", tcp, "MB/s"),
        Claim("bare gRPC stream, both ways", bare, "MB/s"),
        Claim("swap, both ways", swap, "MB/s"),
        Claim("swap / bare gRPC stream", swap / bare, "ratio", ">= 0.8", swap / bare >= 0.8),
        Claim("swap / raw TCP", swap / tcp, "ratio"),
    ]
    for name in ("fp32", "bf16", "int8", "int4"):
        for way, speed in zip(("encode", "decode"), codec_speed(name), strict=True):
            claims.append(Claim(f"{name} {way}, one core", speed, "GB/s of fp32", ">= 1", speed >= 1))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
