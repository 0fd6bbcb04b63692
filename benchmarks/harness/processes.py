"""Run real peers for tests. Each `noloco` command has its own process and session, and is watched through its output.

Nothing here sleeps to synchronise: every wait polls a condition, and has a deadline.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from harness.patience import PATIENCE_S
from noloco_p2p.control import ask
from noloco_p2p.presets import PRESETS, render
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.events import read_events

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")

POLL_S = 0.05
STACKS_S = 10.0  # a process that does not end has this long to print where it is
REPORT_EVERY_S = "0.3"  # of a peer
JOIN_LINE, TICKET_LINE = "others join with", "noloco join noloco1"  # the second, only of a peer that starts a run
SMALL = {  # a model whose inner steps take about 15 ms on one core
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.mlp_size": 128,
    "data.sequence_length": 64,
    "train.batch_size": 4,
    "train.total_steps": 1_000_000,
    "evaluate.num_sequences": 16,
}


def small_spec(name: str, **changes: Any) -> TrainerSpec:
    """Return a spec of a small model. In `changes`, __ stands for a dot."""
    dotted = {field.replace("__", "."): value for field, value in changes.items()}
    return PRESETS["tiny"].with_changes({"name": name, "train.warmup_steps": 10} | SMALL | dotted, origin="test")


def write_spec(spec: TrainerSpec, folder: Path) -> Path:
    path = folder / f"{spec.name}.toml"
    path.write_text(render(spec), encoding="utf-8")
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def until(condition: Callable[[], T | None], *, what: Callable[[], str] | str, timeout_s: float = PATIENCE_S) -> T:
    """Poll `condition`, and return its first true value. Raises AssertionError with `what` after the timeout."""
    until_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > until_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)
    return value


def noloco(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one command until it ends, with separate stdout and stderr."""
    return subprocess.run(
        _command(arguments),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=_environment(environment),
        stdin=subprocess.DEVNULL,
        check=False,
    )


# Run a command that the kernel ends with this process, so a killed test run leaves no process behind (Linux only).
END_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
os.execv(sys.argv[1], sys.argv[1:])
"""


class Command:
    """A running `noloco` command or script. Use it as a context manager, which always kills the process at the end.

    `namespace` is the network namespace to run in, as listed by `ip netns`. `ranks` is the number of processes that
    torchrun starts.
    """

    def __init__(
        self, *arguments: str | Path, log: Path, namespace: str = "", ranks: int = 0, **environment: str
    ) -> None:
        self.log = log
        launcher = [sys.executable, "-I", "-S", "-c", END_WITH_PARENT]
        if namespace:
            launcher = ["ip", "netns", "exec", namespace, *launcher]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*launcher, *_command(arguments, ranks=ranks)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(environment),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"the end of {self.log}:\n{self.text[-2000:]}")
        self.end()

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, *, timeout_s: float = PATIENCE_S) -> str:
        """Wait for a line of the output that contains `text`, and return it."""

        def found() -> str | None:
            for line in self.text.splitlines():
                if text in line:
                    return line
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode} before it said {text!r}:\n{self.text}")
            return None

        return until(found, timeout_s=timeout_s, what=lambda: f"{text!r} in\n{self.text}")

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until the process ends, and return its exit code. A process that does not end tells where it is."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGABRT)  # with PYTHONFAULTHANDLER, it prints the stack of each thread
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STACKS_S)
            raise AssertionError(f"did not end within {timeout_s:.0f} s:\n{self.text}") from None

    def find_p2pd(self) -> psutil.Process | None:
        """Return the libp2p daemon of this peer, or None if no daemon is running."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next((child for child in children if child.name() == "p2pd"), None)

    def p2pd(self) -> psutil.Process:
        return until(self.find_p2pd, what="p2pd")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)


class PeerProcess(Command):
    """A running `noloco join TARGET` with its own state folder, on loopback or in a namespace at the address `host`."""

    def __init__(
        self,
        target: str | Path,
        folder: Path,
        *flags: str,
        host: str = "127.0.0.1",
        namespace: str = "",
        ranks: int = 0,
        **environment: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._events_before = 0
        join = ("join", target, "--state-dir", folder, "--listen", f"{host}:0", "--threads", "1", "--device", "cpu")
        join += ("--report-every-s", REPORT_EVERY_S)
        self._events_before = len(self._read())
        log = folder / f"log-{time.time_ns()}.txt"
        super().__init__(*join, *flags, log=log, namespace=namespace, ranks=ranks, **environment)

    @property
    def ticket(self) -> str:
        if "noloco ticket" not in self.wait_for(JOIN_LINE):
            return self.wait_for(TICKET_LINE).split()[-1]
        reply = ask(self.folder, "status")
        assert reply, self.text
        return reply["ticket"]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind from this process, without those of earlier processes in the same folder."""
        return [event for event in self._read()[self._events_before :] if event["event"] == kind]

    @property
    def peer_id(self) -> str:
        return self.event("started")["peer_id"]

    def give_way(self) -> None:
        """Lower the priority of a peer that only has to exist, so that it does not slow the test."""
        psutil.Process(self.process.pid).nice(10)

    def event(self, kind: str, *, timeout_s: float = PATIENCE_S, **fields: Any) -> dict[str, Any]:
        """Wait for the first event of a kind whose fields have these values."""

        def found() -> dict[str, Any] | None:
            for event in self.events(kind):
                if all(event[name] == value for name, value in fields.items()):
                    return event
            return None

        return until(found, timeout_s=timeout_s, what=lambda: f"{kind} {fields} of\n{self.text}")

    def report_where(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a report of this process that meets a condition, from the next report on."""
        before = len(self.events("report"))

        def found() -> dict[str, Any] | None:
            return next(filter(condition, self.events("report")[before:]), None)

        return until(found, what=lambda: f"such a report in\n{self.text}")

    def swap_with(self, other: PeerProcess) -> dict[str, Any]:
        """Wait for a report of a new swap, of which the last one was with another process."""
        swaps = self.report_where(lambda event: True)["swaps"]
        partner = other.peer_id
        return self.report_where(lambda event: event["swaps"] > swaps and event["last_partner"] == partner)

    def _read(self) -> list[dict[str, Any]]:
        return [event for path in self.folder.glob("runs/*/events.jsonl") for event in read_events(path)]


def _command(arguments: tuple[str | Path, ...], *, ranks: int = 0) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks else []
    is_script = str(arguments[0]).endswith(".py")
    return [sys.executable, *torchrun, *([] if is_script else ["-m", "noloco_p2p"]), *map(str, arguments)]


def _environment(more: dict[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("NOLOCO_")}
    quiet = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "XDG_CONFIG_HOME": "/nonexistent"}
    return own | quiet | {"PYTHONFAULTHANDLER": "1"} | more
