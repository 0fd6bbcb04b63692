"""Compare the spread that a monitor shows with that of the weights, for real peers on loopback with a tiny model.

python benchmarks/spread.py [--quick] [--json FILE]

Two swarms, one of two and one of four peers, train for a whole schedule with rounds of "auto" length, while `noloco
monitor --watch --json` observes them. Every peer keeps a checkpoint of every round, from which the true spread is
computed as in `noloco demo`. The shown spread is compared with that of:

same mark       the weights of each peer half a round after the first peer passed the mark that the monitor reports
                (`spread_progress`): all peers are then in the round that begins at the mark
sketches alone  the weights at 64 such moments; the code of peers and monitors sketches and compares these weights,
                with one mark and with four marks
same moment     the newest weights of each peer when the monitor looked; peers are then in different rounds
without marks   as in "same moment", but the exact spread at the times of the records replaces the shown spread
at rest         the last checkpoints, as in the report of the demo, once every peer has announced its last weights
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from claims import Claim, run
from harness.processes import Command, PeerProcess, small_spec, until, write_spec
from torch import Tensor

from noloco_p2p.codec.sketch import norm, pack, sketch
from noloco_p2p.monitor.spread import KEPT, Sketches
from noloco_p2p.outer.checkpoint import Checkpoint
from noloco_p2p.swarm.records import TTL_S, PeerRecord
from noloco_p2p.trainer.swarm_evaluation import spread

TRAIN_S = 1500.0  # the limit for a whole schedule
REST_S = TTL_S / 4 + 15.0  # after the end of training, for the last sketches to be made, announced and read
LOOK_S = 3.0
A_FIFTH = 0.2
NUM_REPLAYED = 64
RUN = "ab" * 32


@dataclass(frozen=True, slots=True)
class State:
    """The slow weights of one peer after an outer step."""

    time_s: float
    progress: float
    slow_weights: Tensor


def states(peer: PeerProcess) -> list[State]:
    """Return the states of a peer in the order of its rounds. Only the last one of the closing rounds has a state."""
    ended_s = {event["round"]: event["time_s"] for event in [*peer.events("round"), *peer.events("closed")]}
    found = []
    for path in sorted(peer.folder.glob("runs/*/checkpoints/*-round-*")):
        checkpoint = Checkpoint(path)
        place = checkpoint.meta["outer"]
        if not place["steps"] and place["round"] in ended_s:
            weights = checkpoint.load("outer")["slow_weights"]
            found.append(State(ended_s[place["round"]], place["progress"], weights))
    return found


def true_spread(weights: Sequence[Tensor]) -> float:
    return spread(weights, torch.stack(list(weights)).mean(0))


def before(own: list[State], time_s: float) -> Tensor | None:
    """Return the weights that were the newest at that time, or None."""
    return next((state.slow_weights for state in own[::-1] if state.time_s <= time_s), None)


def half_a_round_after(swarm: dict[str, list[State]], mark: float) -> float:
    passed = [next((state.time_s for state in own if state.progress >= mark), float("inf")) for own in swarm.values()]
    gaps_s = [later.time_s - sooner.time_s for own in swarm.values() for sooner, later in pairwise(own)]
    return min(passed) + statistics.median(gaps_s) / 2


def spread_where(swarm: dict[str, list[State]], choose: Callable[[str, list[State]], Tensor | None]) -> float | None:
    """Return the true spread of the chosen weights, or None if a peer has no such weights."""
    weights = [found for peer, own in swarm.items() if (found := choose(peer, own)) is not None]
    return true_spread(weights) if len(weights) == len(swarm) else None


def readings(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def replayed(swarm: dict[str, list[State]], *, num_marks: int) -> list[float]:
    """Return the ratio of the shown to the true spread at NUM_REPLAYED moments, with `num_marks` marks for each."""
    ratios = []
    for number in range(1, NUM_REPLAYED):
        moment_s = half_a_round_after(swarm, number / NUM_REPLAYED)
        weights = {peer: before(own, moment_s) for peer, own in swarm.items()}
        sketches = Sketches()
        for mark in range(number * num_marks, (number + 1) * num_marks):
            sketches.take(published(peer, own, mark) for peer, own in weights.items() if own is not None)
        shown = sketches.measure()
        if shown and shown.num_peers == len(swarm):
            ratios.append(shown.of_all / true_spread([own for own in weights.values() if own is not None]))
    return ratios


def published(peer: str, weights: Tensor, mark: int) -> PeerRecord:
    packed = pack(sketch(weights, run=RUN, mark=mark), mark=mark, norm=norm(weights))
    return PeerRecord(peer, "run", RUN, sketch=packed)


def shares(name: str, ratios: list[float], *, target: bool) -> list[Claim]:
    if not ratios:
        return [Claim(f"{name}: readings", 0, "")]
    within = sum(abs(ratio - 1) <= A_FIFTH for ratio in ratios) / len(ratios)
    wanted = (">= 95", within >= 0.95) if target else ("", None)
    return [
        Claim(f"{name}: readings within a fifth of the truth", 100 * within, "%", *wanted),
        Claim(f"{name}: shown over true, mean", statistics.fmean(ratios), "times"),
        Claim(f"{name}: shown over true, lowest", min(ratios), "times"),
        Claim(f"{name}: shown over true, highest", max(ratios), "times"),
    ]


def watched(folder: Path, *, num_peers: int, num_steps: int) -> list[Claim]:
    spec = small_spec(
        f"spread-{num_peers}",
        train__total_steps=num_steps,
        outer__inner_steps="auto",
        outer__max_wait_s=10.0,
    )
    folder.mkdir()
    target: Path | str = write_spec(spec, folder)
    flags = ("--save-every-rounds", "1", "--keep-checkpoints", "1000000")
    with contextlib.ExitStack() as stack:
        peers: list[PeerProcess] = []
        for index in range(num_peers):
            peers.append(stack.enter_context(PeerProcess(target, folder / f"peer{index}", *flags)))
            if index == 0:
                target = peers[0].ticket
        log = folder / "monitor.jsonl"
        watch = ("--watch", "--json", "--interval", str(LOOK_S))
        monitor = stack.enter_context(Command("monitor", peers[0].ticket, *watch, log=log))
        until(lambda: all(peer.events("finished") for peer in peers), timeout_s=TRAIN_S, what="the end of the schedule")
        done_s = time.time() + REST_S
        until(lambda: readings(log)[-1]["time_s"] > done_s, timeout_s=REST_S + 60, what="a look at the swarm at rest")
        monitor.end()
        for peer in peers:
            peer.process.send_signal(signal.SIGTERM)
        until(lambda: all(peer.process.poll() is not None for peer in peers), timeout_s=60, what="all have left")
        return compared(f"{num_peers} peers", peers, readings(log), done_s=done_s)


def compared(name: str, peers: list[PeerProcess], seen: list[dict[str, Any]], *, done_s: float) -> list[Claim]:
    swarm = {peer.peer_id: states(peer) for peer in peers}
    whole = [look for look in seen if look["totals"]["spread_peers"] == len(peers)]
    training = [look for look in whole if look["totals"]["spread_progress"] < 1]
    same_mark, same_moment, without = [], [], []
    told: set[float] = set()
    for look in training:
        totals, now_s = look["totals"], look["time_s"]
        ages_s = {peer["peer_id"]: peer["age_s"] for peer in look["peers"]}
        moment = spread_where(swarm, lambda _, own, now_s=now_s: before(own, now_s))
        old = spread_where(swarm, lambda peer, own, now_s=now_s, ages_s=ages_s: before(own, now_s - ages_s[peer]))
        same_moment += [totals["spread"] / moment] if moment else []
        without += [old / moment] if old and moment else []
        if totals["spread_progress"] in told:
            continue
        told.add(totals["spread_progress"])  # a mark counts once, even if it is shown several times
        mark_s = half_a_round_after(swarm, totals["spread_progress"])
        truth = spread_where(swarm, lambda _, own, mark_s=mark_s: before(own, mark_s))
        same_mark += [totals["spread"] / truth] if truth else []
    rest = seen[-1]["totals"]
    truth = true_spread([own[-1].slow_weights for own in swarm.values()])
    off = rest["spread"] / truth - 1 if rest["spread"] else float("nan")
    started_s = max(own[0].time_s for own in swarm.values())
    of_training = [look for look in seen if started_s + 60 < look["time_s"] < done_s - REST_S]
    shown = sum(look["totals"]["spread_peers"] == len(peers) for look in of_training)
    return [
        Claim(f"{name}: marks of which the monitor showed a spread", len(told), "marks"),
        Claim(
            f"{name}: looks with a spread of all peers, a minute after the start", 100 * shown / len(of_training), "%"
        ),
        *shares(f"{name}, same mark", same_mark, target=True),
        *shares(f"{name}, sketches alone, one mark", replayed(swarm, num_marks=1), target=True),
        *shares(f"{name}, sketches alone, four marks", replayed(swarm, num_marks=KEPT), target=True),
        *shares(f"{name}, same moment", same_moment, target=False),
        *shares(f"{name}, without marks", without, target=False),
        Claim(f"{name}, at rest: true spread", 100 * truth, "%"),
        Claim(f"{name}, at rest: shown over true", 1 + off, "times", "0.8 to 1.2", abs(off) <= A_FIFTH),
    ]


def measure(quick: bool) -> list[Claim]:
    with tempfile.TemporaryDirectory() as name:
        claims = []
        for num_peers in (4,) if quick else (2, 4):
            num_steps = 1500 if quick else 5000
            claims += watched(Path(name) / str(num_peers), num_peers=num_peers, num_steps=num_steps)
        return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
