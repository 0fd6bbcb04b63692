"""Every `noloco ...` command in a code block of README and docs runs as it stands, in the order of its page.

README starts from nothing: its own `init` creates the run, and its own `join` commands train it. The commands of a page
of docs/ meet a swarm of two. Placeholders (a ticket, a checkpoint, a path) are replaced by real values, ports by free
ones. A command that keeps running must report that it is up, and then leave in order.
"""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from documented import PAGES, ROOT, arguments, in_blocks
from harness.patience import SLOW_TEST_S
from harness.processes import TICKET_LINE, Command, free_port, noloco, small_spec, until, write_spec

README = ROOT / "README.md"
STAYS = {
    "join": TICKET_LINE,
    "bootstrap": "others can join with:",
    "--web": "http://",
    "--watch": "run",
}  # once it is up
ENDS_WITH = {"--web": 0, "--watch": 130}  # exit code after Ctrl-C; 0 for all others
NOBODY = "12D3KooWK2gwFiFWxgNtk5RYUnaMSwBrBdWiVZaRwxqCoXQBHSA7"
ELSEWHERE = {
    "noloco join TICKET --gpus 8": "test_gpus.py, with two processes",
    "noloco join run.toml --tracker wandb": "wandb is not among what tests install",
    "noloco join big.toml --stage 0": "test_stages.py",
    "noloco join TICKET --stage 1": "test_stages.py",
    "noloco join TICKET --stage 2 --revive-from runs/big-1a2b3c4d/stage-2": "test_stages.py",
}

pytestmark = pytest.mark.slow


class Desk:
    """Types the commands of a page. Peers that it starts run until `leave`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.ticket = ""
        self._stack = stack
        self._peers: list[Command] = []
        self._typed = 0

    def type(self, command: str) -> None:
        self._typed += 1
        typed = [meant for word in arguments(command) for meant in self._meant(word)]
        staying = next((sign for sign in STAYS if sign in typed), None)
        if typed[0] == "simulate" or "--data" in typed:
            self._other_spec(typed)
        if staying is None:
            done = noloco(*typed, **self._environment())
            assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
            return
        log = self.folder / f"log-{self._typed}.txt"
        running = self._stack.enter_context(Command(*typed, log=log, **self._environment(own=staying == "join")))
        line = running.wait_for(STAYS[staying])
        if staying != "join":
            running.send(signal.SIGINT)
            assert running.wait() == ENDS_WITH.get(staying, 0), running.text
            return
        self._peers.append(running)
        if self.ticket in typed:
            running.wait_for("% apart", timeout_s=SLOW_TEST_S)  # a swap of the model that the page trains
        psutil.Process(running.process.pid).nice(10)  # it keeps running, and must not slow down the next commands
        self.ticket = line.split()[-1]

    def leave(self) -> None:
        """Let every peer leave in order, unless it has already left."""
        for peer in self._peers:
            if "leaving\n" not in peer.text:
                peer.send(signal.SIGINT)
        for peer in self._peers:
            assert peer.wait() == 0, peer.text

    def _meant(self, word: str) -> list[str]:
        match word:
            case "TICKET" | "noloco1ab7aca...":
                return [self.ticket]
            case "12D3KooW...":
                return [NOBODY]
            case "SPEC.toml":
                return ["run.toml"]
            case "CHECKPOINT":
                return self._runs("state")[:1]
            case "peer-*/runs/myrun-*":
                return self._runs("state*")
            case "DIR":
                return [f"export-{self._typed}"]
            case "0.0.0.0:31347":
                return ["127.0.0.1:0"]
            case "127.0.0.1:8080":
                return [f"127.0.0.1:{free_port()}"]
        return [word.replace("=/data/", f"={self.folder}/data/")]

    def _runs(self, state_dir: str) -> list[str]:
        """Return the folders of runs, once each has a checkpoint."""

        def found() -> list[str] | None:
            runs = [*self.folder.glob(f"{state_dir}/runs/*")]
            return [*map(str, runs)] if runs and all([*run.rglob("*-step-*")] for run in runs) else None

        return until(found, what="checkpoints")

    def _other_spec(self, typed: list[str]) -> None:
        """Replace the spec: fewer steps, or a run that reads the data which the command binds."""
        bound = [word.partition("=")[0] for word in typed if "=/" in word]
        spec = small_spec("small", train__total_steps=60, data__source=bound[0] if bound else "stdlib")
        typed[typed.index("run.toml")] = str(write_spec(spec, self.folder))

    def _environment(self, *, own: bool = False) -> dict[str, Any]:
        """Return settings for a shared machine; `own` gives each further peer its own folder."""
        state = self.folder / (f"state-{self._typed}" if own and self._peers else "state")
        return {"NOLOCO_STATE_DIR": str(state), "NOLOCO_LISTEN": "127.0.0.1:0", "NOLOCO_THREADS": "1"}


def write_data(folder: Path) -> None:
    """Write data in the formats that the pages name: files of C4, and a table of tokens."""
    (folder / "c4").mkdir(parents=True)
    (folder / "reddit").mkdir()
    for name in ("c4-train.00000-of-00001", "c4-validation.00000-of-00001"):
        rows = "\n".join(json.dumps({"text": f"{name} {number} " + "some words " * 20}) for number in range(400))
        (folder / "c4" / f"{name}.json.gz").write_bytes(gzip.compress(rows.encode()))
    tokens = [[number // 16 + 3, number % 16 + 3, *range(32, 120)] for number in range(400)]
    table = pa.table({"input_ids": tokens, "attention_mask": [[1] * len(row) for row in tokens]})
    pq.write_table(table, folder / "reddit" / "0.parquet")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data")
    with ExitStack() as stack:
        made = Desk(tmp_path, stack)
        yield made
        made.leave()


def typed_here(page: Path) -> list[str]:
    return [command for command in in_blocks(page) if command.partition("#")[0].strip() not in ELSEWHERE]


def test_readme(desk: Desk) -> None:
    for command in typed_here(README):
        desk.type(command)


OTHERS = [page for page in PAGES if page != README and typed_here(page)]


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_page(page: Path, desk: Desk) -> None:
    commands = typed_here(page)
    if any("TICKET" in command for command in commands):
        write_spec(small_spec("run"), desk.folder)
        commands[:0] = ["noloco join run.toml", "noloco join TICKET"]
    for command in commands:
        desk.type(command)
