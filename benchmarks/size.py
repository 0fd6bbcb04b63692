"""Measure what a run of 125 million parameters costs a machine: time to start, memory, checkpoints, speed of a step.

    python benchmarks/size.py [--folder FOLDER] [--parts start,muon,bare,newcomer] [--json FILE]

Real peers train the model of `noloco init --preset small` on the CPU, with AdamW, sequences of 128 tokens, a batch of
one, and a tokenizer of 32,000 ids that is trained on the built-in corpus. It takes a few minutes. Each part keeps its
figures in FOLDER, so a run that was interrupted continues there, and `--parts` measures some parts again.

The newcomer's part needs root, because each of its peers has a network namespace, and a link of 100 Mbit/s in each
direction with round trips of 20 ms (benchmarks/netlab.py). It then merges the weights of both peers.

Memory is the resident set of the process of a peer, without that of p2pd. Training waits for a checkpoint for as long
as the step that contains it takes longer than the median step.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from claims import Claim, show
from data_feed import trained_tokenizer
from harness.processes import JOIN_LINE, Command, PeerProcess, noloco, write_spec
from netlab import NetLab
from torch.optim import AdamW

from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.model import build_model, causal_lm_loss
from noloco_p2p.trainer.needs import Counts, estimate

VOCABULARY, NUM_TOKENS = 32_000, 128
SAVE_EVERY_S = 25.0
NUM_SAVES = 3  # without the first, which is taken before memory is steady
START_S, TRAIN_S = 300.0, 900.0
BARE_STEPS = 40
NEWCOMER_MBIT_S = 100.0
POLL_S = 0.02
GIB, MB = 1 << 30, 1e6
NOTED = ("starting", "announcing", "needs:", JOIN_LINE)  # lines that divide the start
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
AMOUNT = re.compile(r"([\d.]+) (KiB|MiB|GiB)")

Figures = dict[str, Any]


class Watched:
    """A peer, the times of its lines and steps after its start, and samples of its memory."""

    def __init__(self, target: str | Path, folder: Path, *flags: str, **place: Any) -> None:
        self.began_s = time.time()
        every = ("--report-every-s", "0.001", "--save-every-s", str(SAVE_EVERY_S))
        self.peer = PeerProcess(target, folder, *every, *flags, **place)
        self.lines: dict[str, float] = {}
        self.samples: list[tuple[float, int, bool]] = []  # time, resident bytes, and whether a checkpoint is written
        self._process = psutil.Process(self.peer.process.pid)

    def watch(self, condition: Callable[[], object], *, timeout_s: float) -> None:
        def look() -> bool:
            if self.peer.process.poll() is not None:
                raise AssertionError(f"the peer has ended:\n{self.peer.text[-3000:]}")
            now_s, text = time.time() - self.began_s, self.peer.text
            for part in NOTED:
                if part in text:
                    self.lines.setdefault(part, now_s)
            writes = any(self.peer.folder.glob("runs/*/checkpoints/.partial-*"))
            self.samples.append((now_s, self._process.memory_info().rss, writes))
            return bool(condition())

        deadline_s = time.monotonic() + timeout_s
        while not look():
            assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s:\n{self.peer.text[-3000:]}"
            time.sleep(POLL_S)

    def steps(self) -> list[tuple[int, float]]:
        """Return the number of each step and the time after the start at which it had been taken."""
        return [(event["step"], event["time_s"] - self.began_s) for event in self.peer.events("report")]


def prepare(folder: Path, optimizer: str = "adamw") -> tuple[Path, list[str]]:
    """Write the tokenizer and the spec. Return the spec, and the flags of a peer."""
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        trained_tokenizer(VOCABULARY).save_pretrained(tokenizer)
    done = noloco("init", folder / "small.toml", "--preset", "small", "--force")
    assert not done.returncode, done.stderr
    changes = {
        "model.vocab_size": VOCABULARY,
        "data.source": "stdlib",
        "data.tokenizer": "local",
        "data.sequence_length": NUM_TOKENS,
        "train.batch_size": 1,
        "train.inner_optimizer": optimizer,
        "evaluate.num_sequences": 32,
    }
    spec = TrainerSpec.load(folder / "small.toml").with_changes(changes, origin="this benchmark")
    return write_spec(spec, folder), ["--model", f"local={tokenizer}"]


def start(folder: Path, optimizer: str = "adamw") -> Figures:
    """Train alone, and measure the start, memory and checkpoints."""
    spec, flags = prepare(folder, optimizer)
    state = Path(tempfile.mkdtemp(dir=folder))
    watched = Watched(spec, state, *flags)
    with watched.peer as peer:
        watched.watch(lambda: watched.steps(), timeout_s=START_S)
        first_s = watched.steps()[0][1]
        watched.watch(lambda: len(peer.events("saved")) > NUM_SAVES, timeout_s=TRAIN_S)
        watched.watch(
            lambda: watched.steps()[-1][1] > peer.events("saved")[-1]["time_s"] - watched.began_s, timeout_s=60
        )
        steps, saved = watched.steps(), peer.events("saved")
        newest = Path(saved[-1]["folder"])
        files = {path.name: path.stat().st_size for path in sorted(newest.iterdir())}
        announced = peer.wait_for("needs:")
        announced_checkpoint = peer.wait_for("checkpoints: keeps")
        warned = [line for line in peer.text.splitlines() if "WARNING" in line or "warning" in line.lower()]
    durations = [after[1] - before[1] for before, after in pairwise(steps) if after[0] == before[0] + 1]
    begins = [now for (_, _, before), (now, _, writes) in pairwise(watched.samples) if writes and not before]
    waits = []
    for begun_s in begins[1:]:
        near = [after[1] - before[1] for before, after in pairwise(steps) if before[1] - 2 <= begun_s <= after[1] + 2]
        waits.append(max(near) - median(durations))
    since_s = first_s + 10
    quiet = [rss for at, rss, writes in watched.samples if at > since_s and not writes]
    busy = [rss for at, rss, writes in watched.samples if at > since_s and writes]
    at = [0.0, *watched.lines.values(), first_s]
    return {
        "first_s": first_s,
        "phases": dict(zip([*watched.lines, "first step"], [b - a for a, b in pairwise(at)], strict=True)),
        "steady": median(quiet),
        "peak": max(rss for _, rss, _ in watched.samples),
        "saving": max(busy, default=0),
        "step_s": median(durations),
        "wait_s": max(waits, default=0.0),
        "files": files,
        "announced": announced,
        "announced_bytes": amounts(announced),
        "announced_checkpoint": amounts(announced_checkpoint)[0],
        "warned": warned,
    }


def amounts(line: str) -> list[int]:
    """Return the amounts of memory in a line, in bytes."""
    return [int(float(each) * UNITS[unit]) for each, unit in AMOUNT.findall(line)]


def bare(folder: Path) -> Figures:
    """Train with a bare PyTorch loop on one core."""
    torch.set_num_threads(1)
    spec = TrainerSpec.load(prepare(folder)[0])
    model = build_model(spec.model, sequence_length=NUM_TOKENS)
    optimizer, durations, memory = AdamW(model.parameters(), lr=1e-4, fused=True), list[float](), list[int]()
    for _ in range(BARE_STEPS):
        batch, began_s = torch.randint(0, VOCABULARY, (1, NUM_TOKENS)), time.monotonic()
        causal_lm_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        memory.append(psutil.Process().memory_info().rss)  # with gradients
        optimizer.zero_grad()
        durations.append(time.monotonic() - began_s)
    num_parameters = sum(param.numel() for param in model.parameters())
    return {"step_s": median(durations), "num_parameters": num_parameters, "memory": median(memory)}


def newcomer(folder: Path) -> Figures:
    """Join a peer over a slow link, and measure the time to the first step and to the first swap. Then merge both."""
    spec, flags = prepare(folder)
    states = [Path(tempfile.mkdtemp(dir=folder)) for _ in range(2)]
    with NetLab(2, round_trip_ms=20, mbit_s=NEWCOMER_MBIT_S) as lab:
        places: list[Any] = [{"host": node.address, "namespace": node.namespace} for node in lab.nodes]
        first = PeerProcess(spec, states[0], *flags, **places[0])
        with first:
            first.event("saved", timeout_s=TRAIN_S)
            first.give_way()  # it stands for a peer on another machine
            watched = Watched(first.ticket, states[1], *flags, **places[1])
            with watched.peer as peer:
                watched.watch(lambda: watched.steps(), timeout_s=TRAIN_S)
                first_s = watched.steps()[0][1]
                watched.watch(lambda: peer.events("report")[-1]["swaps"], timeout_s=TRAIN_S)
                swap_s = next(e["time_s"] for e in peer.events("report") if e["swaps"]) - watched.began_s
                peer.event("saved", timeout_s=TRAIN_S)
                for each, state in zip((first, peer), states, strict=True):
                    assert not noloco("pause", "--state-dir", state).returncode
                    each.wait_for("paused:")
                merging = merge(first.ticket, folder, flags, namespace=places[0]["namespace"])
    state = next(states[0].glob("runs/*/checkpoints/0*/weights.safetensors")).stat().st_size
    transfer_s = state * 8e-6 / NEWCOMER_MBIT_S
    return {"first_s": first_s, "swap_s": swap_s, "transfer_s": transfer_s, "phases": watched.lines, "state": state} | {
        f"merge_{name}": value for name, value in merging.items()
    }


def announced_s() -> float:
    """Return the time after which a newcomer trains, as `join` announces it for this link."""
    spec = PRESETS["small"].with_changes({"model.vocab_size": VOCABULARY}, origin="this benchmark")
    settings = PeerSettings(max_download=f"{NEWCOMER_MBIT_S:g}mbit")
    return estimate(spec, Counts.of_sizes(spec.model), settings, has_gpu=False).begin_s


def merge(ticket: str, folder: Path, flags: Sequence[str], *, namespace: str) -> Figures:
    """Export the mean of two peers that are paused, and watch the memory of the process."""
    began_s, peak, log = time.monotonic(), [0, 0], folder / f"merge-{time.time_ns()}.txt"
    target = folder / f"merged-{time.time_ns()}"
    with Command("export", "--merge", ticket, target, *flags, log=log, namespace=namespace) as command:
        process = psutil.Process(command.process.pid)
        while command.process.poll() is None:
            with suppress(psutil.Error):
                memory = process.memory_info()
                peak = [max(peak[0], memory.rss), max(peak[1], memory.rss - memory.shared)]
            assert time.monotonic() < began_s + TRAIN_S
            time.sleep(POLL_S)
        assert "the mean of 2 peers" in command.text, command.text
    shutil.rmtree(target)
    return {"s": time.monotonic() - began_s, "peak": peak[0], "own": peak[1]}


def costs(one: Figures, name: str = "") -> list[Claim]:
    """Compare memory and checkpoints with what the peer announced."""
    *memory, disk = one["announced_bytes"]
    claims = [
        Claim(f"memory, steady{name}", one["steady"] / GIB, "GiB"),
        Claim(f"memory, peak while a checkpoint is written{name}", one["saving"] / GIB, "GiB"),
    ]
    checkpoint = sum(one["files"].values())
    for what, told, measured in (
        ("memory, peak", sum(memory), one["peak"]),
        ("checkpoint", one["announced_checkpoint"], checkpoint),
    ):
        claims.append(Claim(f"{what}{name}", measured / GIB, "GiB"))
        claims.append(announced(f"{what}{name}", told / GIB, measured / GIB, "GiB"))
    return [*claims, Claim(f"disk space announced by `join`{name}", disk / GIB, "GiB")]


def announced(what: str, told: float, measured: float, unit: str) -> Claim:
    is_close = abs(told - measured) <= measured / 10
    return Claim(f"{what}, announced by `join`", told, unit, "within a tenth", is_close)


def claims_of(found: dict[str, Figures]) -> list[Claim]:
    claims: list[Claim] = []
    if "start" in found:
        one = found["start"]
        claims += [
            Claim("from the start to the first inner step", one["first_s"], "s"),
            *(Claim(f"  of it, until {name!r}", seconds, "s") for name, seconds in one["phases"].items()),
            *costs(one),
            *(Claim(f"checkpoint, {name}", size / MB, "MB") for name, size in one["files"].items()),
            Claim("training waits for a checkpoint", one["wait_s"], "s"),
            Claim("warnings at the start", len(one["warned"]), "", "0", not one["warned"]),
            Claim("inner step", one["step_s"], "s"),
        ]
    if "muon" in found:
        claims += costs(found["muon"], " (Muon)")
    if "bare" in found:
        one = found["bare"]
        claims += [
            Claim("parameters", one["num_parameters"] / 1e6, "million"),
            Claim("inner step of a bare loop", one["step_s"], "s"),
            Claim("memory of a bare loop", one["memory"] / GIB, "GiB"),
        ]
    if "start" in found and "bare" in found:
        for what, name, bare_name, limit in (("time", "step_s", "step_s", 1.03), ("memory", "steady", "memory", 1.1)):
            ratio = found["start"][name] / found["bare"][bare_name]
            claims.append(Claim(f"{what} relative to the bare loop", ratio, "x", f"<= {limit}", ratio <= limit))
    if "newcomer" in found:
        one = found["newcomer"]
        ratio = one["first_s"] / one["transfer_s"]
        claims += [
            Claim(f"transfer of a state at {NEWCOMER_MBIT_S:g} Mbit/s", one["transfer_s"], "s"),
            Claim("a newcomer's first inner step after", one["first_s"], "s"),
            Claim("  relative to the transfer", ratio, "x", "<= 1.2", ratio <= 1.2),
            announced("a newcomer's first inner step after", announced_s(), one["first_s"], "s"),
            Claim("a newcomer's first swap after", one["swap_s"], "s"),
            Claim("`export --merge` of both, one over this link", one["merge_s"], "s"),
            Claim("  relative to its transfer", one["merge_s"] / one["transfer_s"], "x"),
            Claim("  memory, peak", one["merge_peak"] / GIB, "GiB"),
            Claim("  of it, without mapped files", one["merge_own"] / GIB, "GiB"),
            Claim("  of it, relative to the weights", one["merge_own"] / one["state"], "x"),
        ]
    return claims


PARTS: dict[str, Callable[[Path], Figures]] = {
    "start": start,
    "muon": partial(start, optimizer="muon"),
    "bare": bare,
    "newcomer": newcomer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "noloco-size")
    parser.add_argument("--parts", default="", help="parts to measure again, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims as JSON")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Figures] = {}
    for name, measure in PARTS.items():
        kept = args.folder / f"{name}.json"
        if name in args.parts.split(",") or not kept.exists():
            kept.write_text(json.dumps(measure(args.folder), indent=1))
        found[name] = json.loads(kept.read_text())
    show(claims_of(found), args.json)


if __name__ == "__main__":
    main()
