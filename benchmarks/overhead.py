"""Measure how much a swap in the background slows training: steps per second with a swap, relative to those without.

    python benchmarks/overhead.py [--quick] [--json FILE]

One process trains a small transformer layer on one torch thread. It swaps with a second process, which does nothing
else, through a link proxy in a third process. In real runs, the partner and the links are not on this machine, so the
time that they and other programs use must not count here. There are two figures:

* two cores: the time in which the training thread waits for a core (/proc/thread-self/schedstat) is subtracted. The
  rest is what the network thread and the codecs cost a training thread that always has a core.
* one core: steps per second of processor time of the process, in all its threads.

The same bytes over a bare gRPC stream are measured as well. Windows with and without traffic alternate, and the median
ratio counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from bare_stream import BareStream
from claims import Claim, run
from harness.link_proxy import LinkProxy
from harness.specs import published
from pair import Side, run_pair, start_loop
from torch import nn

from noloco_p2p.codec import chunk_bounds, get_codec
from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.links import LinkProfile

SPEC = RunSpec(name="overhead", outer=published(inner_steps=1, max_wait_s=300.0))
BF16 = get_codec("bf16")  # codec of slow weights and momentum in SPEC


def make_training() -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    batch = torch.randn(8, 64, 256)

    def step() -> None:
        layer(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def side(name: str, pipe: Connection, num_elements: int, repeats: int) -> None:
    peer = Side(name, pipe, SPEC, num_elements)
    step = make_training()
    for index in range(repeats):
        pipe.recv()
        if name == "b":
            peer.open(index)
            peer.wait_for_early()
            peer.stage()
            peer.exchange.collect(300.0)
            pipe.send((0.0, 0.0, 0.0, 0.0))
            continue
        alone = steps_per_s(step, lambda seconds: seconds > 3.0)
        peer.open(index)
        opened_s, others_s = time.monotonic(), time.process_time() - time.thread_time()
        beside = steps_per_s(step, lambda seconds: peer.driver.phase is RoundPhase.EARLY)
        swap_s = time.monotonic() - opened_s
        others_s = time.process_time() - time.thread_time() - others_s
        peer.stage()
        peer.exchange.collect(300.0)
        pipe.send((beside[0] / alone[0], beside[1] / alone[1], swap_s, others_s / swap_s))
    peer.stop()


def bare_side(name: str, pipe: Connection, num_elements: int, repeats: int) -> None:
    """Measure training beside a bare stream with the messages of an early part, which is the baseline of `side`."""
    sizes = [BF16.num_bytes(stop - start) for start, stop in chunk_bounds(num_elements)] * 2
    stream = BareStream(name, pipe, sizes)
    torch.set_num_threads(1)
    step = make_training()
    for _ in range(repeats):
        pipe.recv()
        if name == "b":
            stream.start()
            stream.wait()
            pipe.send((0.0, 0.0, 0.0, 0.0))
            continue
        alone = steps_per_s(step, lambda seconds: seconds > 3.0)
        began_s, others_s = time.monotonic(), time.process_time() - time.thread_time()
        stream.start()
        beside = steps_per_s(step, lambda seconds: stream.is_over())
        seconds = time.monotonic() - began_s
        others_s = time.process_time() - time.thread_time() - others_s
        pipe.send((beside[0] / alone[0], beside[1] / alone[1], seconds, others_s / seconds))
    stream.stop()


def steps_per_s(step: Callable[[], None], is_over: Callable[[float], bool]) -> tuple[float, float]:
    """Train until `is_over`. Return the steps per second without waits for a core, and per second of processor time."""
    began_s, waited_s, cpu_s, steps = time.monotonic(), waited_for_core_s(), time.process_time(), 0
    while not is_over(time.monotonic() - began_s) or not steps:
        step()
        steps += 1
    waited_s = waited_for_core_s() - waited_s
    return steps / (time.monotonic() - began_s - waited_s), steps / (time.process_time() - cpu_s)


def waited_for_core_s() -> float:
    """Return how many seconds this thread has waited for a core since its start."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def measure(quick: bool) -> list[Claim]:
    claims = []
    for mbit_s, least, seconds in ((100, 0.98, 20.0), (1000, 0.88, 5.0)):
        seconds = seconds / 4 if quick else seconds
        num_elements = int(seconds * mbit_s * 1e6 / 8 / 4)  # slow weights and momentum, two bytes each
        link = LinkProfile(f"{mbit_s} Mbit/s", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=1, jitter_ms=0)
        loop = start_loop()

        def between(port: int, link: LinkProfile = link, loop: asyncio.AbstractEventLoop = loop) -> int:
            proxy = LinkProxy(f"127.0.0.1:{port}", link)
            asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(10)
            return int(proxy.address.rpartition(":")[2])

        for what, one_side in (("a bare stream", bare_side), ("a swap", side)):
            results = run_pair(one_side, num_elements, repeats=3 if quick else 7, between=between)
            two, one, seconds_taken, others = (median(a[field] for a, _ in results) for field in range(4))
            goodput = num_elements * 4 * 8 / seconds_taken / 1e6
            where = f"{what} at {mbit_s} Mbit/s"
            target, met = (f">= {least}", bool(two >= least)) if one_side is side else ("", None)
            claims += [
                Claim(f"{where}: goodput each way", goodput, "Mbit/s"),
                Claim(f"{where}: processor time in the training process", 100 * others, "% of a core"),
                Claim(f"{where}: training beside it, two cores", two, "of its speed", target, met),
                Claim(f"{where}: training beside it, one core", one, "of its speed"),
            ]
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
