"""The main job in small: real peers as real processes on loopback, watched until they are done, then judged.

The processes come from a fork server that has imported torch, transformers and hivemind once. Each import takes some
four seconds of a core, and a peer that is forked need not repeat it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

from noloco_p2p.control import ask
from noloco_p2p.errors import NolocoError, SettingsError
from noloco_p2p.flow.limits import IN_FLIGHT_SHARE
from noloco_p2p.peer.run_folder import folder_of
from noloco_p2p.presets import PRESETS, render
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import count, loss, mib, named
from noloco_p2p.telemetry.events import read_events
from noloco_p2p.telemetry.progress import Draw, Progress

PRELOADED = [
    "noloco_p2p.trainer.loop",
    "noloco_p2p.trainer.stage_trainer",
    "noloco_p2p.trainer.stage_needs",
    "noloco_p2p.trainer.swarm_evaluation",
    "noloco_p2p.trainer.export",
]
TICKET_TIMEOUT_S = 300.0  # the first peer reads the corpus and measures itself before it has a ticket
LEAVE_TIMEOUT_S = 120.0  # each writes its last checkpoint
POLL_S = 0.5
ASK_TIMEOUT_S = 1.0  # a peer on a busy machine may not answer at once; its row then stays as it was
CHAOS_SAVES_EVERY = "3"  # rounds: a peer that is killed every few seconds must not lose a minute each time
KILL_EVERY_S = (8.0, 20.0)  # with --chaos: between two kills, by chance
BACK_AFTER_S = (1.0, 5.0)
COLUMNS = ("peer", "state", "step", "round", "loss", "tokens/s", "last swap with", "swaps", "half", "solo")

MEASURED_S, MEASURED_STEPS = 3.0, 8  # of inner steps, after the first; both at least
FEWEST_STEPS, FEWEST_ROUNDS = 60, 12
MANY_STEPS = 10_000  # of a spec that is checked and measured before the number of steps is known
UPKEEP = 1.35  # time of a step beside swaps, evaluation and the network thread, over that of a step alone
START_AND_END_S = 12.0  # peers find each other; closing rounds, leaving, merging; and the steps below
START_AND_END_STEPS = 30  # evaluations at the start and at the end, and the measurements of each peer
MICROBATCH = 2  # sequences; of one, the streams would cost as much as the computing; of four, stages would wait
PIPELINE_UPKEEP = 2.4  # as UPKEEP, of a step of a pipeline: also for codecs, and the streams between stages

WHY_SOLO = {
    "nobody": "no other peer trained",
    "refused": "the peers that it asked were busy",
    "no_answer": "no peer had answered at the boundary",
    "failed": "the swap broke",
    "slow": "the swap was not ready at the boundary",
    "refused_state": "a gate refused what the partner sent",
}


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """`folder` holds everything: the spec, a folder per peer with its log, the exported model.

    num_steps: None = as many as fit into `minutes` on this machine.
    """

    folder: Path
    num_peers: int = 4
    num_steps: int | None = None
    minutes: float = 4.0
    port_base: int = 0  # peer i listens on port_base + 2 i; 0 = free ports
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted fields of the spec
    chaos_seed: int | None = None  # peers are killed and come back, when and which by this seed
    num_stages: int = 1

    def check(self) -> None:
        """A mistake is an error before anything starts. Raises SettingsError and SpecError."""
        spec, stages = self.spec(self.num_steps or MANY_STEPS), self.num_stages
        if spec.pipeline.stages != stages:
            raise SettingsError(f"--set pipeline.stages={spec.pipeline.stages}: name their number with --stages")
        if not spec.model.pretrained and spec.model.num_layers < stages:
            raise SettingsError(
                f"--stages {stages}: the model has {spec.model.num_layers} blocks, and each stage needs one; "
                f"--set model.num_layers={stages} gives it more"
            )
        if self.num_peers < stages:
            raise SettingsError(f"--peers {self.num_peers}: {stages} stages need a peer each, at least")
        if stages > 1 and self.chaos_seed is not None and self.num_peers < 2 * stages:
            raise SettingsError(
                f"--chaos with --peers {self.num_peers}: {stages} stages need {2 * stages} peers, two each; what a "
                "stage has learned is gone with its only peer"
            )

    def stage(self, index: int) -> int | None:
        """That peer `index` holds, where there are stages."""
        return index % self.num_stages if self.num_stages > 1 else None

    def spec(self, num_steps: int) -> TrainerSpec:
        """The preset `tiny` with a schedule of `num_steps`, and rounds so short that there are a dozen of them."""
        tiny = PRESETS["tiny"]
        longest = max(1, min(tiny.outer.max_inner_steps, num_steps // FEWEST_ROUNDS))
        changes = {
            "name": "demo",
            "train.total_steps": num_steps,
            "train.warmup_steps": min(tiny.train.warmup_steps, num_steps // 4),
            "outer.min_inner_steps": min(tiny.outer.min_inner_steps, longest),
            "outer.max_inner_steps": longest,
        }
        if self.num_stages > 1:
            changes |= {
                "model.parameter_seeds": True,
                "pipeline.stages": self.num_stages,
                "pipeline.microbatch": MICROBATCH,
            }
        return tiny.with_changes(changes, origin="--steps").with_changes(dict(self.changes), origin="--set")


def step_s_of_all(plan: DemoPlan, spec: TrainerSpec, *, step_s: float, num_cores: int) -> float:
    """Seconds in which each peer takes an inner step, or each head of a pipeline.

    step_s: of an inner step with one thread while every core computes one; of a pipeline, in all stages together.
    """
    if plan.num_stages == 1:
        return step_s * UPKEEP * max(1.0, plan.num_peers / num_cores)
    num_heads = -(-plan.num_peers // plan.num_stages)
    in_flight = max(1, int(IN_FLIGHT_SHARE * spec.train.batch_size / spec.pipeline.microbatch))
    return step_s * PIPELINE_UPKEEP * max(num_heads / num_cores, 1 / min(in_flight, plan.num_stages))


def steps_that_fit(seconds: float, *, each_s: float) -> int:
    """How many inner steps each peer can take in that time, starting and ending included; rounded to tens."""
    fitting = (seconds - START_AND_END_S) / each_s - START_AND_END_STEPS
    return max(FEWEST_STEPS, int(fitting) // 10 * 10)


def measure_step_s(spec: TrainerSpec) -> float:
    """Seconds of an inner step of `spec` on random tokens, with one thread; for a process of its own.

    The lower quartile: other programs slow some of the steps down, and may be gone in a moment.
    """
    import torch

    from noloco_p2p.trainer.inner_step import InnerStep
    from noloco_p2p.trainer.model import build_model

    torch.set_num_threads(1)
    size = (spec.train.batch_size, spec.data.sequence_length)
    step = InnerStep(build_model(spec.model, sequence_length=spec.data.sequence_length), spec.train)
    batch = torch.randint(0, min(256, spec.model.vocab_size or 256), size)
    step(batch, progress=0.0)
    durations_s: list[float] = []
    while sum(durations_s) < MEASURED_S or len(durations_s) < MEASURED_STEPS:
        began_s = time.monotonic()
        step(batch, progress=0.0)
        durations_s.append(time.monotonic() - began_s)
    return sorted(durations_s)[len(durations_s) // 4]


def measure_pipeline_s(spec: TrainerSpec) -> float:
    """As `measure_step_s`, of the batch of one head: in all stages together, one after the other."""
    import torch

    from noloco_p2p.trainer.cut import cut_of
    from noloco_p2p.trainer.stage import build_stage
    from noloco_p2p.trainer.stage_work import StageWork

    torch.set_num_threads(1)
    length, cut = spec.data.sequence_length, cut_of(spec)
    works = [
        StageWork(build_stage(spec.model, cut, index=stage, sequence_length=length), spec) for stage in range(len(cut))
    ]
    durations_s: list[float] = []
    while sum(durations_s) < MEASURED_S or len(durations_s) < MEASURED_STEPS:
        durations_s.append(sum(work.probe() for work in works))
    return sorted(durations_s)[len(durations_s) // 4] * spec.train.batch_size / spec.pipeline.microbatch


def cut_model(spec: TrainerSpec) -> tuple[int, ...]:
    """The blocks of each stage, for a process that has torch already. Raises SpecError."""
    from noloco_p2p.trainer.cut import cut_of
    from noloco_p2p.trainer.stage_needs import StageNeeds

    return cut_of(StageNeeds.of(spec, spec.pipeline.stages).spec)


def run_peer(main: Callable[[list[str]], int], arguments: list[str], log: Path) -> None:
    """Be a peer, in a process of the fork server and a session of its own: the terminal's Ctrl-C reaches only the demo.

    The peer ends when the demo does, however that ends.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.setsid()
    os.environ["NO_COLOR"] = "1"
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(arguments))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class DemoPeer:
    """One `noloco join` in a process. `status` is what it last said of itself, as `noloco status --json`; or None."""

    def __init__(self, index: int, *, plan: DemoPlan, main: Callable[[list[str]], int]) -> None:
        self.index = index
        self.stage = plan.stage(index)
        self.kills = 0
        self.status: dict[str, Any] | None = None
        self.folder = plan.folder / f"peer-{index}"
        self.folder.mkdir()
        self.log = self.folder / "log.txt"
        self.log.touch()
        self.ticket_file = self.folder / "ticket"
        self._plan = plan
        self._main = main
        self._port = plan.port_base + 2 * index if plan.port_base else 0
        self.process: ForkServerProcess | None = None

    def start(self, target: str) -> None:
        """Also again, after a kill: it goes on from its last checkpoint."""
        arguments = ["join", target, "--listen", f"127.0.0.1:{self._port}", "--state-dir", str(self.folder)]
        arguments += ["--threads", "1", "--device", "cpu", "--ticket-file", str(self.ticket_file)]
        if self.stage is not None:
            arguments += ["--stage", str(self.stage)]
        if self._plan.chaos_seed is not None:
            arguments += ["--save-every-rounds", CHAOS_SAVES_EVERY]
        process = _fork_server().Process(target=run_peer, args=(self._main, arguments, self.log))
        process.start()
        self.process = process

    def ask(self) -> None:
        """Bring `status` up to date; a peer that does not answer in time keeps the last one."""
        try:
            answer = ask(self.folder, "status", timeout_s=ASK_TIMEOUT_S)
        except SettingsError:
            return
        self.status = answer or self.status

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and before; negative after a signal."""
        return self.process.exitcode if self.process else None

    def is_done(self) -> bool:
        return self.exit_code is not None or (self.status or {}).get("state") == "done"

    def is_back(self) -> bool:
        """Since its last kill it has begun to train again."""
        return (self.status or {}).get("state", "entering") != "entering"

    def kill(self) -> None:
        """As a machine that loses its power: nobody hears of it."""
        assert self.process is not None
        self.kills += 1
        self.process.kill()
        self.process.join()
        self.status = None

    def ask_to_leave(self) -> None:
        if self.process and self.exit_code is None:
            self.process.terminate()

    def wait_gone(self, until_s: float) -> None:
        """Wait, and in the end kill: nobody outlives the demo."""
        if self.process is None:
            return
        self.process.join(max(0.1, until_s - time.monotonic()))
        if self.exit_code is None:
            self.process.kill()
            self.process.join()


@dataclass(frozen=True, slots=True)
class View:
    """What the demo shows now. `done` of `total` inner steps of the slowest peer, or head of a pipeline; 0 of 0 before
    they begin. columns: the names of what is in `rows`.

    left_s: until training is done; None while that cannot be said.
    """

    doing: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    done: int = 0
    total: int = 0
    left_s: float | None = None


class Demo:
    """`run` yields a `View` twice a second until all peers are done; then `stop`, then `report`. Always `stop`.

    main: runs `noloco` with these arguments and gives its exit code.
    """

    def __init__(self, plan: DemoPlan, main: Callable[[list[str]], int]) -> None:
        self.plan = plan
        self.peers: list[DemoPeer] = []
        self.num_steps = plan.num_steps or 0
        self.step_s: float | None = None  # measured, where `minutes` says how many steps there are
        plan.check()
        self._main = main
        self._spec: TrainerSpec | None = None
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._began_s = time.monotonic()
        self._trains_since: tuple[float, int] | None = None  # when all had begun, and the steps that were done then

    @property
    def spec(self) -> TrainerSpec:
        assert self._spec is not None, "`run` makes it"
        return self._spec

    def run(self) -> Iterator[View]:
        """Raises NolocoError when the first peer does not come up."""
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
        """`stop` knows it before there is a process."""
        peer = DemoPeer(index, plan=self.plan, main=self._main)
        self.peers.append(peer)
        peer.start(target)
        return peer

    def _make_folder(self) -> None:
        folder = self.plan.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise SettingsError(f"{folder} is not empty; give another folder with --keep")
        except OSError as error:
            raise SettingsError(f"{folder}: cannot be used: {error}") from None

    def _load(self) -> Iterator[View]:
        """Until the fork server is ready: what it forks first waits for it."""
        _start_fork_server()
        first = _fork_server().Process(target=int)
        loading = threading.Thread(target=first.start, daemon=True)
        loading.start()
        while loading.is_alive():
            yield View("loading torch and transformers")
            loading.join(POLL_S)
        first.join()

    def _cut(self) -> dict[str, Any]:
        """What the cut changes in the spec. Raises SpecError when there are more stages than blocks."""
        spec = self.plan.spec(MANY_STEPS)
        if spec.pipeline.stages == 1 or spec.pipeline.cut != "auto":
            return {}
        with _workers(1, what="cut") as workers:
            return {"pipeline.cut": workers.submit(cut_model, spec).result()}

    def _measure(self, cut: dict[str, Any]) -> Iterator[View]:
        """How long a step takes while all cores that the peers will use are busy, and so how many steps there are."""
        spec = self.plan.spec(MANY_STEPS).with_changes(cut)
        measure = measure_step_s if spec.pipeline.stages == 1 else measure_pipeline_s
        at_once = min(self.plan.num_peers, self._num_cores)
        with _workers(at_once, what="measurement") as workers:
            futures = [workers.submit(measure, spec) for _ in range(at_once)]
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
        """Ask everybody how far it is."""
        for peer in self.peers:
            if peer.exit_code is None:
                peer.ask()
        names = {peer.status["peer_id"]: f"peer {peer.index}" for peer in self.peers if peer.status}
        rows = [_row(peer, names) for peer in self.peers]
        drivers = [peer for peer in self.peers if not peer.stage]  # inner stages follow the heads
        steps = [self.num_steps if peer.is_done() else _step(peer) for peer in drivers]
        done, now_s = min(min(steps), self.num_steps), time.monotonic()
        if self._trains_since is None and len(self.peers) == self.plan.num_peers and done:
            self._trains_since = now_s, done
        left_s = None
        if self._trains_since and self._trains_since[1] < done < self.num_steps:
            since_s, before = self._trains_since
            left_s = (self.num_steps - done) * (now_s - since_s) / (done - before)
        doing = "training" if any(steps) else "starting the peers"
        columns = (COLUMNS[0], *_where(None if self.plan.num_stages == 1 else "stage"), *COLUMNS[1:])
        return View(doing, columns, rows, done, self.num_steps, left_s)

    def stop(self) -> None:
        """Ask everybody to leave, and wait until all have gone. Safe to call twice."""
        for peer in self.peers:
            peer.ask_to_leave()
        until_s = time.monotonic() + LEAVE_TIMEOUT_S
        for peer in self.peers:
            peer.wait_gone(until_s)
        for process in multiprocessing.active_children():  # what was interrupted in the moment of its start
            process.kill()

    def report(self, draw: Draw) -> dict[str, Any]:
        """Judge the swarm from what the peers that left in order have written: call after `stop`.

        Raises NolocoError when none did.
        """
        left = [peer for peer in self.peers if peer.exit_code == 0]
        if not left:
            raise NolocoError(
                f"no peer has come to its end; the first one's log ends with: {self.peers[0].last_line()}"
            )
        run_id = self.spec.run_id
        folders = [
            [folder_of(peer.folder, run_id) for peer in left if (peer.stage or 0) == stage]
            for stage in range(self.plan.num_stages)
        ]
        export_dir = self.plan.folder / "export"
        with Progress(draw).task("merging the models and evaluating the result"), _workers(1, what="merge") as workers:
            evaluated = workers.submit(evaluate_and_export, self.spec, folders, export_dir).result()
        return {
            "peers": [_result(peer) for peer in self.peers],
            "steps": self.num_steps,
            "merged_peers": len(left),
            **evaluated,
            "export_dir": str(export_dir),
            "wall_s": round(time.monotonic() - self._began_s, 1),
        }


def evaluate_and_export(spec: TrainerSpec, folders: Sequence[Sequence[Path]], export_dir: Path) -> dict[str, float]:
    """Of the mean of the newest checkpoints in these folders of the run, those of each stage, for a process that has
    torch already."""
    from noloco_p2p.trainer.export import export_model
    from noloco_p2p.trainer.model import build_tokenizer
    from noloco_p2p.trainer.swarm_evaluation import evaluate_swarm

    evaluation = evaluate_swarm(spec, folders)
    export_model(evaluation.model, build_tokenizer(spec.data), export_dir)
    return {"merged_loss": evaluation.merged_loss, "spread": evaluation.spread}


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _start_fork_server() -> None:
    """With SIGINT blocked: the terminal sends it to the server, too, which imports for seconds before it ignores it."""
    resource_tracker.ensure_running()  # it unblocks SIGINT again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _fork_server()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _workers(num_processes: int, *, what: str) -> Iterator[ProcessPoolExecutor]:
    """Processes that have torch; an interrupt ends them at once. Raises NolocoError when what they do fails."""
    workers = ProcessPoolExecutor(num_processes, mp_context=_fork_server(), initializer=_begin_worker)
    try:
        yield workers
    except NolocoError:
        raise
    except BrokenProcessPool:
        raise NolocoError(f"the process of the {what} was killed; is memory short?") from None
    except Exception as error:
        raise NolocoError(f"the {what} failed: {error}") from error
    finally:
        for process in [*(workers._processes or {}).values()]:
            process.kill()
        workers.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the demo, too
    threading.Thread(target=_end_with_parent, daemon=True).start()


class Mortal(Protocol):
    """What chaos needs of a peer."""

    def is_done(self) -> bool: ...

    def is_back(self) -> bool: ...

    def kill(self) -> None: ...

    def start(self, target: str) -> None: ...


class Chaos:
    """Kills a peer now and then, and starts it again: which and when follow from the seed."""

    def __init__(self, peers: Sequence[Mortal], *, ticket: str, seed: int, now_s: float) -> None:
        self._peers = peers
        self._ticket = ticket
        self._rng = random.Random(seed)
        self._next_s = now_s + self._rng.uniform(*KILL_EVERY_S)
        self._dead: tuple[Mortal, float] | None = None  # and when it comes back

    @property
    def somebody_is_dead(self) -> bool:
        return self._dead is not None

    def step(self, now_s: float) -> None:
        """Call often. Nobody is killed before all have begun to train: one peer at most is away at a time."""
        if self._dead and now_s >= self._dead[1]:
            self._dead[0].start(self._ticket)
            self._dead = None
            self._next_s = now_s + self._rng.uniform(*KILL_EVERY_S)
        elif self._dead is None and now_s >= self._next_s and all(peer.is_back() for peer in self._peers):
            training = [peer for peer in self._peers if not peer.is_done()]
            if len(training) < 2:
                return  # the last one would be killed for ever, with nobody left to swap with
            victim = self._rng.choice(training)
            victim.kill()
            self._dead = victim, now_s + self._rng.uniform(*BACK_AFTER_S)


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    peers = report["peers"]
    mean = "mean" if peers[0]["stage"] is None else "mean of each stage,"
    return [
        *aligned(_report_rows(peers)),
        *_reason_lines(peers),
        "",
        f"merged model ({mean} of {report['merged_peers']} peers): validation loss {loss(report['merged_loss'])}",
        f"spread of the weights: {100 * report['spread']:.2f} % of their norm",
        f"exported for transformers: {report['export_dir']}",
        f"wall time: {report['wall_s']:.0f} s",
        *_kill_lines(peers),
    ]


def _report_rows(peers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    header = ("id", "rounds", "swaps", "half", "solo", "validation loss", "sent", "received")
    rows: list[tuple[str, ...]] = [("peer", *_where(None if peers[0]["stage"] is None else "stage"), *header)]
    for index, peer in enumerate(peers):
        change = f"{loss(peer['loss_start'])} -> {loss(peer['loss_end'])}"
        row = (
            named(peer["peer_id"]) if peer["peer_id"] else "-",
            *(str(peer[key]) for key in ("rounds", "swaps", "halves", "alone")),
            "-" if peer["stage"] else change,
            mib(peer["bytes_sent"]),
            mib(peer["bytes_received"]),
        )
        rows.append((f"peer {index}", *_where(peer["stage"]), *row))
    return rows


def _where(stage: int | str | None) -> tuple[str, ...]:
    """The column of the stage; none where there are no stages."""
    return () if stage is None else (str(stage),)


def _reason_lines(peers: list[dict[str, Any]]) -> list[str]:
    """Why rounds were half or solo, a line for each peer that had some."""
    lines = []
    for index, peer in enumerate(peers):
        parts = [
            f"{number} {kind} ({', '.join(f'{reason}: {times}' for reason, times in reasons.items())})"
            for kind, reasons in (("half", peer["half_reasons"]), ("solo", peer["solo_reasons"]))
            if (number := sum(reasons.values()))
        ]
        if parts:
            lines.append(f"peer {index}: {', '.join(parts)}")
    return ["", *lines] if lines else []


def _kill_lines(peers: list[dict[str, Any]]) -> list[str]:
    killed = [f"peer {index} {peer['kills']}" for index, peer in enumerate(peers) if peer["kills"]]
    total = sum(peer["kills"] for peer in peers)
    return [f"killed and back again: {total} times ({', '.join(killed)})"] if killed else []


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _step(peer: DemoPeer) -> int:
    return (peer.status or {}).get("step", 0)


def _row(peer: DemoPeer, names: dict[str, str]) -> tuple[str, ...]:
    status = peer.status or {}
    first = (f"peer {peer.index}", *_where(peer.stage), _state(peer))
    if not status.get("step"):
        return (*first, *["-"] * (len(COLUMNS) - 2))
    partner = status["last_partner"]
    return (
        *first,
        str(status["step"]),
        str(status["round"]),
        loss(status["loss"]),
        count(status["tokens_per_s"]),
        names.get(partner, named(partner) if partner else "-"),
        str(status["swaps"]),
        str(status["halves"]),
        str(status["alone"]),
    )


def _state(peer: DemoPeer) -> str:
    if peer.exit_code is not None:
        return "gone" if peer.exit_code == 0 else _how_it_ended(peer.exit_code)
    if peer.status is None:
        return "coming back" if peer.kills else "starting"
    if peer.status["state"] == "training" and peer.status["progress"] >= 1:
        return "closing"
    return peer.status["state"]


def _result(peer: DemoPeer) -> dict[str, Any]:
    events = [event for path in peer.folder.glob("runs/*/events.jsonl") for event in read_events(path)]
    losses = [event["validation_loss"] for event in events if event["event"] == "evaluated"]
    rounds = [event for event in events if event["event"] in ("round", "finished", "stopped")]
    last = rounds[-1] if rounds else {}
    started = [event["peer_id"] for event in events if event["event"] == "started"]
    return {
        "peer_id": started[0] if started else "",
        "stage": peer.stage,
        "rounds": last.get("rounds_here", 0),
        "swaps": last.get("swaps", 0),
        "halves": last.get("halves", 0),
        "alone": last.get("alone", 0),
        "half_reasons": _half_reasons(events),
        "solo_reasons": {why: last[f"alone_{cause}"] for cause, why in WHY_SOLO.items() if last.get(f"alone_{cause}")},
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        "bytes_sent": last.get("bytes_sent", 0),
        "bytes_received": last.get("bytes_received", 0),
        "exit_code": peer.exit_code,
        "kills": peer.kills,
    }


def _half_reasons(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Reasons for half rounds, with how often each was; `half with ..abc123: REASON` is the outcome of a round."""
    outcomes = [event["last_outcome"] for event in events if event["event"] in ("round", "closed")]
    return Counter(outcome.partition(": ")[2] for outcome in outcomes if outcome.startswith("half "))


def failure_lines(demo: Demo) -> list[str]:
    """Which peers did not come to their end, and how; empty when all did."""
    return [
        f"peer {peer.index} {_how_it_ended(peer.exit_code)}; its log {peer.log} ends with: {peer.last_line()}"
        for peer in demo.peers
        if peer.exit_code
    ]


def _how_it_ended(returncode: int) -> str:
    return f"was killed (signal {-returncode})" if returncode < 0 else f"failed (exit code {returncode})"
