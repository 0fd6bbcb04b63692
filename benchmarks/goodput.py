"""Goodput of one swap on plain loopback, both ways at once, beside a bare gRPC stream and a raw TCP connection.

    python benchmarks/goodput.py [--quick] [--json FILE]

Two processes, one for each side, as in real life. The swap is the production one: coding, digests, checks, commit. The
bare stream sends messages of the same sizes and does nothing with them. Both are over TLS, as between peers; the bare
stream is measured without it, too. All are measured one after the other, several times, and the best of each counts:
the machine is shared. Bytes are of payloads, both directions added up. Beside it stands the processor time of both
processes, which tells more where others use the cores, too.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from bare_stream import BareStream
from claims import Claim, run
from harness.specs import published
from pair import Side, run_pair

from noloco_p2p.codec import CHUNK_ELEMENTS, get_codec, num_chunks
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.gossip.pipeline import together
from noloco_p2p.gossip.sections import Coding, section_plans
from noloco_p2p.spec import RunSpec

SPEC = RunSpec(name="goodput", outer=published(inner_steps=1, max_wait_s=120.0))


def swap_side(name: str, pipe: Connection, num_elements: int, repeats: int) -> None:
    """The production swap, with nothing to wait for: its boundary is where it opens."""
    peer = Side(name, pipe, SPEC, num_elements)
    for index in range(repeats):
        pipe.recv()
        began_s, cpu_s = time.monotonic(), time.process_time()
        peer.open(index)
        peer.stage()
        outcome = peer.exchange.collect(120.0)
        assert isinstance(outcome, Swapped), outcome
        pipe.send((time.monotonic() - began_s, outcome.received.bytes_sent, time.process_time() - cpu_s))
        del outcome
    peer.stop()


def bare_side(name: str, pipe: Connection, num_elements: int, is_plain: bool, repeats: int) -> None:
    stream = BareStream(name, pipe, message_sizes(num_elements), is_plain=is_plain)
    for _ in range(repeats):
        pipe.recv()
        began_s, cpu_s = time.monotonic(), time.process_time()
        stream.start()
        stream.wait()
        pipe.send((time.monotonic() - began_s, sum(message_sizes(num_elements)), time.process_time() - cpu_s))
    stream.stop()


def message_sizes(num_elements: int) -> list[int]:
    """Those of a swap."""
    plans = section_plans(SPEC.codec, swap_momentum=SPEC.outer.sends_momentum, num_elements=num_elements)
    codings = [Coding(plan) for plan in plans]
    indices = range(num_chunks(num_elements))
    return [coding.num_bytes(group) for coding in codings for group in together(coding, indices)]


def tcp_side(name: str, pipe: Connection, num_elements: int, repeats: int) -> None:
    """The same number of bytes through a socket each way, in writes of one chunk."""
    total = sum(message_sizes(num_elements))
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    _, address = pipe.recv()
    port = int(address.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port)) if name == "a" else listener.accept()[0]
    block, inbox = bytes(512 * 1024), bytearray(1 << 20)

    def send() -> None:
        for start in range(0, total, len(block)):
            connection.sendall(block[: min(len(block), total - start)])

    for _ in range(repeats):
        pipe.recv()
        began_s, cpu_s = time.monotonic(), time.process_time()
        sender = threading.Thread(target=send)
        sender.start()
        left = total
        while left:
            left -= connection.recv_into(inbox, min(left, len(inbox)))
        sender.join()
        pipe.send((time.monotonic() - began_s, total, time.process_time() - cpu_s))


def rates(side: Callable[..., None], num_elements: int, *args: bool, repeats: int) -> tuple[float, float]:
    """MB/s, both directions added up, and milliseconds of processor time per MB; the best of the repeats of each."""
    results = run_pair(side, num_elements, *args, repeats=repeats)
    speeds = [(a[1] + b[1]) / max(a[0], b[0]) / 1e6 for a, b in results]
    costs = [1e3 * (a[2] + b[2]) / ((a[1] + b[1]) / 1e6) for a, b in results]
    return max(speeds), min(costs)


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
    plain, _ = rates(bare_side, num_elements, True, repeats=repeats)
    bare, bare_cost = rates(bare_side, num_elements, False, repeats=repeats)
    swap, swap_cost = rates(swap_side, num_elements, repeats=repeats)
    tcp, _ = rates(tcp_side, num_elements, repeats=repeats)
    claims = [
        Claim("raw TCP, both ways", tcp, "MB/s"),
        Claim("bare gRPC stream without TLS, both ways", plain, "MB/s"),
        Claim("bare gRPC stream, both ways", bare, "MB/s"),
        Claim("swap, both ways", swap, "MB/s"),
        Claim("swap / bare gRPC stream", swap / bare, "ratio", ">= 0.6", swap / bare >= 0.6),
        Claim("swap / raw TCP", swap / tcp, "ratio"),
        Claim("bare gRPC stream: processor time of both sides", bare_cost, "ms/MB"),
        Claim("swap: processor time of both sides", swap_cost, "ms/MB"),
    ]
    for name in ("fp32", "bf16", "int8", "int4"):
        for way, speed in zip(("encode", "decode"), codec_speed(name), strict=True):
            claims.append(Claim(f"{name} {way}, one core", speed, "GB/s of fp32", ">= 1", speed >= 1))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
