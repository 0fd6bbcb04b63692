"""Compare an inner step of the trainer's loop with one of a bare PyTorch loop, alone and while it swaps.

    python benchmarks/step.py [tiny] [125M] [1.3B] [--quick] [--json FILE]

The bare loop does what a script without noloco_p2p does with the same model: it takes prepared batches, and runs the
forward and backward pass, clipping and the same optimizers as the trainer. The trainer's loop belongs to a real peer
with a network thread and a directory. It reads its data, takes outer steps, and copies and writes checkpoints, but does
not evaluate. Rounds of both loops alternate in one process, and pairs of rounds are compared.

`tiny` is the model of that preset, in fp32 on one thread of the CPU. The others are compiled models in bf16 on an
accelerator. Targets: the loop takes at most 3 % more time than the bare one on the CPU and 2 % on an accelerator, and
at most 5 % more peak memory. MFU is reported for GPUs whose peak rate is known.

The trainer then swaps with a peer in another process, which has the same weights and sleeps instead of training. Its
link is first limited, then as fast as loopback. With `min_inner_steps = 1`, the trainer swaps far more
often than with "auto", which keeps the time for copying, coding and adding at 2 %. A pause is the time between the ends
of two inner steps on the accelerator, minus the median of such times without a partner.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import torch
from claims import Claim, line, machine, write
from torch import Tensor

from noloco_p2p import NoLoCo, Peer, TrainerSpec
from noloco_p2p.devices import describe
from noloco_p2p.optim.inner import make_inner_optimizers
from noloco_p2p.outer.mixing import Swapped
from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import PeerSettings
from noloco_p2p.trainer.compute import choose_device, flops_per_token, peak_flops
from noloco_p2p.trainer.loop import Trainer
from noloco_p2p.trainer.model import build_model, hidden_matrices

MIB = 1 << 20
WARM_STEPS = 3
RATES = ("200mbit", "")  # "": unlimited
MEETING_S = 60.0  # for the start of a partner, and again for the first swap with it
LEAVING_S = 15.0
ALONE_STEPS = SYNC_STEPS = 20
# All peers stay at the start of a long schedule, so that none of them is too far behind.
ALL = {"data.source": "stdlib", "data.tokenizer": "bytes", "train.total_steps": 10**6, "outer.min_inner_steps": 1}
SPECS = {
    "tiny": PRESETS["tiny"].with_changes({"name": "step"}),
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


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. `most` is the allowed overhead, as a share of a bare step."""

    spec: TrainerSpec
    device: torch.device
    precision: Literal["fp32", "bf16"]
    compile: bool
    micro_batch: int
    num_rounds: int
    most: float
    inner_steps: int  # measured at once


def case_of(name: str, *, quick: bool) -> Case:
    if name == "tiny":
        torch.set_num_threads(1)
        return Case(
            SPECS[name],
            torch.device("cpu"),
            precision="fp32",
            compile=False,
            micro_batch=SPECS[name].train.batch_size,
            num_rounds=5 if quick else 21,
            most=0.03,
            inner_steps=10 if quick else 25,
        )
    is_large = name == "1.3B"
    return Case(
        SPECS[name],
        choose_device("auto"),
        precision="bf16",
        compile=True,
        micro_batch=8 if is_large else 16,
        num_rounds=1 if quick else 3 if is_large else 5,
        most=0.02,
        inner_steps=5 if quick else 8 if is_large else 15,
    )


class Bare:
    """The loop of a script that uses only PyTorch."""

    def __init__(self, case: Case, batches: list[Tensor]) -> None:
        train = case.spec.train
        self.case = case
        with case.device:
            self.model = build_model(case.spec.model, sequence_length=case.spec.data.sequence_length)
        if case.compile:
            self.model.compile()
        matrices = hidden_matrices(self.model)
        self.optimizers = make_inner_optimizers(self.model.parameters(), train, matrices=matrices)
        self.batches = itertools.cycle(batches)

    def steps(self, number: int) -> None:
        case = self.case
        for _ in range(number):
            batch = next(self.batches)
            parts = batch.split(case.micro_batch)
            for part in parts:
                part = part.to(case.device, non_blocking=True)
                with torch.autocast(case.device.type, torch.bfloat16, enabled=case.precision == "bf16"):
                    loss = self.model(input_ids=part, labels=part).loss
                (loss / len(parts)).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), case.spec.train.clip_norm)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = case.spec.train.learning_rate
                optimizer.step()
                optimizer.zero_grad()


