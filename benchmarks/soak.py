"""Run real peers with a random fault every few seconds: what breaks, what it costs, and whether memory grows.

    python benchmarks/soak.py [--minutes 60] [--peers 4] [--stages 1] [--seed 1] [--mtbf 60] [--json FILE]

A seed determines the faults: a peer gets SIGKILL or SIGTERM, a peer is frozen for a while (SIGSTOP), or the p2pd of a
peer gets SIGKILL. A peer that has ended is started again with its own folder. `make chaos` runs for eight minutes with
a fault every 15 s. The longest pauses are those of peers that were neither frozen nor restarted. The exit code is 1 if
a peer ends by itself or leaves with an exit code other than 0, if a log contains a traceback, if a checkpoint cannot be
read, or if a process is left behind. With --stages, the peers hold the stages of a model in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
from claims import machine
from harness.processes import PeerProcess, small_spec, until, write_spec

from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.saved_state import STATE_FILE
from noloco_p2p.telemetry.metrics import FAILED

FREEZE_S, FAREWELL_S, SAMPLE_S = 15.0, 10.0, 2.0
FLAGS = ("--save-every-s", "5", "--report-every-s", "2")
SUMS = ("step", "swaps", *FAILED, "refused_over_share", "refused_unlisted", "catch_ups", "diverged", "blocked_s")
FAULTS = ("kill", "freeze", "terminate", "kill p2pd")
MIB = 1 << 20


@dataclass
class Life:
    """One process of a peer, from its start to its end."""

    process: PeerProcess
    rss_mib: list[float] = field(default_factory=list)
    num_fds: list[int] = field(default_factory=list)
    trains: bool = False

    def sample(self) -> None:
        try:
            found = psutil.Process(self.process.process.pid)
            rss, fds = found.memory_info().rss / MIB, found.num_fds()
        except psutil.Error:
            return
        self.trains = self.trains or bool(self.process.events("report"))
        if self.trains:  # imports and the building of the model are not growth
            self.rss_mib.append(rss)
            self.num_fds.append(fds)

    def growth(self) -> tuple[float, float] | None:
        """Return the growth (MiB, file descriptors) from the first to the last quarter, or None for a short life."""
        quarter = len(self.rss_mib) // 4
        if quarter < 5:
            return None
        first, last = slice(quarter), slice(-quarter, None)
        return (
            median(self.rss_mib[last]) - median(self.rss_mib[first]),
            median(self.num_fds[last]) - median(self.num_fds[first]),
        )


class Soak:
    """A swarm of real peers. `run` disturbs them, and `report` says what came of it. Always call `stop`."""

    def __init__(self, folder: Path, *, num_peers: int, seed: int, mtbf_s: float, num_stages: int = 1) -> None:
        self.folder = folder
        self.num_stages = num_stages
        self.spec = small_spec("soak", evaluate__every_steps=1_000_000)
        if num_stages > 1:
            cut = {"model.num_layers": num_stages, "pipeline.stages": num_stages, "pipeline.cut": [1] * num_stages}
            self.spec = self.spec.with_changes({"model.parameter_seeds": True, **cut})
        self.rng = random.Random(seed)
        self.mtbf_s = mtbf_s
        self.num_peers = num_peers
        self.lives: dict[int, list[Life]] = {}
        self.faults: Counter[str] = Counter()
        self.broken: list[str] = []
        self.farewells_s: list[float] = []
        self.frozen: list[tuple[int, float, float]] = []  # peer, from, to (Unix seconds)
        self.restarts = self.checkpoints_read = 0
        self.ticket = ""

    def run(self, seconds: float) -> None:
        """Run for this time, or until a killed peer had a checkpoint, for at most five times as long."""
        self._start(0, write_spec(self.spec, self.folder))
        self.ticket = self._now(0).ticket
        for number in range(1, self.num_peers):
            self._start(number, self.ticket)
        for number in range(self.num_peers):
            self._now(number).report_where(lambda event: event["swaps"] > 0)
        began_s = time.monotonic()
        next_s = began_s + self.rng.expovariate(1 / self.mtbf_s)
        while time.monotonic() < began_s + seconds * (1 if self.checkpoints_read else 5):
            self._watch()
            if time.monotonic() >= next_s:
                self._fault()
                next_s = time.monotonic() + self.rng.expovariate(1 / self.mtbf_s)
        for number in range(self.num_peers):
            self._terminate(number)
        try:
            until(lambda: not self._left_behind(), what=lambda: f"no process is left: {self._left_behind()}")
        except AssertionError as error:
            self.broken.append(str(error))

    def _left_behind(self) -> list[str]:
        """Return the processes that use the folder of a peer, such as its p2pd."""
        lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        return [line for line in lines if f"{self.folder}/peer-" in line]

    def stop(self) -> None:
        for lives in self.lives.values():
            lives[-1].process.end()

    def _now(self, number: int) -> PeerProcess:
        return self.lives[number][-1].process

    def _start(self, number: int, target: str | Path) -> None:
        stage = ("--stage", str(number % self.num_stages)) if self.num_stages > 1 else ()
        process = PeerProcess(target, self.folder / f"peer-{number}", *FLAGS, *stage)
        self.lives.setdefault(number, []).append(Life(process))

    def _watch(self) -> None:
        for number, lives in self.lives.items():
            lives[-1].sample()
            code = lives[-1].process.process.poll()
            if code is not None:
                self.broken.append(f"peer {number} ended by itself with {code}: {lives[-1].process.text[-300:]}")
                self._start(number, self.ticket)
        time.sleep(SAMPLE_S)

    def _fault(self) -> None:
        number, fault = self.rng.randrange(self.num_peers), self.rng.choice(FAULTS)
        self.faults[fault] += 1
        process = self._now(number)
        print(f"{time.strftime('%H:%M:%S')} {fault} peer {number}", flush=True)
        match fault:
            case "kill":
                process.send(signal.SIGKILL)
                process.wait()
                self._read_checkpoint(number)
                self._come_back(number)
            case "freeze":
                began_s = time.time()
                process.send(signal.SIGSTOP)
                until_s = time.monotonic() + FREEZE_S
                while time.monotonic() < until_s:
                    self._watch()
                process.send(signal.SIGCONT)
                self.frozen.append((number, began_s, time.time()))
            case "terminate":
                self._terminate(number)
                self._come_back(number)
            case _:
                daemon = process.find_p2pd()
                if daemon:
                    daemon.kill()

    def _terminate(self, number: int) -> None:
        process, began_s = self._now(number), time.monotonic()
        had_begun = bool(process.events("started"))
        process.send(signal.SIGTERM)
        code = process.wait(60.0)
        if not had_begun:  # it had no state to save, so it ended as by Ctrl-C
            return
        self.farewells_s.append(time.monotonic() - began_s)
        if code:
            self.broken.append(f"peer {number} left with exit code {code}: {process.text[-300:]}")

    def _come_back(self, number: int) -> None:
        self.restarts += 1
        self._start(number, self.ticket)

    def _read_checkpoint(self, number: int) -> None:
        try:
            own = f"stage-{number % self.num_stages}" if self.num_stages > 1 else "checkpoints"
            newest = Checkpoints(self.folder / f"peer-{number}" / "runs" / self.spec.run_id / own).newest()
            if newest:
                newest.load(STATE_FILE)
                self.checkpoints_read += 1
        except CheckpointError as error:
            self.broken.append(f"checkpoint of peer {number}: {error}")

    def _reports(self, number: int) -> list[dict[str, Any]]:
        """Return the reports of all processes of a peer, which write into one file."""
        return self.lives[number][0].process.events("report")

    def _longest_pause_s(self, number: int, metric: str) -> float:
        """Return the longest time in which a counter of a peer stood still while it was not frozen or restarted."""
        starts = [event["time_s"] for event in self.lives[number][0].process.events("started")]
        breaks = [(start, start) for start in starts] + [(a, b) for peer, a, b in self.frozen if peer == number]
        reports = self._reports(number)
        grown = [later["time_s"] for earlier, later in pairwise(reports) if later[metric] != earlier[metric]]
        return max(
            (
                later - earlier
                for earlier, later in pairwise(grown)
                if not any(begin <= later and earlier <= end for begin, end in breaks)
            ),
            default=0.0,
        )

    def _sum(self, metric: str) -> float:
        """Return how much a counter of all peers has grown. Counters of a process begin at the last checkpoint."""
        pairs = (pair for number in self.lives for pair in pairwise(self._reports(number)))
        return round(sum(max(0.0, later[metric] - earlier[metric]) for earlier, later in pairs), 2)

    def _mean(self, gauge: str) -> float:
        values = [
            report[gauge] for number in self.lives for report in self._reports(number) if report[gauge] is not None
        ]
        return round(mean(values), 4) if values else 0.0

    def report(self) -> dict[str, Any]:
        counted = {metric: self._sum(metric) for metric in SUMS}
        for number, lives in self.lives.items():
            for life in lives:
                if "Traceback" in life.process.text:
                    self.broken.append(f"traceback of peer {number}: see {life.process.log}")
        growths = [growth for lives in self.lives.values() for life in lives if (growth := life.growth())]
        return {
            "machine": machine(),
            "peers": self.num_peers,
            "faults": dict(self.faults),
            "restarts": self.restarts,
            "counted": counted,
            "swaps_that_committed": round(
                counted["swaps"] / max(1, counted["swaps"] + sum(counted[kind] for kind in FAILED)), 4
            ),
            "longest_pause_s": round(max(self._longest_pause_s(number, "step") for number in self.lives), 2),
            "longest_time_without_a_swap_s": round(max(self._longest_pause_s(each, "swaps") for each in self.lives), 2),
            **{name: self._mean(name) for name in ("swaps_per_min", "link_use", "age_steps", "apart")},
            "slowest_farewell_s": round(max(self.farewells_s, default=0.0), 2),
            "farewells_over_10_s": sum(seconds > FAREWELL_S for seconds in self.farewells_s),
            "checkpoints_read_after_kill": self.checkpoints_read,
            "growth_rss_mib": [round(rss, 1) for rss, _ in growths],
            "growth_fds": [fds for _, fds in growths],
            "broken": self.broken,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mtbf", type=float, default=60.0, help="mean seconds between two faults of the swarm")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="noloco-soak-") as folder:
        soak = Soak(Path(folder), num_peers=args.peers, seed=args.seed, mtbf_s=args.mtbf, num_stages=args.stages)
        try:
            soak.run(60 * args.minutes)
            report = {"minutes": args.minutes, "seed": args.seed, "mtbf_s": args.mtbf} | soak.report()
        finally:
            soak.stop()
    for name, value in report.items():
        print(f"{name:<28} {value}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
