"""Runs the peers of a demo, shows their progress, and kills some of them on request."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from noloco_p2p.demo.plan import (
    MANY_STEPS,
    DemoPlan,
    cut_model,
    measure_pipeline_s,
    measure_step_s,
    step_s_of_all,
    steps_that_fit,
)
from noloco_p2p.demo.processes import DemoPeer, fork_server, start_fork_server, workers
from noloco_p2p.demo.report import evaluate_and_export, result_of
from noloco_p2p.errors import NolocoError, SettingsError
from noloco_p2p.peer.run_folder import folder_of
from noloco_p2p.presets import render
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import count, loss, named
from noloco_p2p.telemetry.progress import Progress

TICKET_TIMEOUT_S = 300.0  # the first peer reads the corpus and measures its speed before it has a ticket
LEAVE_TIMEOUT_S = 120.0  # each peer writes its last checkpoint
POLL_S = 0.5
KILL_EVERY_S = (8.0, 20.0)  # range of the random time until the next kill with --chaos
BACK_AFTER_S = (1.0, 5.0)
COLUMNS = ("peer", "state", "step", "loss", "tokens/s", "last swap with", "swaps", "apart")


@dataclass(frozen=True, slots=True)
class View:
    """The state of a demo that is shown to the user.

    `done` and `total` count inner steps of the slowest peer (or head of a pipeline); both are 0 before training begins.
    `columns` are the names of the columns of `rows`, and `summary` describes all peers together. `left_s` is the number
    of seconds until training is done, or None while it is unknown.
    """

    doing: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    summary: str = ""
    done: int = 0
    total: int = 0
    left_s: float | None = None


class Demo:
    """A demo that runs real peers on this machine.

    Iterate over `run`, which yields a `View` twice a second until all peers are done. Then call `stop` and `report`.
    Call `stop` even if `run` fails. `main` runs `noloco` with the given arguments and returns its exit code.
    """

    def __init__(self, plan: DemoPlan, main: Callable[[list[str]], int]) -> None:
        self.plan = plan
        self.peers: list[DemoPeer] = []
        self.num_steps = plan.num_steps or 0
        self.step_s: float | None = None  # measured if `minutes` decides the number of steps
        plan.check()
        self._main = main
        self._spec: TrainerSpec | None = None
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._began_s = time.monotonic()
        self._trains_since: tuple[float, int] | None = (
            None  # the time at which all peers had begun, and the number of steps done by then
        )

    @property
    def spec(self) -> TrainerSpec:
        assert self._spec is not None, "call `run` first"
        return self._spec

    def run(self) -> Iterator[View]:
        """Run all peers until training ends. Raises NolocoError if the first peer does not start."""
        self._make_folder()
        yield from self._load()
        cut = self._cut()
        if self.plan.num_steps is None:
            yield from self._measure(cut)
        self._spec = self.plan.spec(self.num_steps).with_changes(cut)
        spec_file = self.plan.folder / "demo.toml"
        spec_file.write_text(render(self._spec), encoding="utf-8")
        first = self._start_peer(0, str(spec_file))
        yield from self._wait_for_ticket(first)
        target = first.ticket_file.read_text(encoding="utf-8").strip()
        for index in range(1, self.plan.num_peers):
            self._start_peer(index, target)
        seed, now_s = self.plan.chaos_seed, time.monotonic()
        chaos = None if seed is None else Chaos(self.peers, ticket=target, seed=seed, now_s=now_s)
        while not all(peer.is_done() for peer in self.peers) or (chaos and chaos.somebody_is_dead):
            if chaos:
                chaos.step(time.monotonic())
            yield self._look()
            time.sleep(POLL_S)
        yield replace(self._look(), doing="all peers are done")

    def _start_peer(self, index: int, target: str) -> DemoPeer:
        """Start a peer. It is registered before its process exists, so that `stop` finds it."""
        peer = DemoPeer(index, plan=self.plan, main=self._main)
        self.peers.append(peer)
        peer.start(target)
        return peer

    def _make_folder(self) -> None:
        folder = self.plan.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise SettingsError(f"{folder} is not empty; choose another folder with --keep")
        except OSError as error:
            raise SettingsError(f"{folder} cannot be used: {error}") from None

    def _load(self) -> Iterator[View]:
        """Start the fork server, and wait until it can fork processes."""
        start_fork_server()
        first = fork_server().Process(target=int)
        loading = threading.Thread(target=first.start, daemon=True)
        loading.start()
        while loading.is_alive():
            yield View("loading torch and transformers")
            loading.join(POLL_S)
        first.join()

    def _cut(self) -> dict[str, Any]:
        """Return the changes to the spec that cut the model into stages. Raises SpecError if there are more stages than
        blocks.
        """
        spec = self.plan.spec(MANY_STEPS)
        if spec.pipeline.stages == 1 or spec.pipeline.cut != "auto":
            return {}
        with workers(1, what="cutting the model") as pool:
            return {"pipeline.cut": pool.submit(cut_model, spec).result()}

    def _measure(self, cut: dict[str, Any]) -> Iterator[View]:
        """Measure an inner step while all cores that the peers will use are busy, and choose the number of steps."""
        spec = self.plan.spec(MANY_STEPS).with_changes(cut)
        measure = measure_step_s if spec.pipeline.stages == 1 else measure_pipeline_s
        at_once = min(self.plan.num_peers, self._num_cores)
        with workers(at_once, what="measuring") as pool:
            futures = [pool.submit(measure, spec) for _ in range(at_once)]
            while not all(future.done() for future in futures):
                yield View("measuring how fast this machine trains")
                time.sleep(POLL_S)
            self.step_s = max(future.result() for future in futures)
        left_s = 60 * self.plan.minutes - (time.monotonic() - self._began_s)
        each_s = step_s_of_all(self.plan, spec, step_s=self.step_s, num_cores=self._num_cores)
        self.num_steps = steps_that_fit(left_s, each_s=each_s)

    def _wait_for_ticket(self, first: DemoPeer) -> Iterator[View]:
        until_s = time.monotonic() + TICKET_TIMEOUT_S
        while not first.ticket_file.exists():
            if first.exit_code is not None or time.monotonic() > until_s:
                raise NolocoError(f"the first peer did not start; its log ends with: {first.last_line()}")
            yield self._look()
            time.sleep(POLL_S)

    def _look(self) -> View:
        """Ask every peer for its status, and return what to show."""
        for peer in self.peers:
            if peer.exit_code is None:
                peer.ask()
        names = {peer.status["peer_id"]: f"peer {peer.index}" for peer in self.peers if peer.status}
        rows = [_row(peer, names) for peer in self.peers]
        drivers = [peer for peer in self.peers if not peer.stage]  # inner stages follow the heads
        steps = [self.num_steps if peer.is_done() else (peer.status or {}).get("step", 0) for peer in drivers]
        done, now_s = min(min(steps), self.num_steps), time.monotonic()
        if self._trains_since is None and len(self.peers) == self.plan.num_peers and done:
            self._trains_since = now_s, done
        left_s = None
        if self._trains_since and self._trains_since[1] < done < self.num_steps:
            since_s, before = self._trains_since
            left_s = (self.num_steps - done) * (now_s - since_s) / (done - before)
        doing = "training" if any(steps) else "starting the peers"
        columns = COLUMNS if self.plan.num_stages == 1 else (COLUMNS[0], "stage", *COLUMNS[1:])
        return View(doing, columns, rows, _summary(self.peers), done, self.num_steps, left_s)

    def stop(self) -> None:
        """Ask all peers to leave, and wait until all have ended. It is safe to call it twice."""
        for peer in self.peers:
            peer.ask_to_leave()
        until_s = time.monotonic() + LEAVE_TIMEOUT_S
        for peer in self.peers:
            peer.wait_gone(until_s)
        for process in multiprocessing.active_children():  # a process that was interrupted while it started
            process.kill()

    def report(self) -> dict[str, Any]:
        """Evaluate the checkpoints of the peers that left cleanly, and return the report. Call it after `stop`.

        Raises NolocoError if no peer left cleanly.
        """
        left = [peer for peer in self.peers if peer.exit_code == 0]
        if not left:
            raise NolocoError(f"no peer finished; the log of the first peer ends with: {self.peers[0].last_line()}")
        run_id = self.spec.run_id
        folders = [
            [folder_of(peer.folder, run_id) for peer in left if (peer.stage or 0) == stage]
            for stage in range(self.plan.num_stages)
        ]
        export_dir = self.plan.folder / "export"
        with (
            Progress(print).task("merging the models and evaluating the result"),
            workers(1, what="merging the models") as pool,
        ):
            evaluated = pool.submit(evaluate_and_export, self.spec, folders, export_dir).result()
        return {
            "peers": [result_of(peer) for peer in self.peers],
            "steps": self.num_steps,
            "merged_peers": len(left),
            **evaluated,
            "export_dir": str(export_dir),
            "wall_s": round(time.monotonic() - self._began_s, 1),
        }


def _row(peer: DemoPeer, names: dict[str, str]) -> tuple[str, ...]:
    status = peer.status or {}
    first = (f"peer {peer.index}", *(() if peer.stage is None else (str(peer.stage),)), _state(peer))
    if not status.get("step"):
        return (*first, *["-"] * (len(COLUMNS) - 2))
    partner = status["last_partner"]
    return (
        *first,
        str(status["step"]),
        loss(status["loss"]),
        count(status["tokens_per_s"]),
        names.get(partner, named(partner) if partner else "-"),
        str(status["swaps"]),
        "-" if status["apart"] is None else f"{100 * status['apart']:.2g} %",
    )


def _summary(peers: Sequence[DemoPeer]) -> str:
    """Describe all peers together, for example `loss 2.310, 184 swaps, 0.4 % apart`."""
    statuses = [peer.status for peer in peers if peer.status]
    losses = [status["loss"] for status in statuses if status["loss"] is not None]
    apart = [status["apart"] for status in statuses if status["apart"] is not None]
    parts = [f"loss {loss(mean(losses))}"] if losses else []
    if swaps := sum(status["swaps"] for status in statuses) // 2:  # both partners count a swap
        parts.append(f"{swaps} swaps")
    return ", ".join([*parts, f"{100 * mean(apart):.2g} % apart"] if apart else parts)


def _state(peer: DemoPeer) -> str:
    if peer.exit_code is not None:
        return "gone" if peer.exit_code == 0 else peer.ending
    if peer.status is None:
        return "coming back" if peer.kills else "starting"
    if peer.status["state"] == "training" and peer.status["progress"] >= 1:
        return "closing"
    return peer.status["state"]


class Chaos:
    """Kills a peer now and then, and restarts it. The seed determines which peers are killed, and when."""

    def __init__(self, peers: Sequence[DemoPeer], *, ticket: str, seed: int, now_s: float) -> None:
        self._peers = peers
        self._ticket = ticket
        self._rng = random.Random(seed)
        self._next_s = now_s + self._rng.uniform(*KILL_EVERY_S)
        self._dead: tuple[DemoPeer, float] | None = None  # with the time of its restart

    @property
    def somebody_is_dead(self) -> bool:
        return self._dead is not None

    def step(self, now_s: float) -> None:
        """Kill or restart a peer if one is due. Kills begin once all peers are training, and at most one peer is down
        at a time.
        """
        if self._dead and now_s >= self._dead[1]:
            self._dead[0].start(self._ticket)
            self._dead = None
            self._next_s = now_s + self._rng.uniform(*KILL_EVERY_S)
        elif self._dead is None and now_s >= self._next_s and all(peer.is_back() for peer in self._peers):
            training = [peer for peer in self._peers if not peer.is_done()]
            if len(training) < 2:
                return  # the last peer would be killed again and again, and has no partner
            victim = self._rng.choice(training)
            victim.kill()
            self._dead = victim, now_s + self._rng.uniform(*BACK_AFTER_S)
