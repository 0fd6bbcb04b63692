"""Measure the trainer's loop on an accelerator with a compiled model in bf16: alone, and while it swaps.

    python benchmarks/step_gpu.py [toy] [125M] [1.3B] [--quick] [--json FILE]

Targets: the loop takes at most 2 % more time than a bare PyTorch loop of the same model, and at most 5 % more peak
memory (see `step_loop.py`). MFU is reported for GPUs whose peak rate is known. Without an accelerator, a toy model runs
on the CPU, which tests the script but measures nothing useful.

The partner is a peer in another process, which has the same weights and sleeps instead of training. Its link is first
limited, then as fast as loopback. With `min_inner_steps = 1`, the trainer swaps far more often than with "auto", which
keeps the time for copying, coding and adding at 2 %. A pause is the time between the ends of two inner steps on the
accelerator, minus the median of such times without a partner.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from claims import Claim, line, machine, write
from step_loop import MIB, Bare, Case, Ours, measure

from noloco_p2p import NoLoCo, Peer
from noloco_p2p.gossip.gossip import COST_SHARE
from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.compute import choose_device
from noloco_p2p.trainer.model import build_model

RATES = ("200mbit", "")  # "": unlimited
MEETING_S = 60.0  # for the start of a partner, and again for the first swap with it
LEAVING_S = 15.0
ALONE_STEPS = SYNC_STEPS = 20
# All peers stay at the start of a long schedule, so that none of them is too far behind.
ALL = {"data.source": "stdlib", "data.tokenizer": "bytes", "train.total_steps": 10**6, "outer.min_inner_steps": 1}
SPECS = {
    "toy": PRESETS["tiny"].with_changes(ALL | {"name": "step-toy", "train.batch_size": 4}),
    "125M": PRESETS["small"].with_changes(ALL | {"name": "step-125m"}),
    "1.3B": PRESETS["small"].with_changes(
        ALL
        | {
            "name": "step-1300m",
            "model.vocab_size": 32_000,
            "model.hidden_size": 4096,
            "model.num_layers": 6,
            "model.num_heads": 32,
            "model.mlp_size": 11_008,
            "train.batch_size": 16,
        }
    ),
}


def case_of(name: str, device: torch.device, *, quick: bool) -> Case:
    is_large = name == "1.3B"
    return Case(
        SPECS["toy" if device.type == "cpu" else name],
        device,
        precision="bf16",
        compile=device.type != "cpu",
        micro_batch=8 if is_large else 16,
        num_rounds=1 if quick else 3 if is_large else 5,
        most=0.02,
        inner_steps=5 if quick else 8 if is_large else 15,
    )


class Partner:
    """A peer in another process, which builds its model while the trainer compiles its own."""

    def __init__(self, spec: TrainerSpec, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_partner, args=(theirs, spec, folder), daemon=True)
        self._process.start()

    def begin(self, ticket: str, rate: str, step_s: float) -> None:
        self._pipe.send((ticket, rate, step_s))

    @property
    def is_there(self) -> bool:
        return self._pipe.poll()

    def end(self) -> None:
        """Let the peer leave, and wait until it has left."""
        self._pipe.send(None)
        while self._pipe.poll(MEETING_S) and self._pipe.recv() != "left":
            pass

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(LEAVING_S)
        self._process.kill()


def _partner(pipe: Connection, spec: TrainerSpec, folder: Path) -> None:
    model = build_model(spec.model, sequence_length=spec.data.sequence_length)
    while told := pipe.recv():
        ticket, rate, step_s = told
        settings = PeerSettings(
            state_dir=folder / f"partner-{rate}", listen="127.0.0.1:0", max_upload=rate, max_download=rate
        )
        with Peer.join(ticket, settings) as peer:
            outer = NoLoCo(model, None, peer, save_every_s=0)
            pipe.send("there")
            while not pipe.poll(step_s):
                outer.step()
            pipe.recv()
        pipe.send("left")


class Ends:
    """The ends of inner steps, on the clock of the accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._ends: list[Any] = []

    def mark(self) -> None:
        if self._is_on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        else:
            event = time.monotonic()
        self._ends.append(event)

    def intervals_s(self) -> list[float]:
        if self._is_on_gpu:
            torch.cuda.synchronize()
            return [one.elapsed_time(next_one) / 1e3 for one, next_one in itertools.pairwise(self._ends)]
        return [next_one - one for one, next_one in itertools.pairwise(self._ends)]


