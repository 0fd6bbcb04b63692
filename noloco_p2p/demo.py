"""The main job in small: real peers as real processes on loopback, watched until they are done, then judged."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from noloco_p2p.errors import NolocoError, SettingsError
from noloco_p2p.peer.kept import folder_of
from noloco_p2p.presets import PRESETS, render
from noloco_p2p.spec import RunSpec
from noloco_p2p.swarm import launch
from noloco_p2p.telemetry.console import count, loss, mib, named
from noloco_p2p.telemetry.events import read_events
from noloco_p2p.telemetry.progress import Progress

TICKET_TIMEOUT_S = 120.0  # the first peer imports torch, reads the corpus and measures itself before it has one
LEAVE_TIMEOUT_S = 30.0
POLL_S = 0.5
TICKET_LINE = "noloco join noloco1"
CHAOS_SAVES_EVERY = "3"  # rounds; who is killed every few seconds must not lose a minute each time
KILL_EVERY_S = (8.0, 20.0)  # with --chaos: between two kills, by chance
BACK_AFTER_S = (1.0, 5.0)
COLUMNS = ("peer", "state", "round", "loss", "tokens/s", "last swap with", "out", "in", "alone")


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """`folder` holds everything: the spec, a folder per peer with its log, the exported model."""

    folder: Path
    num_peers: int = 4
    num_steps: int = 480
    port_base: int = 0  # peer i listens on port_base + 2 i; 0 = free ports
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted fields of the spec
    chaos_seed: int | None = None  # peers are killed and come back, when and which by this seed

    def spec(self) -> RunSpec:
        """The preset `tiny` with a shorter schedule: the learning rate comes down within the demo."""
        warmup_steps = min(PRESETS["tiny"].train.warmup_steps, self.num_steps // 4)
        changes = {"name": "demo", "train.total_steps": self.num_steps, "train.warmup_steps": warmup_steps}
        return PRESETS["tiny"].with_changes(changes, origin="--steps").with_changes(dict(self.changes), origin="--set")


class DemoPeer:
    """One `noloco join` in a process and a session of its own: the terminal's Ctrl-C reaches only the demo."""

    def __init__(self, index: int, *, plan: DemoPlan, target: str) -> None:
        self.index = index
        self.kills = 0
        self._plan = plan
        self.folder = plan.folder / f"peer-{index}"
        self.folder.mkdir()
        self._port = plan.port_base + 2 * index if plan.port_base else 0
        self.log = self.folder / "log.txt"
        self.start(target)

    def start(self, target: str) -> None:
        """Also again, after a kill: it goes on from its last checkpoint."""
        join = [sys.executable, "-m", "noloco_p2p", "join", target, "--listen", f"127.0.0.1:{self._port}"]
        join += ["--state-dir", str(self.folder), "--threads", "1", "--device", "cpu"]
        if self._plan.chaos_seed is not None:
            join += ["--save-every-rounds", CHAOS_SAVES_EVERY]
        # The launcher ties the peer's life to ours: a killed demo leaves nobody behind.
        command = [sys.executable, "-I", "-S", str(launch.__file__), str(os.getpid()), *join]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def events(self) -> list[dict[str, Any]]:
        return [event for path in self.folder.glob("runs/*/events.jsonl") for event in read_events(path)]

    def ticket(self) -> str | None:
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith(TICKET_LINE):
                return line.split()[-1]
        return None

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def is_done(self) -> bool:
        return self.process.poll() is not None or any(event["event"] == "finished" for event in self.events())

    def is_back(self) -> bool:
        """Since its last kill it has begun to train again."""
        return sum(event["event"] == "started" for event in self.events()) > self.kills

    def kill(self) -> None:
        """As a machine that loses its power: nobody is told."""
        self.kills += 1
        self.process.kill()
        self.process.wait()

    def ask_to_leave(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait_gone(self, until_s: float) -> None:
        """Wait, and in the end kill: nobody outlives the demo."""
        try:
            self.process.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Demo:
    """`run` yields the table of the swarm again and again until all peers are done; then `report`. Always `stop`."""

    def __init__(self, plan: DemoPlan) -> None:
        self.plan = plan
        self.spec = plan.spec()
        self.peers: list[DemoPeer] = []
        self._began_s = time.monotonic()

    def run(self) -> Iterator[list[tuple[str, ...]]]:
        """Rows of the table, twice a second. Raises NolocoError when the first peer does not come up."""
        first = DemoPeer(0, plan=self.plan, target=str(self._write_spec()))
        self.peers.append(first)
        until_s = time.monotonic() + TICKET_TIMEOUT_S
        while (ticket := first.ticket()) is None:
            if first.process.poll() is not None or time.monotonic() > until_s:
                raise NolocoError(f"the first peer did not start; its log ends with: {first.last_line()}")
            yield self.rows()
            time.sleep(POLL_S)
        self.peers += [DemoPeer(index, plan=self.plan, target=ticket) for index in range(1, self.plan.num_peers)]
        seed, now_s = self.plan.chaos_seed, time.monotonic()
        chaos = None if seed is None else Chaos(self.peers, ticket=ticket, seed=seed, now_s=now_s)
        while not all(peer.is_done() for peer in self.peers) or (chaos and chaos.somebody_is_dead):
            if chaos:
                chaos.step(time.monotonic())
            yield self.rows()
            time.sleep(POLL_S)
        yield self.rows()

    def _write_spec(self) -> Path:
        spec_file = self.plan.folder / "demo.toml"
        try:
            self.plan.folder.mkdir(parents=True, exist_ok=True)
            if any(self.plan.folder.iterdir()):
                raise SettingsError(f"{self.plan.folder} is not empty; give another folder with --keep")
            spec_file.write_text(render(self.spec), encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{self.plan.folder}: cannot be used: {error}") from None
        return spec_file

    def rows(self) -> list[tuple[str, ...]]:
        names: dict[str, str] = {}
        for peer in self.peers:
            names |= {event["peer_id"]: f"peer {peer.index}" for event in peer.events() if event["event"] == "started"}
        return [_row(peer, names) for peer in self.peers]

    def stop(self) -> None:
        """Ask everybody to leave, and wait until all have gone. Safe to call twice."""
        for peer in self.peers:
            peer.ask_to_leave()
        until_s = time.monotonic() + LEAVE_TIMEOUT_S
        for peer in self.peers:
            peer.wait_gone(until_s)

    def report(self, *, progress: Progress | None = None) -> dict[str, Any]:
        """Judge the swarm from what the peers that left in order have written: call after `stop`.

        Raises NolocoError when none did.
        """
        from noloco_p2p.train.export import export_model
        from noloco_p2p.train.judge import judge
        from noloco_p2p.train.model import build_tokenizer

        peers = [_result(peer) for peer in self.peers]
        left = [peer for peer in self.peers if peer.process.returncode == 0]
        if not left:
            raise NolocoError(
                f"no peer has come to its end; the first one's log ends with: {self.peers[0].last_line()}"
            )
        folders = [folder_of(peer.folder, self.spec.run_id) / "checkpoints" for peer in left]
        verdict = judge(self.spec, folders, progress=progress)
        export_dir = export_model(verdict.model, build_tokenizer(self.spec.data), self.plan.folder / "export")
        return {
            "peers": peers,
            "merged_peers": len(left),
            "merged_loss": verdict.merged_loss,
            "spread": verdict.spread,
            "export_dir": str(export_dir),
            "wall_s": round(time.monotonic() - self._began_s, 1),
        }


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
    header = ("peer", "id", "rounds", "swapped", "half", "alone", "validation loss", "sent", "received")
    rows = [
        (
            f"peer {index}",
            named(peer["peer_id"]) if peer["peer_id"] else "-",
            str(peer["rounds"]),
            str(peer["swaps"]),
            str(peer["halves"]),
            str(peer["alone"]),
            f"{loss(peer['loss_start'])} -> {loss(peer['loss_end'])}",
            mib(peer["bytes_sent"]),
            mib(peer["bytes_received"]),
        )
        for index, peer in enumerate(report["peers"])
    ]
    return [
        *aligned([header, *rows]),
        "",
        f"merged model (mean of {report['merged_peers']} peers): validation loss {loss(report['merged_loss'])}",
        f"spread of the weights: {100 * report['spread']:.2f} % of their norm",
        f"exported for transformers: {report['export_dir']}",
        f"wall time: {report['wall_s']:.0f} s",
        *_kill_lines(report["peers"]),
    ]


def _kill_lines(peers: list[dict[str, Any]]) -> list[str]:
    killed = [f"peer {index} {peer['kills']}" for index, peer in enumerate(peers) if peer["kills"]]
    total = sum(peer["kills"] for peer in peers)
    return [f"killed and back again: {total} times ({', '.join(killed)})"] if killed else []


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(peer: DemoPeer, names: dict[str, str]) -> tuple[str, ...]:
    events = peer.events()
    rounds = [event for event in events if event["event"] in ("round", "closed")]
    state = "training" if events else "starting"
    if any(event["event"] == "finished" for event in events):
        state = "done"
    elif rounds and rounds[-1]["event"] == "closed":
        state = "closing"
    elif peer.kills and not peer.is_back():
        state = "coming back"
    if peer.process.poll() is not None:
        code = peer.process.returncode
        state = "gone" if code == 0 else f"killed ({-code})" if code < 0 else f"failed ({code})"
    if not rounds:
        return (f"peer {peer.index}", state, *["-"] * (len(COLUMNS) - 2))
    last = rounds[-1]
    partner = last["last_partner"]
    return (
        f"peer {peer.index}",
        state,
        str(last["round"]),
        loss(last["loss"]),
        count(last["tokens_per_s"]),
        names.get(partner, named(partner) if partner else "-"),
        mib(last["bytes_sent"]),
        mib(last["bytes_received"]),
        str(last["alone"]),
    )


def _result(peer: DemoPeer) -> dict[str, Any]:
    events = peer.events()
    losses = [event["validation_loss"] for event in events if event["event"] == "evaluated"]
    rounds = [event for event in events if event["event"] in ("round", "finished", "stopped")]
    last = rounds[-1] if rounds else {}
    started = [event["peer_id"] for event in events if event["event"] == "started"]
    return {
        "peer_id": started[0] if started else "",
        "rounds": last.get("rounds_here", 0),
        "swaps": last.get("swaps", 0),
        "halves": last.get("halves", 0),
        "alone": last.get("alone", 0),
        "loss_start": losses[0] if losses else None,
        "loss_end": losses[-1] if losses else None,
        "bytes_sent": last.get("bytes_sent", 0),
        "bytes_received": last.get("bytes_received", 0),
        "exit_code": peer.process.returncode,
        "kills": peer.kills,
    }


def failure_lines(demo: Demo) -> list[str]:
    """Which peers did not come to their end, and how; empty when all did."""
    return [
        f"peer {peer.index} {_how_it_ended(peer.process.returncode)}; its log {peer.log} ends with: {peer.last_line()}"
        for peer in demo.peers
        if peer.process.returncode
    ]


def _how_it_ended(returncode: int) -> str:
    return f"was killed (signal {-returncode})" if returncode < 0 else f"failed (exit code {returncode})"
