"""Goodput of one swap on plain loopback, both ways at once, beside a bare gRPC stream and a raw TCP connection.

    python benchmarks/goodput.py [--quick] [--json FILE]

Two processes, one for each side, as in real life. The swap is the production one: coding, digests, checks, commit. The
bare stream sends messages of the same sizes and does nothing with them. Both are over TLS, as between peers; the bare
stream is measured without it, too. All are measured one after the other, several times, and the best of each counts:
the machine is shared. Bytes are of payloads, both directions added up.
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

from noloco_p2p.codec import chunk_bounds, get_codec
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.spec import RunSpec

SPEC = RunSpec(name="goodput", outer=published(inner_steps=1, max_wait_s=120.0))
CODECS = (SPEC.codec.slow_weights, SPEC.codec.outer_momentum, SPEC.codec.outer_gradient)


def swap_side(name: str, pipe: Connection, num_elements: int, repeats: int) -> None:
    """The production swap, with nothing to wait for: its boundary is where it opens."""
    peer = Side(name, pipe, SPEC, num_elements)
    for index in range(repeats):
        pipe.recv()
        began_s = time.monotonic()
        peer.open(index)
        peer.stage()
        outcome = peer.exchange.collect(120.0)
        assert isinstance(outcome, Swapped), outcome
        pipe.send((time.monotonic() - began_s, outcome.received.bytes_sent))
        del outcome
    peer.stop()


def bare_side(name: str, pipe: Connection, num_elements: int, is_plain: bool, repeats: int) -> None:
    stream = BareStream(name, pipe, message_sizes(num_elements), is_plain=is_plain)
    for _ in range(repeats):
        pipe.recv()
        began_s = time.monotonic()
        stream.start()
        stream.wait()
        pipe.send((time.monotonic() - began_s, sum(message_sizes(num_elements))))
    stream.stop()


def message_sizes(num_elements: int) -> list[int]:
    """Those of the chunks of a swap."""
    return [get_codec(codec).num_bytes(stop - start) for codec in CODECS for start, stop in chunk_bounds(num_elements)]


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
        began_s = time.monotonic()
        sender = threading.Thread(target=send)
        sender.start()
        left = total
        while left:
            left -= connection.recv_into(inbox, min(left, len(inbox)))
        sender.join()
        pipe.send((time.monotonic() - began_s, total))


def rates(side: Callable[..., None], num_elements: int, *args: bool, repeats: int) -> list[float]:
    """MB/s of each repeat, both directions added up."""
    results = run_pair(side, num_elements, *args, repeats=repeats)
    return [(a_bytes + b_bytes) / max(a_s, b_s) / 1e6 for (a_s, a_bytes), (b_s, b_bytes) in results]


def measure(quick: bool) -> list[Claim]:
    num_elements, repeats = (12_500_000, 5) if quick else (125_000_000, 4)
    plain = max(rates(bare_side, num_elements, True, repeats=repeats))
    bare = max(rates(bare_side, num_elements, False, repeats=repeats))
    swap = max(rates(swap_side, num_elements, repeats=repeats))
    tcp = max(rates(tcp_side, num_elements, repeats=repeats))
    return [
        Claim("raw TCP, both ways", tcp, "MB/s"),
        Claim("bare gRPC stream without TLS, both ways", plain, "MB/s"),
        Claim("bare gRPC stream, both ways", bare, "MB/s"),
        Claim("swap, both ways", swap, "MB/s"),
        Claim("swap / bare gRPC stream", swap / bare, "ratio", ">= 0.8", swap / bare >= 0.8),
        Claim("swap / raw TCP", swap / tcp, "ratio"),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