class Timed:
    """A function that records how long each of its calls takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.seconds: list[float] = []
        self._function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        began_s = time.monotonic()
        try:
            return self._function(*arguments, **options)
        finally:
            self.seconds.append(time.monotonic() - began_s)


def beside(bare: Bare, ours: Ours, partner: Partner, *, seconds: float) -> Iterator[Claim]:
    """Yield what the trainer waits for, without a partner and with one."""
    device = ours.case.device
    if device.type == "cuda":
        for name, loop in (("bare", bare), ("trainer's", ours)):
            waits = sync_places(loop.steps)
            print("#", *(f"{number} x {place}" for place, number in waits.items()), flush=True)
            yield Claim(f"waits for the GPU in {SYNC_STEPS} steps of the {name} loop", waits.total(), "")
    alone = Ends(device)
    for _ in range(ALONE_STEPS):
        ours.step()
        alone.mark()
    step_s = median(alone.intervals_s())
    for rate in RATES:
        partner.begin(ours.trainer.peer.ticket, rate, step_s)
        yield from swapping(ours, partner, name=rate or "unlimited", step_s=step_s, seconds=seconds)
        partner.end()


def sync_places(steps: Callable[[int], None]) -> Counter[str]:
    """Return where the training thread waits for the GPU, and how often."""
    with warnings.catch_warnings(record=True) as caught:
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()
        warnings.simplefilter("always")
        try:
            steps(SYNC_STEPS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in caught if "synchronizing" in str(warning.message)]
    return Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in found)


def swapping(ours: Ours, partner: Partner, *, name: str, step_s: float, seconds: float) -> Iterator[Claim]:
    outer, peer = ours.trainer.outer, ours.trainer.peer
    until_s, swapped = time.monotonic() + MEETING_S, []
    while not swapped:
        swapped = ours.step()
        if time.monotonic() > until_s:
            there = "a partner, but no swap" if partner.is_there else "no partner"
            print(f"# {name}: {there} within {MEETING_S:.0f} s; {peer.last_fault()}", flush=True)
            return
    exchange, weights, counts = outer._exchange, outer.weights, peer._network.service.counts
    gossip, ends = peer._network.service.gossip, Ends(ours.case.device)
    assert gossip
    assert exchange.read
    exchange.read, weights.add = copying, adding = Timed(exchange.read), Timed(weights.add)
    swaps_at, shares, before = list[int](), list[float](), counts.traffic.bytes_sent
    began_s, blocked_s, failed = time.monotonic(), peer.metrics.blocked_s, counts.failures.total()
    if ours.case.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ends.mark()
    for step in itertools.count():
        swapped = ours.step()
        ends.mark()
        swaps_at += [step] * bool(swapped)
        shares += [swap.share for swap in swapped]
        if time.monotonic() > began_s + seconds:
            break
    intervals = ends.intervals_s()
    took_s = time.monotonic() - began_s
    exchange.read, weights.add = copying._function, adding._function
    pauses = [interval - step_s for interval in intervals]
    at_swaps = [pauses[step] for step in swaps_at] or [math.nan]
    cost_s = gossip.link.cost_s + exchange.added_s
    yield Claim(f"{name}: swaps", len(shares), f"in {took_s:.0f} s")
    yield Claim(f"{name}: failed swaps", counts.failures.total() - failed, "")
    yield Claim(f"{name}: sent", (counts.traffic.bytes_sent - before) / 1e6, "MB")
    yield Claim(f"{name}: a swap carries", 100 * fmean(shares or [math.nan]), "% of the weights")
    yield Claim(f"{name}: a step alone", 1e3 * step_s, "ms")
    yield Claim(f"{name}: a step beside swaps, mean", 1e3 * fmean(intervals), "ms")
    yield Claim(f"{name}: slower than alone", 100 * (fmean(intervals) / step_s - 1), "%")
    yield Claim(f"{name}: pause with a swap, median", 1e3 * median(at_swaps), "ms")
    yield Claim(f"{name}: largest pause with a swap", 1e3 * max(at_swaps), "ms")
    yield Claim(f"{name}: largest pause", 1e3 * max(pauses), "ms")
    blocked = 100 * (peer.metrics.blocked_s - blocked_s) / took_s
    yield Claim(f"{name}: time in NoLoCo, with the wait for the step", blocked, "% of the training thread")
    yield Claim(f"{name}: copying a slice, beside training", 1e3 * fmean(copying.seconds or [math.nan]), "ms")
    yield Claim(f"{name}: coding a slice, CPU time beside training", 1e3 * gossip.link.cost_s, "ms")
    yield Claim(f"{name}: adding a slice, with the wait", 1e3 * fmean(adding.seconds or [math.nan]), "ms")
    yield Claim(f"{name}: adding a slice, CPU time", 1e3 * exchange.added_s, "ms")
    yield Claim(f'{name}: "auto" would swap every', math.ceil(cost_s / COST_SHARE / step_s), "inner steps")
    if ours.case.device.type == "cuda":
        yield Claim(f"{name}: peak memory, with that of the bare loop", torch.cuda.max_memory_allocated() / MIB, "MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["125M", "1.3B"], help=f"some of {', '.join(SPECS)}")
    parser.add_argument("--quick", action="store_true", help="few steps, to test the script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims as JSON")
    args = parser.parse_args()
    device, found = choose_device("auto"), list[Claim]()
    print(
        machine(), torch.cuda.get_device_name(device) if device.type == "cuda" else "toy model on the CPU", flush=True
    )
    for name in args.models:
        case = case_of(name, device, quick=args.quick)
        with tempfile.TemporaryDirectory(prefix="noloco-partner-", ignore_cleanup_errors=True) as folder:
            partner = Partner(case.spec, Path(folder))
            swapped = partial(beside, partner=partner, seconds=5.0 if args.quick else 12.0)
            try:
                for claim in measure(case, beside=swapped):
                    found.append(Claim(f"{name}: {claim.claim}", claim.value, claim.unit, claim.target, claim.met))
                    print(line(found[-1], width=64), flush=True)
                    write(found, args.json)
            finally:
                partner.stop()
        torch.compiler.reset()


if __name__ == "__main__":
    main()
