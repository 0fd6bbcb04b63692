"""Run a swarm of real peers that join, leave and die at random times determined by a seed, and report the results.

Each peer is a process with its own state folder. A peer that was killed or has left comes back later, with the ticket
of a live peer. At the end, all peers are asked to leave at the same time.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.patience import PATIENCE_S
from harness.processes import PeerProcess, until, write_spec
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.metrics import FAILED

STARTS_AT_ONCE = 2  # imports occupy a core for seconds
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a churn. `mean_pause_s` is the mean time between two events.

    A peer leaves or is killed only while more than `min_living` peers train. The churn continues beyond `seconds` until
    `min_gone` peers have left or been killed, because peers take long to start on a slow machine.
    """

    num_peers: int
    min_living: int
    seconds: float
    mean_pause_s: float
    seed: int
    min_gone: int = 0


@dataclass(slots=True)
class Life:
    """One process of one peer, from its start to its end."""

    number: int
    process: PeerProcess
    daemon: psutil.Process | None = None
    daemon_socket: Path | None = None
    is_killed: bool = False
    exit_code: int | None = None
    exit_s: float | None = None  # from the request to leave to the exit
    _reports: list[dict[str, Any]] | None = None  # of this process, if another one has followed in its folder

    @property
    def is_over(self) -> bool:
        return self.process.process.poll() is not None

    @property
    def trains(self) -> bool:
        """Whether the process has started to train, so that it handles SIGTERM as a training peer does."""
        return self.daemon is not None and not self.is_over

    def look(self) -> None:
        """Record the daemon of the peer once the peer trains."""
        if self.daemon is None and not self.is_over and self.process.events("report"):
            self.daemon = self.process.find_p2pd()
            if self.daemon:
                listen = next(each for each in self.daemon.cmdline() if each.startswith("-listen="))
                self.daemon_socket = Path(listen.removeprefix("-listen=/unix"))

    def reports(self) -> list[dict[str, Any]]:
        return self.process.events("report") if self._reports is None else self._reports

    def end(self) -> None:
        """Keep the reports, because another process begins in the same folder."""
        self._reports = self.reports()

    def longest_without_s(self) -> float:
        """Return the longest time that this process, while it knew of other peers, went on without a new swap."""
        longest_s = since_s = 0.0
        swaps = None
        for report in self.reports():
            if report["swaps"] != swaps or not report["live_peers"]:
                swaps, since_s = report["swaps"], report["time_s"]
            longest_s = max(longest_s, report["time_s"] - since_s)
        return longest_s

    def grown(self, metric: str) -> float:
        """Return how much a counter has grown in this process."""
        reports = self.reports()
        return reports[-1][metric] - reports[0][metric] if reports else 0.0


@dataclass(slots=True)
class Report:
    """The result of a churn: the sums over all processes, and the extremes."""

    joins: int = 0
    leaves: int = 0
    kills: int = 0
    swaps: int = 0
    failed: int = 0
    longest_without_s: float = 0.0  # a swap, while there were other peers
    longest_exit_s: float = 0.0  # of the peers that were asked to leave
    bad_exits: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    living: int = 0  # at the end, before all leave
    start_s: float = 0.0  # until the first round of the first peer, alone on the machine: shows its speed


