"""What a swap costs the training beside it: steps a second while it runs both ways, against none, in the same run.

    python benchmarks/overhead.py [--quick] [--json FILE]

One process trains a small transformer layer on one torch thread and swaps with another process, which does nothing
else, over a link proxy in a third one. Partner and proxy are elsewhere in real life, so they must not cost training
anything here:

* two cores: the time for which Linux lets the training thread wait for a core (/proc/.../schedstat) is taken off. What
  is left of the cost is what the network thread and the codecs do to a training thread with a core of its own.
* one core: the training process has a core for itself, all its threads on it; partner and proxy have another one.

The same bytes over a bare gRPC stream are measured as well, and so is the processor time that the training process
spends on either, in all threads but the training one. Windows with and without traffic take turns; the median counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from bare_stream import BareStream
from claims import Claim, run
from harness.specs import published
from pair import Side, run_pair, start_loop
from torch import nn

from noloco_p2p.codec import chunk_bounds, get_codec
from noloco_p2p.gossip.round_events import Phase
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.link_proxy import LinkProfile, LinkProxy

SPEC = RunSpec(name="overhead", outer=published(inner_steps=1, max_wait_s=300.0))
BF16 = get_codec("bf16")  # slow weights and momentum, as SPEC has them


def make_training() -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    batch = torch.randn(8, 64, 256)

    def step() -> None:
        layer(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def side(name: str, pipe: Connection, num_elements: int, is_one_core: bool, repeats: int) -> None:
    take_cores(name, is_one_core)
    peer = Side(name, pipe, SPEC, num_elements)
    step = make_training()
    for index in range(repeats):
        pipe.recv()
        if name == "b":
            peer.open(index)
            peer.wait_for_early()
            peer.stage()
            peer.exchange.collect(300.0)
            pipe.send((0.0, 0.0, 0.0))
            continue
        alone = steps_per_s(step, lambda seconds: seconds > 3.0)
        peer.open(index)
        opened_s, others_s = time.monotonic(), time.process_time() - time.thread_time()
        beside = steps_per_s(step, lambda seconds: peer.driver.phase is Phase.EARLY)
        swap_s = time.monotonic() - opened_s
        others_s = time.process_time() - time.thread_time() - others_s
        peer.stage()
        peer.exchange.collect(300.0)
        pipe.send((beside / alone, swap_s, others_s / swap_s))
    peer.stop()


def bare_side(name: str, pipe: Connection, num_elements: int, is_one_core: bool, repeats: int) -> None:
    """The messages of the early part, which is what the other one is measured by."""
    take_cores(name, is_one_core)
    sizes = [BF16.num_bytes(stop - start) for start, stop in chunk_bounds(num_elements)] * 2
    stream = BareStream(name, pipe, sizes)
    torch.set_num_threads(1)
    step = make_training()
    for _ in range(repeats):
        pipe.recv()
        if name == "b":
            stream.start()
            stream.wait()
            pipe.send((0.0, 0.0, 0.0))
            continue
        alone = steps_per_s(step, lambda seconds: seconds > 3.0)
        began_s, others_s = time.monotonic(), time.process_time() - time.thread_time()
        stream.start()
        beside = steps_per_s(step, lambda seconds: stream.is_over())
        seconds = time.monotonic() - began_s
        others_s = time.process_time() - time.thread_time() - others_s
        pipe.send((beside / alone, seconds, others_s / seconds))
    stream.stop()


def steps_per_s(step: Callable[[], None], is_over: Callable[[float], bool]) -> float:
    """Of the time in which this thread had a core or waited for something else than a core."""
    began_s, waited_s, steps = time.monotonic(), waited_for_core_s(), 0
    while not is_over(time.monotonic() - began_s) or not steps:
        step()
        steps += 1
    return steps / (time.monotonic() - began_s - (waited_for_core_s() - waited_s))


def waited_for_core_s() -> float:
    """Of this thread since its start. 0 for a process with one core, which has that to itself."""
    if len(os.sched_getaffinity(0)) == 1:
        return 0.0
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def take_cores(name: str, is_one_core: bool) -> None:
    """With `is_one_core` the first core is a's alone; the others, and the proxy, have the second one."""
    if is_one_core:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0 if name == "a" else 1]})


def measure(quick: bool) -> list[Claim]:
    claims = []
    cores = sorted(os.sched_getaffinity(0))
    for mbit_s, num_cores, least, seconds in ((100, 2, 0.98, 20.0), (100, 1, 0.0, 20.0), (1000, 2, 0.88, 5.0)):
        seconds = seconds / 4 if quick else seconds
        num_elements = int(seconds * mbit_s * 1e6 / 8 / 4)  # slow weights and momentum, two bytes each
        link = LinkProfile(f"{mbit_s} Mbit/s", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=1, jitter_ms=0)
        os.sched_setaffinity(0, cores[1:2] if num_cores == 1 else cores)  # threads begun from here on
        loop = start_loop()
        os.sched_setaffinity(0, cores)

        def between(port: int, link: LinkProfile = link, loop: asyncio.AbstractEventLoop = loop) -> int:
            proxy = LinkProxy(f"127.0.0.1:{port}", link)
            asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(10)
            return int(proxy.address.rpartition(":")[2])

        for what, one_side in (("a bare stream", bare_side), ("a swap", side)):
            results = run_pair(one_side, num_elements, num_cores == 1, repeats=3 if quick else 7, between=between)
            ratio, seconds_taken, others = (median(a[field] for a, _ in results) for field in (0, 1, 2))
            goodput = num_elements * 4 * 8 / seconds_taken / 1e6
            told = (f">= {least}", ratio >= least) if one_side is side and least else ()
            where = f"{what} at {mbit_s} Mbit/s, {num_cores} core" + "s" * (num_cores > 1)
            claims += [
                Claim(f"{where}: goodput each way", goodput, "Mbit/s"),
                Claim(f"{where}: processor time in the training process", 100 * others, "% of a core"),
                Claim(f"{where}: training beside it", ratio, "of its speed", *told),
            ]
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