class Ours:
    """The trainer's loop without evaluation, whose cost depends on the spec."""

    def __init__(self, case: Case, trainer: Trainer) -> None:
        self.case = case
        self.trainer = trainer

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def step(self) -> list[Swapped]:
        trainer = self.trainer
        assert trainer.batches
        trainer.inner_step(next(trainer.batches), progress=trainer.outer.progress, seed=1)
        return trainer.outer.step()


def measure(case: Case, beside: Callable[[Bare, Ours], Iterable[Claim]]) -> Iterator[Claim]:
    """Yield each claim as soon as it is known. `beside` returns more of them, with both loops still in memory."""
    gc.collect()  # the loops of the case before
    empty = _allocated_bytes(case.device)
    torch.manual_seed(0)
    spec = case.spec
    shape = (spec.train.batch_size, spec.data.sequence_length)
    batches = [torch.randint(0, 256, shape) for _ in range(8)]
    if case.device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    bare = Bare(case, batches)
    bare.steps(WARM_STEPS)  # compiles the model and fills caches
    plain = _peak_bytes(bare.steps, case.device) - empty
    before = _allocated_bytes(case.device)
    with trainer_of(case) as trainer:
        ours = Ours(case, trainer)
        ours.steps(WARM_STEPS)
        yield from _memory_claims(plain, _peak_bytes(ours.steps, case.device) - before)
        pairs = [(timed(bare.steps, case), timed(ours.steps, case)) for _ in range(case.num_rounds)]
        yield from _time_claims(case, pairs, trainer)
        yield from beside(bare, ours)
        began_s = time.monotonic()
        trainer.outer.save_in_background()  # blocks for the duration of the copy
        saving_s = time.monotonic() - began_s
        saving = saving_s / trainer.peer.settings.save_every_s
        yield Claim("a checkpoint holds training up", saving_s * 1e3, "ms")
        yield Claim("which is, one in ten minutes", 100 * saving, "%")


Pair = tuple[tuple[float, float], tuple[float, float]]


def _time_claims(case: Case, pairs: list[Pair], trainer: Trainer) -> list[Claim]:
    spec = case.spec
    bare_s, ours_s = (
        median(seconds for seconds, _ in column) / case.inner_steps for column in zip(*pairs, strict=True)
    )
    overhead, more_work = (median(ours[index] / bare[index] for bare, ours in pairs) - 1 for index in range(2))
    tokens = spec.train.batch_size * spec.data.sequence_length
    parameters = sum(param.numel() for param in trainer.model.parameters())
    claims = [
        Claim("parameters", parameters / 1e6, "million"),
        Claim("sequences a step, tokens in each", spec.train.batch_size, f"x {spec.data.sequence_length}"),
        Claim("a bare step", bare_s * 1e3, "ms"),
        Claim("a step of the trainer, outer step included", ours_s * 1e3, "ms"),
        Claim("tokens of the trainer", tokens / ours_s, "tokens/s"),
        Claim("overhead, median of the pairs", 100 * overhead, "%", f"<= {case.most:.0%}", overhead <= case.most),
        Claim("more processor time of the training thread", 100 * more_work, "%"),
    ]
    if peak := peak_flops(describe(case.device)) if case.device.type == "cuda" else None:
        flops = tokens * flops_per_token(trainer.model, sequence_length=spec.data.sequence_length)
        claims += [
            Claim("MFU of a bare step", 100 * flops / bare_s / peak, "%"),
            Claim("MFU of the trainer", 100 * flops / ours_s / peak, "%"),
        ]
    return claims


def _memory_claims(plain: int, ours: int) -> list[Claim]:
    """Compare the accelerator's peak memory, without what the other loop keeps there."""
    if not plain:
        return []
    more = ours / plain - 1
    return [
        Claim("peak memory of plain training", plain / MIB, "MiB"),
        Claim("peak memory of the trainer", ours / MIB, "MiB"),
        Claim("more than plain training", 100 * more, "%", "<= 5%", more <= 0.05),
    ]


@contextmanager
def trainer_of(case: Case) -> Iterator[Trainer]:
    with tempfile.TemporaryDirectory(prefix="noloco-step-", ignore_cleanup_errors=True) as folder:
        settings = PeerSettings(
            state_dir=Path(folder),
            listen="127.0.0.1:0",
            device=str(case.device),
            precision=case.precision,
            compile=case.compile,
            micro_batch=case.micro_batch,
        )
        with Peer.join(case.spec, settings) as peer:
            trainer = Trainer(peer, say=lambda line: None)
            trainer.model.train()
            yield trainer
            trainer.outer._saver.wait()


