"""Measure the goodput of a swap on loopback, in both directions at once, against a bare gRPC stream and a TCP socket.

    python benchmarks/goodput.py [--quick] [--json FILE]

Each side is a separate process. The swap runs the production code, with encoding, digests, checks and commits. The bare
stream sends messages of the same sizes and ignores their content. Both use TLS, as peers do; the bare stream is also
measured without TLS. The methods take turns several times, and the best result of each counts, because the machine is
shared. Bytes are payload bytes in both directions. While other programs use the cores, the processor time of all
threads of both processes is the better measure. The codecs of the published runs (bf16, bf16, int4) and those that
`noloco init` writes are both measured.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from bare_stream import BareStream
from claims import Claim, run
from harness.specs import published
from pair import Side, run_pair

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.presets import BEST_CODEC
from noloco_p2p.spec import OuterSpec, RunSpec

PUBLISHED = RunSpec(name="goodput", outer=published(inner_steps=1, max_wait_s=120.0))
AS_INIT = RunSpec(name="goodput", outer=OuterSpec(inner_steps=1, max_wait_s=120.0), codec=BEST_CODEC)


def swap_side(name: str, pipe: Connection, num_elements: int, spec: RunSpec, repeats: int) -> None:
    """Swap with the production code. The boundary is reached as soon as a round opens, so no waiting is measured."""
    peer = Side(name, pipe, spec, num_elements)
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
    """Return the sizes of the encoded chunks in a swap of the published runs."""
    plans = section_plans(PUBLISHED.codec, swap_momentum=True, num_elements=num_elements)
    return [plan.codec.num_bytes(stop - start) for plan in plans for start, stop in chunk_bounds(num_elements)]


def tcp_side(name: str, pipe: Connection, num_elements: int, repeats: int) -> None:
    """Send the same number of bytes in each direction through a TCP socket, one chunk per write."""
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


Rate = tuple[float, float]  # MB/s of both directions, milliseconds of processor time for each MB


def rate(side: Callable[..., None], num_elements: int, *args: object, repeats: int) -> Rate:
    """Return the highest speed and the lowest processor time among the repeats."""
    results = run_pair(side, num_elements, *args, repeats=repeats)
    mb = [(a[1] + b[1]) / 1e6 for a, b in results]
    speeds = [size / max(a[0], b[0]) for size, (a, b) in zip(mb, results, strict=True)]
    costs = [1e3 * (a[2] + b[2]) / size for size, (a, b) in zip(mb, results, strict=True)]
    return max(speeds), min(costs)


def measure(quick: bool) -> list[Claim]:
    num_elements, repeats = (12_500_000, 5) if quick else (125_000_000, 4)
    rates = {
        "raw TCP": rate(tcp_side, num_elements, repeats=repeats),
        "bare gRPC stream without TLS": rate(bare_side, num_elements, True, repeats=repeats),
        "bare gRPC stream": rate(bare_side, num_elements, False, repeats=repeats),
        "swap": rate(swap_side, num_elements, PUBLISHED, repeats=repeats),
        "swap as init writes it": rate(swap_side, num_elements, AS_INIT, repeats=repeats),
    }
    speeds = {name: speed for name, (speed, _) in rates.items()}
    ratio = speeds["swap"] / speeds["bare gRPC stream"]
    return [
        *(Claim(f"{name}, both ways", speed, "MB/s") for name, speed in speeds.items()),
        Claim("swap / bare gRPC stream", ratio, "ratio", ">= 0.6", ratio >= 0.6),
        Claim("swap / raw TCP", speeds["swap"] / speeds["raw TCP"], "ratio"),
        *(Claim(f"{name}: processor time of both sides", cost, "ms/MB") for name, (_, cost) in rates.items()),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
