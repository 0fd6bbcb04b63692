"""Compare an inner step of the trainer's loop with one of a bare PyTorch loop: time, memory and MFU.

The bare loop does what a script without noloco_p2p does with the same model: it takes prepared batches, and runs the
forward and backward pass, clipping and the same optimizers as the trainer. The trainer's loop belongs to a real peer
with a network thread and a directory, which is the only peer of its run. This loop reads its data, takes outer steps,
and copies and writes checkpoints. `trainer_waits.py` and `step_gpu.py` measure the cost of a swap during training.
Rounds of both loops alternate in one process, and pairs of rounds are compared.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch
from claims import Claim
from torch import Tensor

from noloco_p2p import Peer, TrainerSpec
from noloco_p2p.optim.inner import make_inner_optimizers
from noloco_p2p.outer.mixing import Swapped
from noloco_p2p.settings import PeerSettings
from noloco_p2p.trainer.loop import Trainer
from noloco_p2p.trainer.model import build_model, hidden_matrices

if TYPE_CHECKING:
    from collections.abc import Iterator

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # bf16, dense
MIB = 1 << 20
WARM_STEPS = 3


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
    inner_steps: int = 50  # measured at once


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

    def round(self) -> None:
        self.steps(self.case.inner_steps)

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
        self.saving_s = 0.0

    def round(self) -> None:
        self.steps(self.case.inner_steps)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def step(self) -> list[Swapped]:
        trainer = self.trainer
        assert trainer.batches
        trainer.inner_step(next(trainer.batches), progress=trainer.outer.progress, seed=1)
        return trainer.outer.step()

    def save(self) -> None:
        """Measure how long a checkpoint blocks training, which is the duration of the copy."""
        began_s = time.monotonic()
        trainer = self.trainer
        trainer.outer.save_in_background()
        self.saving_s = time.monotonic() - began_s


def measure(case: Case, *, beside: Callable[[Bare, Ours], Iterable[Claim]] = lambda bare, ours: ()) -> Iterator[Claim]:
    """Yield each claim as soon as it is known. `beside` returns more of them, with both loops still in memory."""
    torch.manual_seed(0)
    spec = case.spec
    shape = (spec.train.batch_size, spec.data.sequence_length)
    batches = [torch.randint(0, 256, shape) for _ in range(8)]
    if case.device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    bare = Bare(case, batches)
    bare.steps(WARM_STEPS)  # compiles the model and fills caches
    plain = _peak_bytes(bare.steps, case.device)
    before = _allocated_bytes(case.device)
    with trainer_of(case) as trainer:
        ours = Ours(case, trainer)
        ours.steps(WARM_STEPS)
        yield from _memory_claims(plain, _peak_bytes(ours.steps, case.device) - before)
        pairs = [(timed(bare.round, case.device), timed(ours.round, case.device)) for _ in range(case.num_rounds)]
        yield from _time_claims(case, pairs, trainer)
        yield from beside(bare, ours)
        ours.save()
        saving = ours.saving_s / trainer.peer.settings.save_every_s
        yield Claim("a checkpoint holds training up", ours.saving_s * 1e3, "ms")
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
    peak = peak_flops(case.device)
    if peak:
        flops = tokens * flops_per_token(spec, parameters)
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


def timed(round: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the duration of a round and the processor time of this thread, both in seconds."""
    api = torch.get_device_module(device)
    api.synchronize()
    began_s, began_cpu_s = time.monotonic(), time.thread_time()
    round()
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


def flops_per_token(spec: TrainerSpec, parameters: int) -> float:
    """Return the FLOPs per token: 6 per parameter, except untied embeddings, and those of causal attention."""
    model = spec.model
    table = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    return 6 * (parameters - table) + 6 * model.num_layers * model.hidden_size * spec.data.sequence_length


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of the device, or None if it is unknown, because no MFU is better than a wrong one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
