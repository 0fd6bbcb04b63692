"""Starts processes from a fork server that has imported torch, transformers and hivemind.

Importing them takes one core about four seconds. Forked peers do not repeat these imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from noloco_p2p.control import ask
from noloco_p2p.demo.plan import DemoPlan
from noloco_p2p.errors import NolocoError, SettingsError

PRELOADED = [
    "noloco_p2p.trainer.loop",
    "noloco_p2p.trainer.stage_trainer",
    "noloco_p2p.trainer.stage_needs",
    "noloco_p2p.trainer.swarm_evaluation",
    "noloco_p2p.trainer.export",
]
ASK_TIMEOUT_S = 1.0  # if a peer on a busy machine takes longer to answer, its row stays the same
REPORT_EVERY_S = "2"
CHAOS_SAVES_EVERY_S = "3"  # so that a peer that is killed every few seconds does not lose a minute each time


def fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_fork_server() -> None:
    """Start the fork server with SIGINT blocked.

    Ctrl-C in the terminal also reaches the server, which begins to ignore SIGINT only after its imports.
    """
    resource_tracker.ensure_running()  # before blocking, because its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        fork_server()
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def workers(num_processes: int, *, what: str) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes that have imported torch. An interrupt ends them immediately.

    `what` names the work in error messages. Raises NolocoError when the work fails.
    """
    pool = ProcessPoolExecutor(num_processes, mp_context=fork_server(), initializer=_begin_worker)
    try:
        yield pool
    except NolocoError:
        raise
    except BrokenProcessPool:
        raise NolocoError(f"the process for {what} was killed; the machine may be out of memory") from None
    except Exception as error:
        raise NolocoError(f"{what} failed: {error}") from error
    finally:
        for process in [*(pool._processes or {}).values()]:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    # Ctrl-C in the terminal also reaches this process, but the demo handles it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def run_peer(main: Callable[[list[str]], int], arguments: list[str], log: Path) -> None:
    """Run a peer in a process of the fork server.

    The process has its own session, so Ctrl-C in the terminal does not reach it. The peer leaves when the demo ends,
    even if the demo is killed.
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
    """A peer that runs `noloco join` in its own process. `status` is the last status that it reported, or None."""

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
        """Start the peer. A peer that was killed resumes from its last checkpoint."""
        arguments = ["join", target, "--listen", f"127.0.0.1:{self._port}", "--state-dir", str(self.folder)]
        arguments += ["--threads", "1", "--device", "cpu", "--ticket-file", str(self.ticket_file)]
        arguments += ["--when", "always"]  # regardless of the user's settings file
        arguments += ["--report-every-s", REPORT_EVERY_S]
        if self.stage is not None:
            arguments += ["--stage", str(self.stage)]
        if self._plan.chaos_seed is not None:
            arguments += ["--save-every-s", CHAOS_SAVES_EVERY_S]
        process = fork_server().Process(target=run_peer, args=(self._main, arguments, self.log))
        process.start()
        self.process = process

    def ask(self) -> None:
        """Update `status`. If the peer does not answer in time, `status` does not change."""
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
        """The exit code: None before the start and while the peer is running, and negative if a signal killed it."""
        return self.process.exitcode if self.process else None

    @property
    def ending(self) -> str:
        """A phrase that says whether a failed peer was killed or failed by itself."""
        code = self.exit_code or 0
        return f"was killed (signal {-code})" if code < 0 else f"failed (exit code {code})"

    def is_done(self) -> bool:
        return self.exit_code is not None or (self.status or {}).get("state") == "done"

    def is_back(self) -> bool:
        """Whether the peer has begun to train again since it was last killed."""
        return (self.status or {}).get("state", "entering") != "entering"

    def kill(self) -> None:
        """Kill the peer without warning, as a power failure would."""
        assert self.process is not None
        self.kills += 1
        self.process.kill()
        self.process.join()
        self.status = None

    def ask_to_leave(self) -> None:
        if self.process and self.exit_code is None:
            self.process.terminate()

    def wait_gone(self, until_s: float) -> None:
        """Wait for the process to end, and kill it if necessary, so that no peer outlives the demo."""
        if self.process is None:
            return
        self.process.join(max(0.1, until_s - time.monotonic()))
        if self.exit_code is None:
            self.process.kill()
            self.process.join()
