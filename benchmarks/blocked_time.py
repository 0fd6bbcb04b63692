"""Measure how long the end of a round blocks training, with 125M parameters on 100 Mbit/s and a 50 ms round trip.

    python benchmarks/blocked_time.py [--quick] [--json FILE]

Two processes are joined by a link proxy. A round of training is replaced by a wait of 60 s, during which the early part
is sent. (With --quick, the wait and the vector are a tenth as long.) Both sides synchronize before the boundary, so the
partner is hardly late; its lateness is reported separately. Blocked time is the time that `stage` and `collect` take.
In eager mode, it includes the later correction, which is applied here as `NoLoCo` applies it. It does not include the
outer step, which every outer optimizer has.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

from claims import Claim, run
from harness.link_proxy import LinkProxy
from pair import Side, run_pair, start_loop

from noloco_p2p.codec import get_codec, vector_bytes
from noloco_p2p.gossip.outcome import Alone, Correction
from noloco_p2p.outer.chunk_filter import ChunkFilter
from noloco_p2p.spec import CodecSpec, OuterSpec, RunSpec
from noloco_p2p.testing.links import LinkProfile

LINK = LinkProfile("100 Mbit/s, 50 ms", down_mbit_s=100, up_mbit_s=100, delay_ms=25, jitter_ms=0)
CODECS = CodecSpec(slow_weights="bf16", outer_momentum="bf16", outer_gradient="int4")


def side(name: str, pipe: Connection, num_elements: int, round_s: float, max_wait_s: float, repeats: int) -> None:
    spec = RunSpec(name="blocked", outer=OuterSpec(inner_steps=1, max_wait_s=max_wait_s), codec=CODECS)
    peer = Side(name, pipe, spec, num_elements)
    training = threading.Event()
    for index in range(repeats):
        pipe.recv()
        peer.open(index)
        until_s = time.monotonic() + round_s
        peer.wait_for_early()
        early_s = round_s - (until_s - time.monotonic())
        training.wait(max(0.0, until_s - time.monotonic()))
        at_boundary_s = time.time()  # both sides share this clock, so the difference is the lateness
        began_s = time.monotonic()
        peer.stage()
        staged_s = time.monotonic()
        outcome = peer.exchange.collect(max_wait_s)
        blocked_s = time.monotonic() - began_s
        assert not isinstance(outcome, Alone), outcome
        correction_s = 0.0
        if max_wait_s == 0:
            correction_s = apply(peer.wait_for_correction(), peer)
            peer.exchange.corrected()
        pipe.send((at_boundary_s, early_s, staged_s - began_s, blocked_s, correction_s))
    peer.stop()


def apply(correction: Correction, peer: Side) -> float:
    """Add `beta h` to the slow and fast weights, as NoLoCo does between two inner steps, and return the time."""
    began_s, fast_weights = time.monotonic(), peer.slow_weights.clone()
    began_s = time.monotonic()
    gates = ChunkFilter([peer.slow_weights.numel()])
    for start, late in gates.late_steps(correction.gradient, beta=peer.spec.outer.beta):
        for vector in (peer.slow_weights, fast_weights):
            vector[start : start + len(late)].add_(late)
    return time.monotonic() - began_s


def through_links() -> Callable[[int], int]:
    """Return a function that puts a link proxy in front of a port. The proxies run until this process ends."""
    loop = start_loop()

    def between(port: int) -> int:
        proxy = LinkProxy(f"127.0.0.1:{port}", LINK)
        asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(10)
        return int(proxy.address.rpartition(":")[2])

    return between


def measure(quick: bool) -> list[Claim]:
    num_elements, round_s, repeats = (12_500_000, 6.0, 2) if quick else (125_000_000, 60.0, 3)
    gradient_mb = vector_bytes(get_codec(CODECS.outer_gradient), num_elements) / 1e6
    transfer_s = gradient_mb * 8 / LINK.up_mbit_s
    claims = [
        Claim("coded gradient (int4)", gradient_mb, "MB"),
        Claim("its transfer at the link's rate", transfer_s, "s"),
    ]
    for mode, max_wait_s in (("waiting", 300.0), ("eager", 0.0)):
        results = run_pair(side, num_elements, round_s, max_wait_s, repeats=repeats, between=through_links())
        both = [result for pair in results for result in pair]
        lateness_s = median(abs(a[0] - b[0]) for a, b in results)
        stage_s, blocked_s, correction_s = (median(result[field] for result in both) for field in (2, 3, 4))
        total_s = blocked_s + correction_s
        claims += [
            Claim(f"{mode}: early part in the background", median(result[1] for result in both), "s"),
            Claim(f"{mode}: partner's lateness", lateness_s, "s"),
            Claim(f"{mode}: coding the gradient", stage_s, "s"),
        ]
        if mode == "eager":
            share = 100 * total_s / round_s
            claims += [
                Claim("eager: correction", correction_s, "s"),
                Claim("eager: blocked, with the correction", total_s, "s"),
                Claim("eager: blocked, share of the round", share, "%", "< 1", share < 1),
            ]
        else:
            least_s = lateness_s + transfer_s
            target = f"<= {1.1 * least_s:.2f} (transfer + lateness, and a tenth)"
            claims.append(Claim("waiting: blocked", total_s, "s", target, total_s <= 1.1 * least_s))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