class Churn:
    """A churn. `run` takes as long as the plan says, plus the time in which peers start and leave."""

    def __init__(self, spec: TrainerSpec, plan: Plan, folder: Path) -> None:
        self._spec = spec
        self._plan = plan
        self._folder = folder
        self._rng = random.Random(plan.seed)
        self._lives: list[Life] = []
        self._stack = ExitStack()

    def run(self) -> Report:
        with self._stack:
            began_s = time.monotonic()
            self._begin(0, write_spec(self._spec, self._folder))
            until(self._training, what="the first peer to train")
            start_s = time.monotonic() - began_s
            for number in range(1, self._plan.min_living):
                self._begin(number, self._lives[0].process.ticket)
            until_s = time.monotonic() + self._plan.seconds
            event_s = time.monotonic()
            while (now_s := time.monotonic()) < until_s or (now_s < until_s + PATIENCE_S and not self._has_happened()):
                if time.monotonic() >= event_s:
                    self._event()
                    event_s += self._rng.expovariate(1 / self._plan.mean_pause_s)
                time.sleep(POLL_S)
                self._look()
            report = Report(living=len(self._training()), start_s=start_s)
            self._end()
            self._judge(report)
        return report

    # events

    def _has_happened(self) -> bool:
        """Whether enough peers have gone, and enough train."""
        num_gone = sum(life.is_over for life in self._lives)
        return num_gone >= self._plan.min_gone and len(self._training()) >= self._plan.min_living

    def _event(self) -> None:
        training = self._training()
        absent = sorted(set(range(self._plan.num_peers)) - {life.number for life in self._lives if not life.is_over})
        starting = [life for life in self._lives if not life.is_over and not life.trains]
        may_go = training if len(training) > self._plan.min_living else []
        is_join = not may_go or (absent and self._rng.random() < len(absent) / self._plan.num_peers)
        if is_join:
            if absent and len(starting) < STARTS_AT_ONCE:
                self._begin(self._rng.choice(absent), self._rng.choice(training).process.ticket)
            return
        life = self._rng.choice(may_go)
        if self._rng.random() < 0.5:
            life.is_killed = True
            life.process.send(signal.SIGKILL)
            life.exit_code = life.process.wait()
        else:
            self._leave([life])

    def _begin(self, number: int, target: str | Path) -> None:
        for life in self._lives:
            if life.number == number:
                life.end()
        flags = ("--save-every-s", "5")
        process = PeerProcess(target, self._folder / f"peer-{number}", *flags)
        self._lives.append(Life(number, self._stack.enter_context(process)))

    def _training(self) -> list[Life]:
        self._look()
        return [life for life in self._lives if life.trains]

    def _look(self) -> None:
        for life in self._lives:
            life.look()

    def _leave(self, lives: Sequence[Life]) -> None:
        """Ask the peers to leave, and wait. The exit code of a peer that does not end stays None."""
        asked_s = time.monotonic()
        for life in lives:
            life.process.send(signal.SIGTERM)
        while time.monotonic() - asked_s < PATIENCE_S and not all(life.exit_s is not None for life in lives):
            for life in lives:
                if life.exit_s is None and life.is_over:
                    life.exit_code, life.exit_s = life.process.process.poll(), time.monotonic() - asked_s
            time.sleep(0.05)

    def _end(self) -> None:
        training = self._training()
        for life in self._lives:
            if not life.is_over and not life.trains:  # still starting, so not judged
                life.is_killed = True
                life.process.end()
        self._leave(training)

    # the report

    def _judge(self, report: Report) -> None:
        report.joins = len(self._lives)
        report.kills = sum(life.is_killed for life in self._lives)
        for life in self._lives:
            name = f"peer {life.number}"
            report.swaps += round(life.grown("swaps"))
            report.failed += round(sum(life.grown(metric) for metric in FAILED))
            report.longest_without_s = max(report.longest_without_s, life.longest_without_s())
            if "Traceback" in life.process.text:
                report.tracebacks.append(name)
            if not life.is_killed:
                report.leaves += 1
                report.longest_exit_s = max(report.longest_exit_s, life.exit_s or PATIENCE_S)
                if life.exit_code != 0:
                    report.bad_exits.append(f"{name}: exit code {life.exit_code}")
        report.left_behind = self._left_behind()

    def _left_behind(self) -> list[str]:
        until_s = time.monotonic() + PATIENCE_S
        while (found := self._found()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return found

    def _found(self) -> list[str]:
        """Return the processes and sockets that remain."""
        found = []
        for life in self._lives:
            if not life.is_over:
                found.append(f"peer {life.number}: its process {life.process.process.pid}")
            if life.daemon and life.daemon.is_running() and life.daemon.status() != psutil.STATUS_ZOMBIE:
                found.append(f"peer {life.number}: its p2pd {life.daemon.pid}")
            if life.daemon_socket and life.daemon_socket.exists():
                found.append(f"peer {life.number}: the socket of its p2pd")
            is_last = life is next(each for each in reversed(self._lives) if each.number == life.number)
            if is_last and not life.is_killed and (life.process.folder / "control.sock").exists():
                found.append(f"peer {life.number}: its control socket")
        return found