def timed(steps: Callable[[int], None], case: Case) -> tuple[float, float]:
    """Return the duration of a round and the processor time of this thread, both in seconds."""
    api = torch.get_device_module(case.device)
    api.synchronize()
    began_s, began_cpu_s = time.monotonic(), time.thread_time()
    steps(case.inner_steps)
    api.synchronize()
    return time.monotonic() - began_s, time.thread_time() - began_cpu_s


def _peak_bytes(steps: Callable[[int], None], device: torch.device) -> int:
    """Return the accelerator's peak memory in a few steps, or 0 for the CPU."""
    if device.type == "cpu":
        return 0
    api = torch.get_device_module(device)
    api.empty_cache()
    api.reset_peak_memory_stats()
    steps(WARM_STEPS)
    return api.max_memory_allocated()


def _allocated_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.get_device_module(device).memory_allocated()


class Partner:
    """A peer in another process, which builds its model while the trainer compiles its own."""

    def __init__(self, spec: TrainerSpec, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_partner, args=(theirs, spec, folder), daemon=True)
        self._process.start()

    def begin(self, ticket: str, rate: str, step_s: float, state: dict[str, Any]) -> None:
        """Let the peer join from `state`, so that it need not wait for the trainer's first checkpoint and fetch it."""
        self._pipe.send((ticket, rate, step_s, state))

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
        ticket, rate, step_s, state = told
        settings = PeerSettings(
            state_dir=folder / f"partner-{rate}", listen="127.0.0.1:0", max_upload=rate, max_download=rate
        )
        with Peer.join(ticket, settings) as peer:
            outer = NoLoCo(model, None, peer, resume=state, save_every_s=0)
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
        partner.begin(ours.trainer.peer.ticket, rate, step_s, ours.trainer.outer.state_dict())
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
    peer = ours.trainer.peer
    until_s, swapped = time.monotonic() + MEETING_S, []
    while not swapped:
        swapped = ours.step()
        if time.monotonic() > until_s:
            there = "a partner, but no swap" if partner.is_there else "no partner"
            print(f"# {name}: {there} within {MEETING_S:.0f} s; {peer.last_fault()}", flush=True)
            return
    counts, ends = peer._network.service.counts, Ends(ours.case.device)
    swaps_at, shares, before = list[int](), list[float](), counts.bytes_sent
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
    pauses = [interval - step_s for interval in intervals]
    at_swaps = [pauses[step] for step in swaps_at] or [math.nan]
    yield Claim(f"{name}: swaps", len(shares), f"in {took_s:.0f} s")
    yield Claim(f"{name}: failed swaps", counts.failures.total() - failed, "")
    yield Claim(f"{name}: sent", (counts.bytes_sent - before) / 1e6, "MB")
    yield Claim(f"{name}: a swap carries", 100 * fmean(shares or [math.nan]), "% of the weights")
    yield Claim(f"{name}: a step alone", 1e3 * step_s, "ms")
    yield Claim(f"{name}: a step beside swaps, mean", 1e3 * fmean(intervals), "ms")
    yield Claim(f"{name}: slower than alone", 100 * (fmean(intervals) / step_s - 1), "%")
    yield Claim(f"{name}: pause with a swap, median", 1e3 * median(at_swaps), "ms")
    yield Claim(f"{name}: largest pause with a swap", 1e3 * max(at_swaps), "ms")
    yield Claim(f"{name}: largest pause", 1e3 * max(pauses), "ms")
    blocked = 100 * (peer.metrics.blocked_s - blocked_s) / took_s
    yield Claim(f"{name}: time in NoLoCo, with the wait for the step", blocked, "% of the training thread")
    if ours.case.device.type == "cuda":
        yield Claim(f"{name}: peak memory, with that of the bare loop", torch.cuda.max_memory_allocated() / MIB, "MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["tiny"], choices=SPECS, help="the models to measure")
    parser.add_argument("--quick", action="store_true", help="few steps, to test the script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims as JSON")
    args = parser.parse_args()
    found = list[Claim]()
    print(machine(), torch.cuda.get_device_name() if torch.cuda.is_available() else "", flush=True)
    for name in args.models:
        case = case_of(name, quick=args.quick)
        with tempfile.TemporaryDirectory(prefix="noloco-partner-", ignore_cleanup_errors=True) as folder:
            partner = Partner(case.spec, Path(folder))
            seconds = 5.0 if args.quick else 12.0
            try:
                for claim in measure(case, partial(beside, partner=partner, seconds=seconds)):
                    found.append(Claim(f"{name}: {claim.claim}", claim.value, claim.unit, claim.target, claim.met))
                    print(line(found[-1], width=64), flush=True)
                    write(found, args.json)
            finally:
                partner.stop()
        torch.compiler.reset()


if __name__ == "__main__":
    main()
