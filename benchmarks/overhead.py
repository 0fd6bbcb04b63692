"""What a swap costs the training beside it: steps a second while it runs both ways, against none, in the same run.

    python benchmarks/overhead.py [--quick] [--json FILE]

One process trains a small transformer layer on one torch thread and swaps with another process, which does nothing
else, over a link proxy in a third one. All of them share this machine's cores, so partner and proxy cost training
something too; in real life they are elsewhere. So the processor time that the training process itself spends on the
swap, in all threads but the training one, is told beside it. Windows with and without a swap take turns; the median
counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

import torch
from claims import Claim, run
from pair import Side, run_pair, start_loop
from torch import nn

from noloco_p2p.gossip.round import Phase
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.link_proxy import LinkProfile, LinkProxy
from noloco_p2p.testing.specs import published

SPEC = RunSpec(name="overhead", outer=published(inner_steps=1, max_wait_s=300.0))


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
            pipe.send((0.0, 0.0, 0.0))
            continue
        alone = steps_per_s(step, lambda seconds: seconds > 3.0)
        peer.open(index)
        opened_s, others_s = time.monotonic(), time.process_time() - time.thread_time()
        beside = steps_per_s(step, lambda seconds: peer.runner.phase is Phase.EARLY)
        swap_s = time.monotonic() - opened_s
        others_s = time.process_time() - time.thread_time() - others_s
        peer.stage()
        peer.exchange.collect(300.0)
        pipe.send((beside / alone, swap_s, others_s / swap_s))
    peer.stop()


def steps_per_s(step: Callable[[], None], is_over: Callable[[float], bool]) -> float:
    began_s, steps = time.monotonic(), 0
    while not is_over(time.monotonic() - began_s) or not steps:
        step()
        steps += 1
    return steps / (time.monotonic() - began_s)


def measure(quick: bool) -> list[Claim]:
    claims = []
    for mbit_s, least, seconds in ((100, 0.99, 20.0), (1000, 0.88, 5.0)):
        seconds = seconds / 4 if quick else seconds
        num_elements = int(seconds * mbit_s * 1e6 / 8 / 4)  # slow weights and momentum, two bytes each
        link = LinkProfile(f"{mbit_s} Mbit/s", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=1, jitter_ms=0)
        loop = start_loop()

        def between(port: int, link: LinkProfile = link, loop: asyncio.AbstractEventLoop = loop) -> int:
            proxy = LinkProxy(f"127.0.0.1:{port}", link)
            asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(10)
            return int(proxy.address.rpartition(":")[2])

        results = run_pair(side, num_elements, repeats=3 if quick else 7, between=between)
        ratio, swap_s, others = (median(a[field] for a, _ in results) for field in (0, 1, 2))
        goodput = num_elements * 4 * 8 / swap_s / 1e6
        claims += [
            Claim(f"goodput of the swap at {mbit_s} Mbit/s, each way", goodput, "Mbit/s"),
            Claim(
                f"processor time of the swap at {mbit_s} Mbit/s, in the training process", 100 * others, "% of a core"
            ),
            Claim(f"training beside a swap at {mbit_s} Mbit/s", ratio, "of its speed", f">= {least}", ratio >= least),
        ]
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
