"""Runs a swarm of real peers on this machine, shows their progress, and evaluates the result.

Each peer is a process that runs `noloco join`. Its events.jsonl says what it does, and its log.txt what it prints.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from noloco_p2p.errors import NolocoError, SettingsError
from noloco_p2p.peer.run_folder import folder_of
from noloco_p2p.peer_name import named
from noloco_p2p.presets import PRESETS, render
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.swarm.addresses import host_port
from noloco_p2p.swarm.launch import with_parent
from noloco_p2p.telemetry.console import aligned, count, counted, loss, mib, percent
from noloco_p2p.telemetry.events import read_events
from noloco_p2p.telemetry.metrics import FAILED, Metrics
from noloco_p2p.telemetry.progress import Progress

LOOPBACK = "127.0.0.1"
PAGE = re.compile(r"http://\S+")
TICKET_TIMEOUT_S = 300.0  # the first peer reads the corpus and measures its speed before it has a ticket
LEAVE_TIMEOUT_S = 120.0  # each peer writes its last checkpoint
POLL_S = 0.5
# Regardless of the user's settings file.
FLAGS = "--threads 1 --device cpu --report-every-s 2 --when always --map-ports never"
CHAOS_FLAGS = "--save-every-s 3"  # so that a peer that is killed every few seconds does not lose a minute each time
KILL_EVERY_S = (8.0, 20.0)  # range of the random time until the next kill with --chaos
BACK_AFTER_S = (1.0, 5.0)

MEASURED_S, MEASURED_STEPS = 3.0, 8  # minimum seconds and inner steps of a measurement, after the first step
FEWEST_STEPS = 60
MANY_STEPS = 10_000  # total steps of the spec that is checked and measured before the number of steps is known
UPKEEP = 1.5  # time of a step with swaps, evaluation and other peers, relative to the time of a bare step
PIPELINE_UPKEEP = 4.0  # the UPKEEP of a pipeline, which also has codecs, streams and small microbatches
MICROBATCH = 2  # sequences; with 1, the streams would cost as much as the compute; with 4, stages would wait
START_S, START_CPU_S = 10.0, 5.0  # time to join, leave and merge, and processor time to import torch in each process
START_STEPS = 30  # these steps take as long as the evaluations at start and end and the measurements of each peer


class DemoPeer:
    """A peer that runs `noloco join` in its own process, and what its events say since the process began."""

    def __init__(self, index: int, folder: Path, *, stage: int | None, host: str = LOOPBACK) -> None:
        self.name = f"peer {index}"
        self.host = host
        self.stage = stage  # None in a run without stages
        self.folder = folder / f"peer-{index}"
        self.log = self.folder / "log.txt"
        self.kills = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.metrics: dict[str, Any] = {}  # the last ones that were reported, perhaps before it was killed
        self.peer_id = ""
        self.has_begun = self.has_finished = False
        self._events_before = 0  # of earlier processes

    def start(self, target: str, flags: str = "") -> None:
        """Start the peer. A peer that was killed resumes from its last checkpoint."""
        arguments = ["join", target, "--listen", host_port(self.host, 0), "--state-dir", str(self.folder)]
        arguments += ["--ticket-file", str(self.folder / "ticket"), "--name", self.name]
        arguments += [*FLAGS.split(), *flags.split()]
        arguments += [] if self.stage is None else ["--stage", str(self.stage)]
        self.folder.mkdir(exist_ok=True)
        self.has_begun = self.has_finished = False
        self._events_before = len(self.events())
        self.process = _start(arguments, self.log)

    def kill(self) -> None:
        """Kill the peer without warning, as a power failure would."""
        assert self.process is not None
        self.kills += 1
        self.process.kill()
        self.process.wait()

    def events(self) -> list[dict[str, Any]]:
        return [event for path in self.folder.glob("runs/*/events.jsonl") for event in read_events(path)]

    def look(self) -> None:
        """Update what is known of the peer."""
        for number, event in enumerate(self.events()):
            if event["event"] in ("report", "closing", "finished", "stopped"):
                self.metrics = event
            if event["event"] == "started":
                self.peer_id = event["peer_id"]
            if number >= self._events_before:
                self.has_begun |= event["event"] == "started"
                self.has_finished |= event["event"] == "finished"

    @property
    def exit_code(self) -> int | None:
        """The exit code: None before the start and while the peer is running, and negative if a signal killed it."""
        return self.process.poll() if self.process else None

    @property
    def is_done(self) -> bool:
        return self.exit_code is not None or self.has_finished

    @property
    def state(self) -> str:
        if code := self.exit_code:
            return f"was killed (signal {-code})" if code < 0 else f"failed (exit code {code})"
        if self.is_done:
            return "done" if self.exit_code is None else "gone"
        if not self.has_begun:
            return "coming back" if self.kills else "starting"
        return "closing" if self.metrics.get("progress", 0) >= 1 else "training"

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def result(self) -> dict[str, Any]:
        """Return what the report says about this peer."""
        losses = [event["validation_loss"] for event in self.events() if event["event"] == "evaluated"]
        told = Metrics().as_dict() | self.metrics
        return {
            "peer_id": self.peer_id,
            "stage": self.stage,
            "failed": sum(told[name] for name in FAILED),
            "loss_start": losses[0] if losses else None,
            "loss_end": losses[-1] if losses else None,
            **{key: told[key] for key in ("step", "swaps", "bytes_sent", "bytes_received")},
            "exit_code": self.exit_code,
            "kills": self.kills,
        }


@dataclass
class Demo:
    """A demo that runs real peers on this machine.

    `folder` holds the spec, a folder for each peer with its log, and the exported model. If `num_steps` is 0, the demo
    takes as many steps as this machine can take in `minutes` minutes. Iterate over `run`, which yields twice a second
    until all peers are done. Then call `stop` and `report`. Call `stop` even if `run` fails.
    """

    folder: Path
    num_peers: int = 4
    num_steps: int = 0
    minutes: float = 4.0
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted fields of the spec
    chaos_seed: int | None = None  # determines which peers are killed and restarted, and when
    num_stages: int = 1
    host: str = LOOPBACK  # where the peers listen; on any other address, other machines can join and see the page

    def __post_init__(self) -> None:
        """Check the plan before anything starts. Raises SettingsError or SpecError if it is invalid."""
        spec, stages = self.spec(self.num_steps or MANY_STEPS), self.num_stages
        if spec.pipeline.stages != stages:
            raise SettingsError(
                f"--set pipeline.stages={spec.pipeline.stages} is not allowed in the demo; use --stages instead"
            )
        if not spec.model.pretrained and spec.model.num_layers < stages:
            raise SettingsError(
                f"--stages {stages}: the model has {spec.model.num_layers} blocks, and each stage needs at least one; "
                f"add blocks with --set model.num_layers={stages}"
            )
        if self.num_peers < stages:
            raise SettingsError(
                f"--peers {self.num_peers} is too few: each of the {stages} stages needs at least one peer"
            )
        if stages > 1 and self.chaos_seed is not None and self.num_peers < 2 * stages:
            raise SettingsError(
                f"--chaos with --peers {self.num_peers}: {stages} stages need {2 * stages} peers (two per stage), "
                "because a stage loses its weights if its only peer is killed"
            )
        self.peers = [
            DemoPeer(index, self.folder, stage=index % stages if stages > 1 else None, host=self.host)
            for index in range(self.num_peers)
        ]
        self.ticket = self.page = ""  # for other machines, once they are known
        self._page: subprocess.Popen[bytes] | None = None
        self.doing = ""
        self.step_s: float | None = None  # measured if `minutes` decides the number of steps
        self._spec = spec
        self._began_s = time.monotonic()
        self._trains_since: tuple[float, int] | None = None  # when all peers had begun, and the steps done by then

    def spec(self, num_steps: int) -> TrainerSpec:
        """Return the preset `tiny` with a schedule of `num_steps`."""
        tiny = PRESETS["tiny"]
        warmup = min(tiny.train.warmup_steps, num_steps // 4)
        changes = {"name": "demo", "train.total_steps": num_steps, "train.warmup_steps": warmup}
        if self.num_stages > 1:
            changes |= {"model.parameter_seeds": True, "pipeline.stages": self.num_stages}
            changes["pipeline.microbatch"] = MICROBATCH
        return tiny.with_changes(changes, origin="--steps").with_changes(dict(self.changes), origin="--set")

    def run(self) -> Iterator[None]:
        """Run all peers until training ends. Raises NolocoError if the first peer does not start."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise SettingsError(f"{self.folder} is not empty; choose another folder with --keep")
        except OSError as error:
            raise SettingsError(f"{self.folder} cannot be used: {error}") from None
        if not self.num_steps:
            self.doing = "measuring how fast this machine trains"
            yield
            self.step_s = measure_step_s(self._spec)
            num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            left_s = 60 * self.minutes - (time.monotonic() - self._began_s)
            self.num_steps = self.steps_in_time(step_s=self.step_s, num_cores=num_cores, left_s=left_s)
        self._spec = self.spec(self.num_steps)
        if self.num_stages > 1 and self._spec.pipeline.cut == "auto":
            from noloco_p2p.trainer.stage_choice import StageNeeds

            self._spec = StageNeeds.of(self._spec, self.num_stages).spec
        spec_file, ticket = self.folder / "demo.toml", self.peers[0].folder / "ticket"
        spec_file.write_text(render(self._spec), encoding="utf-8")
        flags = "" if self.chaos_seed is None else CHAOS_FLAGS
        self.peers[0].start(str(spec_file), flags)
        until_s = time.monotonic() + TICKET_TIMEOUT_S
        while not ticket.exists():
            if self.peers[0].exit_code is not None or time.monotonic() > until_s:
                raise NolocoError(f"the first peer did not start; its log ends with: {self.peers[0].last_line()}")
            yield self._look()
            time.sleep(POLL_S)
        for peer in self.peers[1:]:
            peer.start(f"@{ticket}", flags)
        if self.host != LOOPBACK:
            self.ticket = ticket.read_text(encoding="utf-8").strip()
            self._page = _start(["monitor", f"@{ticket}", "--web", "--listen", host_port(self.host, 0)], self._page_log)
        kills = iter(()) if self.chaos_seed is None else chaos(self.peers, target=f"@{ticket}", seed=self.chaos_seed)
        while next(kills, False) or not all(peer.is_done for peer in self.peers):
            yield self._look()
            time.sleep(POLL_S)
        yield self._look()

    def steps_in_time(self, *, step_s: float, num_cores: int, left_s: float) -> int:
        """Return the number of inner steps per peer, or per head of a pipeline, that fit into `left_s` seconds.

        `step_s` is the time of an inner step of the whole model on one core. The result is a multiple of 10.
        """
        if self.num_stages == 1:
            each_s = step_s * UPKEEP * max(1.0, self.num_peers / num_cores)
        else:
            num_heads = -(-self.num_peers // self.num_stages)
            each_s = step_s * PIPELINE_UPKEEP * max(num_heads / num_cores, 1 / self.num_stages)
        start_s = START_S + START_CPU_S * max(1.0, self.num_peers / num_cores)
        return max(FEWEST_STEPS, int((left_s - start_s) / each_s - START_STEPS) // 10 * 10)

    def _look(self) -> None:
        for peer in self.peers:
            peer.look()
        if self._page and not self.page:
            found = PAGE.search(self._page_log.read_text(errors="replace"))
            self.page = found[0] if found else ""
        self.doing = "training" if any(peer.has_begun for peer in self.peers) else "starting the peers"
        if all(peer.is_done for peer in self.peers):
            self.doing = "all peers are done"
        elif all(peer.state in ("closing", "done", "gone") for peer in self.peers):
            self.doing = "mixing the final weights"
        if self._trains_since is None and self.done and all(peer.metrics or peer.is_done for peer in self.peers):
            self._trains_since = time.monotonic(), self.done

    @property
    def _page_log(self) -> Path:
        return self.folder / "page.txt"

    @property
    def done(self) -> int:
        """The position of the slowest peer, or of the slowest head of a pipeline, in the schedule, as inner steps.

        Peers that have not reported yet do not count, because they begin where the others are.
        """
        heads = [peer for peer in self.peers if not peer.stage and (peer.metrics or peer.is_done)]
        positions = [1.0 if each.is_done else each.metrics.get("progress", 0.0) for each in heads]
        return int(self.num_steps * min(positions, default=0.0))

    @property
    def left_s(self) -> float | None:
        """The number of seconds until training is done, or None while it is unknown."""
        if self._trains_since is None or not self._trains_since[1] < self.done < self.num_steps:
            return None
        since_s, before = self._trains_since
        return (self.num_steps - self.done) * (time.monotonic() - since_s) / (self.done - before)

    def table(self) -> list[dict[str, str]]:
        """Return a row for each peer: the texts of its cells by column."""
        names = {peer.peer_id: peer.name for peer in self.peers if peer.peer_id}
        rows = []
        for peer in self.peers:
            told = peer.metrics
            rows.append(
                {
                    "peer": peer.name,
                    **({} if peer.stage is None else {"stage": str(peer.stage)}),
                    "state": peer.state,
                    "step": str(told["step"]) if told else "-",
                    "loss": loss(told["loss"]) if told else "-",
                    "tokens/s": count(told["tokens_per_s"]) if told else "-",
                    "last swap with": names.get(told["last_partner"], named(told["last_partner"]))
                    if told.get("last_partner")
                    else "-",
                    "swaps": str(told["swaps"]) if told else "-",
                    "apart": "-" if told.get("apart") is None else percent(told["apart"]),
                }
            )
        return rows

    def summary(self) -> str:
        """Describe all peers together, for example `loss 2.310, 184 swaps, 0.4 % apart`."""
        told = [peer.metrics for peer in self.peers if peer.metrics]
        losses = [metrics["loss"] for metrics in told if metrics["loss"] is not None]
        apart = [metrics["apart"] for metrics in told if metrics["apart"] is not None]
        parts = [f"loss {loss(mean(losses))}"] if losses else []
        if swaps := sum(metrics["swaps"] for metrics in told) // 2:  # both partners count a swap
            parts.append(counted(swaps, "swap"))
        return ", ".join([*parts, f"{percent(mean(apart))} apart"] if apart else parts)

    def stop(self) -> None:
        """Ask all peers to leave, wait until all have ended, and kill those that do not. It can be called twice."""
        running = [peer.process for peer in self.peers if peer.process and peer.exit_code is None]
        running += [self._page] if self._page else []
        for process in running:
            process.terminate()
        until_s = time.monotonic() + LEAVE_TIMEOUT_S
        for process in running:
            try:
                process.wait(max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def report(self) -> dict[str, Any]:
        """Merge, evaluate and export the checkpoints of the peers that left cleanly, and return the report.

        Call it after `stop`. Raises NolocoError if no peer left cleanly.
        """
        left = [peer for peer in self.peers if peer.exit_code == 0]
        if not left:
            raise NolocoError(f"no peer finished; the log of the first peer ends with: {self.peers[0].last_line()}")
        folders = [
            [folder_of(peer.folder, self._spec.run_id) for peer in left if (peer.stage or 0) == stage]
            for stage in range(self.num_stages)
        ]
        with Progress(print).task("merging the models and evaluating the result"):
            from noloco_p2p.trainer.export import export_model
            from noloco_p2p.trainer.model import build_tokenizer
            from noloco_p2p.trainer.swarm_evaluation import evaluate_swarm

            evaluation = evaluate_swarm(self._spec, folders)
            export_model(evaluation.model, build_tokenizer(self._spec.data), self.folder / "export")
        for peer in self.peers:
            peer.look()
        return {
            "peers": [peer.result() for peer in self.peers],
            "steps": self.num_steps,
            "merged_peers": len(left),
            "merged_loss": evaluation.merged_loss,
            "spread": evaluation.spread,
            "export_dir": str(self.folder / "export"),
            "wall_s": round(time.monotonic() - self._began_s, 1),
        }

    def failures(self) -> list[str]:
        """List the peers that failed, and how they ended. The list is empty if all succeeded."""
        return [
            f"{peer.name} {peer.state}; its log {peer.log} ends with: {peer.last_line()}"
            for peer in self.peers
            if peer.exit_code
        ]


def _start(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a `noloco` command that writes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            with_parent(sys.executable, "-m", "noloco_p2p", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "NO_COLOR": "1"},
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the demo
        )


def measure_step_s(spec: TrainerSpec) -> float:
    """Measure how many seconds an inner step of the whole model takes on random tokens with one thread.

    The result is the lower quartile of many measurements, because other programs may slow down some of them.
    """
    import torch

    from noloco_p2p.trainer.inner_step import InnerStep
    from noloco_p2p.trainer.model import build_model

    torch.set_num_threads(1)
    step = InnerStep(build_model(spec.model, sequence_length=spec.data.sequence_length), spec.train)
    tokens = min(256, spec.model.vocab_size or 256)
    batch = torch.randint(0, tokens, (spec.train.batch_size, spec.data.sequence_length))
    durations_s: list[float] = []
    while sum(durations_s[1:]) < MEASURED_S or len(durations_s) <= MEASURED_STEPS:
        began_s = time.monotonic()
        step(batch, progress=0.0)
        durations_s.append(time.monotonic() - began_s)
    return sorted(durations_s[1:])[len(durations_s) // 4]


def chaos(peers: Sequence[DemoPeer], *, target: str, seed: int) -> Iterator[bool]:
    """Kill a peer now and then, and restart it. Each step yields whether a peer is down; there is one at a time.

    The seed determines which peers are killed, and when. Kills begin once all peers are training.
    """
    rng = random.Random(seed)
    while True:
        next_s = time.monotonic() + rng.uniform(*KILL_EVERY_S)
        training: list[DemoPeer] = []
        # The last peer would be killed again and again, and has no partner.
        while time.monotonic() < next_s or not all(peer.has_begun for peer in peers) or len(training) < 2:
            yield False
            training = [peer for peer in peers if not peer.is_done]
        victim = rng.choice(training)
        victim.kill()
        back_s = time.monotonic() + rng.uniform(*BACK_AFTER_S)
        while time.monotonic() < back_s:
            yield True
        victim.start(target, CHAOS_FLAGS)


def report_lines(report: dict[str, Any]) -> list[str]:
    """Format a report."""
    peers, has_stages = report["peers"], report["peers"][0]["stage"] is not None
    stage = ("stage",) if has_stages else ()
    rows: list[tuple[str, ...]] = [
        ("peer", *stage, "id", "steps", "swaps", "failed", "validation loss", "sent", "received")
    ]
    for index, peer in enumerate(peers):
        own_id = named(peer["peer_id"]) if peer["peer_id"] else "-"
        counts = (str(peer[key]) for key in ("step", "swaps", "failed"))
        change = "-" if peer["stage"] else f"{loss(peer['loss_start'])} -> {loss(peer['loss_end'])}"
        traffic = (mib(peer["bytes_sent"]), mib(peer["bytes_received"]))
        rows.append((f"peer {index}", *(str(peer[key]) for key in stage), own_id, *counts, change, *traffic))
    killed = [f"peer {index}: {peer['kills']}" for index, peer in enumerate(peers) if peer["kills"]]
    total = sum(peer["kills"] for peer in peers)
    merged = counted(report["merged_peers"], "peer") + (", stage by stage" if has_stages else "")
    return [
        *aligned(rows),
        "",
        f"merged model (mean of {merged}): validation loss {loss(report['merged_loss'])}",
        f"spread of the weights: {100 * report['spread']:.2f} % of their norm",
        f"exported for transformers: {report['export_dir']}",
        f"wall time: {report['wall_s']:.0f} s",
        *([f"killed and restarted: {total} times ({', '.join(killed)})"] if killed else []),
    ]
