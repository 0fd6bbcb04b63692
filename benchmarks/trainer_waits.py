"""Measure what swaps cost a trainer: how long it waits, how much slower and larger it gets, and what it gets for that.

    python benchmarks/trainer_waits.py [--model gpt2] [--step-s 1] [--seconds 120] [--mbit-s 200,1000] [--json FILE]
    python benchmarks/trainer_waits.py --elements N [...]

Two processes with the code of real peers swap over TLS and a link proxy. One of them trains a Llama with 110M
parameters and AdamW on one core. With --model, it is GPT-2 small (124M) or a Qwen2 of 494M parameters from
transformers, in bf16, and a step accumulates two batches and is followed by that of a scheduler, as in a user's script.
With --elements, it has N synthetic weights and SGD instead, and its inner step computes for --step-s seconds of
processor time. Its partner has the same weights and sleeps instead of computing, because in a real run it would be on
another machine. The trainer alternates four times between training without the hooks of NoLoCo, as a bare loop, and
with them but without a partner, each time for 6 % of --seconds. Then it trains with a partner. A step with a swap is
one during most of which a swap moves. It is compared with steps without a partner, and with those between swaps.

A pause is the time for which one inner step waits for the lock of the weights and applies what has arrived. What the
training thread waits for a core meanwhile is subtracted. Memory is the peak of the process minus its peak without
NoLoCo, when model, gradients, optimizer and activations are already there. The target for a step with a swap holds
where a core is free, so what the training thread waits for a core is subtracted there, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import uvloop
from claims import Claim, show
from harness.link_proxy import LinkProxy
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate, Directory, Transport
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.identity import Identity
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.outer.mixing import Swapped
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.spec import ModelSpec, RunSpec
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.testing.peers import MemorySwarm
from noloco_p2p.trainer.model import build_model, causal_lm_loss

SPEC = RunSpec(name="trainer-waits")
LLAMA = ModelSpec(vocab_size=32_000, hidden_size=768, num_layers=12, num_heads=12, mlp_size=2048)
QWEN = Qwen2Config(  # of Qwen2-0.5B
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
CONFIGS = {"gpt2": GPT2Config(), "qwen": QWEN}
NUM_TOKENS = 64  # of a batch
ACCUMULATED = 2  # batches of a step of a model of transformers
NUM_TENSORS = 24  # of synthetic weights
WARM_STEPS = 3
PAIRS, PAIR_SHARE = 4, 0.06  # blocks without hooks and without a partner, each for this share of the time with one
START_S = 10.0
MOST_BLOCKED, MOST_PAUSE_MS, MOST_MIB, MOST_RATIO, MOST_BESIDE = 1.0, 50.0, 256.0, 1.03, 1.05
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    num_elements: int  # 0: a model
    model: str
    step_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    began_s: float
    passes_s: float  # forward and backward
    took_s: float
    waited_passes_s: float  # by the training thread, for a core
    waited_s: float
    has_swap: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    num_elements: int
    seconds: float
    bare: list[Step]
    alone: list[Step]
    beside: list[Step]
    blocked_s: float
    longest_pause_s: float
    memory_bytes: int
    bytes_sent: int
    swaps: int
    failed: int
    link_use: float
    age_steps: float
    share: float  # of the weights in a swap


class Pauses:
    """Measures how long each step of an optimizer pauses for NoLoCo, whose hooks run between the hooks of this one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.total_s = self.longest_s = 0.0
        self._began_s = self._pause_s = 0.0
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._begin)

    def end(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(self._locked)
        optimizer.register_step_post_hook(self._applied)

    def _begin(self, *arguments: object) -> None:
        self._began_s = _own_s()

    def _locked(self, *arguments: object) -> None:
        self._pause_s = _own_s() - self._began_s

    def _applied(self, *arguments: object) -> None:
        self._pause_s += _own_s() - self._began_s
        self.total_s += self._pause_s
        self.longest_s = max(self.longest_s, self._pause_s)


def _waited_s() -> float:
    """Return how long this thread has waited for a core."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def _own_s() -> float:
    """Return the time, without that for which this thread has waited for a core."""
    return time.monotonic() - _waited_s()


def make_training(plan: Plan, *, computes: bool) -> tuple[nn.Module, Optimizer, Callable[[], None]]:
    """Return a model, its optimizer, and a function that computes gradients."""
    torch.manual_seed(0)
    if plan.num_elements:
        sizes = [plan.num_elements // NUM_TENSORS] * NUM_TENSORS
        model: nn.Module = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
    elif plan.model:
        model = AutoModelForCausalLM.from_config(CONFIGS[plan.model], dtype=torch.bfloat16).train()
    else:
        model = build_model(LLAMA, sequence_length=NUM_TOKENS)
    optimizer: Optimizer
    if plan.num_elements:  # without gradients and states, 1B weights need 4 GB in each process
        for param in model.parameters():
            param.grad = torch.tensor(1e-3).expand_as(param)
        optimizer = SGD(model.parameters(), lr=1e-4, foreach=False)
    else:
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    matrix, tokens = torch.randn(256, 256), torch.randint(0, 256, (1, NUM_TOKENS))
    num_batches = ACCUMULATED if plan.model else 1

    def backward() -> None:
        if not computes:
            time.sleep(plan.step_s)
        elif plan.num_elements:
            until_s = time.thread_time() + plan.step_s
            while time.thread_time() < until_s:
                torch.mm(matrix, matrix)
        else:
            optimizer.zero_grad(set_to_none=False)
            for _ in range(num_batches):
                (causal_lm_loss(model, tokens) / num_batches).backward()

    return model, optimizer, backward


class Told:
    """A directory with a given list of live peers."""

    def __init__(self) -> None:
        self.others: list[Candidate] = []

    def live(self) -> Sequence[Candidate]:
        return self.others

    def num_live(self) -> int:
        return len(self.others) + 1

    def knows(self, peer_id: str) -> bool:
        return True

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        return next((candidate for candidate in self.others if candidate.peer_id == peer_id), None)


class Side(MemorySwarm):
    """A peer without a DHT: `member`. It has the network thread, the server, the TLS and the swaps of a real peer."""

    def __init__(self) -> None:
        super().__init__(SPEC)
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            self.session = Session(Identity.load_or_create(Path(folder) / "key"))
        self.directory = Told()
        self.__enter__()
        self.member = self.peer(self.session.identity.peer_id)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()

    def _outside(self, peer_id: str, hello: Callable[[], Hello]) -> tuple[Transport, Directory]:
        return GrpcTransport(hello, session=self.session), self.directory

    async def _connect(self, peer_id: str, service: PeerService) -> None:
        self.server = GrpcServer(service, session=self.session)
        await self.server.start("127.0.0.1", 0)

    async def _disconnect_all(self) -> None:
        await self.server.stop(0.1)


def side(pipe: Connection, plan: Plan, *, computes: bool) -> None:
    """Train, and send a `Found`."""
    peer = Side()
    pipe.send((peer.server.port, peer.session.identity.peer_id, peer.session.key))
    port, peer_id, key = pipe.recv()
    partners = [Candidate(peer_id, f"127.0.0.1:{port}", session_key=key)]
    model, optimizer, backward = make_training(plan, computes=computes)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step)) if plan.model else None
    moved = dict[tuple[float, float], None]()  # from when until when swaps have moved

    def train(seconds: float) -> list[Step]:
        until_s, steps = time.monotonic() + seconds, list[Step]()
        while time.monotonic() < until_s or len(steps) < WARM_STEPS:
            began_s, waited_s = time.monotonic(), _waited_s()
            backward()
            passes_s, waited_passes_s = time.monotonic() - began_s, _waited_s() - waited_s
            optimizer.step()
            if scheduler:
                scheduler.step()
            took_s, waited_s = time.monotonic() - began_s, _waited_s() - waited_s
            steps.append(Step(began_s, passes_s, took_s, waited_passes_s, waited_s))
            if gossip := peer.member.service.gossip:
                moved.update(dict.fromkeys(tuple(gossip.link.swaps)))
        return steps

    def with_swap(step: Step) -> Step:
        ends_s = step.began_s + step.took_s
        shared_s = sum(max(0.0, min(stop, ends_s) - max(start, step.began_s)) for start, stop in moved)
        return replace(step, has_swap=shared_s > step.took_s / 2)

    def train_bare(seconds: float) -> list[Step]:
        """Train without the hooks of the optimizer."""
        hooked: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        kept = [(hooks, dict(hooks)) for hooks in hooked]
        for hooks, _ in kept:
            hooks.clear()
        steps = train(seconds)
        for hooks, entries in kept:
            hooks.update(entries)
        return steps

    train(0.0)
    _forget_peak()
    train(0.0)
    before = _peak_bytes()
    pauses, swaps = Pauses(optimizer), list[Swapped]()
    outer = NoLoCo(model, optimizer, peer.member, save_every_s=0.0, on_swap=swaps.append)
    pauses.end(optimizer)
    train(0.0)
    bare, alone = list[Step](), list[Step]()
    for _ in range(PAIRS):
        bare += train_bare(PAIR_SHARE * plan.seconds)
        alone += train(PAIR_SHARE * plan.seconds)
    gc.collect()
    pipe.send("ready")  # both begin to swap at the same time
    pipe.recv()
    pauses.total_s = pauses.longest_s = 0.0
    _forget_peak()
    peer.directory.others, began_s = partners, time.monotonic()
    beside = train(plan.seconds)
    while not computes and not pipe.poll():  # the trainer may take longer
        train(0.0)
    seconds, counts, gossip = time.monotonic() - began_s, peer.member.service.counts, peer.member.service.gossip
    assert gossip
    found = Found(
        num_elements=outer.weights.num_elements,
        seconds=seconds,
        bare=bare,
        alone=alone,
        beside=[with_swap(step) for step in beside],
        blocked_s=pauses.total_s,
        longest_pause_s=pauses.longest_s,
        memory_bytes=_peak_bytes() - before,
        bytes_sent=counts.bytes_sent,
        swaps=counts.swaps,
        failed=counts.failures.total(),
        link_use=gossip.link.last_minute(peer.loop.time())[1] * 60 / min(60, seconds),
        age_steps=sum(swap.age_steps for swap in swaps) / max(1, len(swaps)),
        share=sum(swap.share for swap in swaps) / max(1, len(swaps)),
    )
    peer.directory.others = []
    peer.member.hold_swaps()
    pipe.send(found)
    peer.__exit__()


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def run_pair(plan: Plan, link: LinkProfile) -> Found:
    """Run the trainer and its partner in two processes, each behind a link, and return what the trainer found."""
    context, loop = multiprocessing.get_context("spawn"), uvloop.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    pipes: list[Any] = []
    processes = []
    for computes in (True, False):
        pipe, theirs = context.Pipe()
        process = context.Process(target=side, args=(theirs, plan), kwargs={"computes": computes}, daemon=True)
        process.start()
        pipes.append(pipe)
        processes.append(process)
    for pipe, (port, *rest) in zip(reversed(pipes), [pipe.recv() for pipe in pipes], strict=True):
        proxy = LinkProxy(f"127.0.0.1:{port}", link)
        asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(START_S)
        pipe.send((int(proxy.address.rpartition(":")[2]), *rest))
    trainer, partner = pipes
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    found = trainer.recv()
    partner.send("end")
    partner.recv()
    for process in processes:
        process.join(30)
    return found


def own_time(step: Step) -> float:
    return step.took_s - step.waited_s


def ratio_of(some: Sequence[Step], others: Sequence[Step], time_of: Callable[[Step], float]) -> float:
    return median(map(time_of, some)) / median(map(time_of, others)) if some else math.nan


def measure(plan: Plan, mbit_s: float) -> list[Claim]:
    found = run_pair(plan, LinkProfile("link", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=10, jitter_ms=0))
    name = f"{plan.model} {found.num_elements / 1e6:.3g}M, {mbit_s:g} Mbit/s".strip()
    bare_s = median(step.took_s for step in found.bare)
    swapping = [step for step in found.beside if step.has_swap]
    others = [step for step in found.beside if not step.has_swap]
    step_s = fmean(step.took_s for step in found.beside)
    beside = ratio_of(swapping, found.alone, lambda step: step.took_s)
    own, ratio = ratio_of(swapping, found.alone, own_time), ratio_of(found.alone, found.bare, own_time)
    passes = ratio_of(swapping, found.alone, lambda step: step.passes_s - step.waited_passes_s)
    blocked = 100 * found.blocked_s / found.seconds
    pause_ms, memory = 1e3 * found.longest_pause_s, found.memory_bytes / MIB
    goodput = found.bytes_sent * 8e-6 / found.seconds
    return [
        Claim(f"{name}: blocked", blocked, "% of the time", f"< {MOST_BLOCKED:g}", blocked < MOST_BLOCKED),
        Claim(f"{name}: longest pause", pause_ms, "ms", f"< {MOST_PAUSE_MS:g}", pause_ms < MOST_PAUSE_MS),
        Claim(f"{name}: memory", memory, "MiB", f"< {MOST_MIB:g}", memory < MOST_MIB),
        Claim(f"{name}: a bare step", bare_s, "s"),
        Claim(f"{name}: a step without a partner", ratio, "of a bare one", f"<= {MOST_RATIO:g}", ratio <= MOST_RATIO),
        Claim(f"{name}: a step with a swap", own, "of one alone", f"<= {MOST_BESIDE:g}", own <= MOST_BESIDE),
        Claim(f"{name}:   relative to steps between swaps", ratio_of(swapping, others, own_time), "of one of them"),
        Claim(f"{name}:   with waits for a core", beside, "of one alone"),
        Claim(f"{name}:   its forward and backward", passes, "of one alone"),
        Claim(f"{name}: a step between swaps", ratio_of(others, found.alone, own_time), "of one alone"),
        Claim(f"{name}: steps with a swap", 100 * len(swapping) / len(found.beside), "%"),
        Claim(f"{name}: inner step", step_s, "s"),
        Claim(f"{name}: committed swaps", found.swaps * 60 / found.seconds, "a minute"),
        Claim(f"{name}: failed swaps", found.failed, ""),
        Claim(f"{name}: a swap carries", 100 * found.share, "% of the weights"),
        Claim(f"{name}: sent", found.bytes_sent / 1e6, "MB"),
        Claim(f"{name}: goodput", goodput, "Mbit/s"),
        Claim(f"{name}: time in which a swap moves", 100 * found.link_use, "%"),
        Claim(f"{name}: age of half-differences", found.age_steps, "inner steps"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=0, metavar="N", help="synthetic weights")
    parser.add_argument("--model", choices=CONFIGS, default="")
    parser.add_argument(
        "--step-s", type=float, default=1.0, help="of the partner, and of a trainer of synthetic weights"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="with swaps")
    parser.add_argument("--mbit-s", default="200,1000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims as JSON")
    args = parser.parse_args()
    plan = Plan(args.elements, args.model, args.step_s, args.seconds)
    show([claim for rate in args.mbit_s.split(",") for claim in measure(plan, float(rate))], args.json)


if __name__ == "__main__":
    main()
