"""Every `noloco ...` command in a code block of README and docs runs once as it stands, page by page, in one swarm.

README comes first: its `init` and its `join` commands make the swarm, with a model that trains in seconds. Placeholders
(a ticket, a checkpoint, a path) are replaced by real values, ports by free ones. A command that keeps running must
report that it is up, and then leave in order.
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
from harness.processes import JOIN_LINE, TICKET_LINE, Command, small_spec, until, write_spec

from noloco_p2p.cli.app import run

STAYS = {"join": JOIN_LINE, "--watch": "run"}  # what a command says once it is up
NOBODY = "12D3KooWK2gwFiFWxgNtk5RYUnaMSwBrBdWiVZaRwxqCoXQBHSA7"
ELSEWHERE = {
    "noloco monitor noloco1ab7aca...": "test_commands.py",
    "noloco monitor TICKET": "test_commands.py",
    "noloco monitor TICKET --watch": "test_commands.py",
    "noloco export --merge TICKET DIR": "test_commands.py",
    "noloco fork TICKET NEW.toml --set outer.alpha=0.3": "test_commands.py",
    "noloco bootstrap": "test_commands.py",
    "noloco monitor TICKET --web --listen 127.0.0.1:8080": "test_monitoring.py",
    "noloco doctor noloco1ab7aca...": "test_monitoring.py",
    "noloco doctor TICKET": "test_monitoring.py",
    "noloco init run.toml --preset small --name mine --set data.source=corpus --set data.tokenizer=mine "
    "--set model.vocab_size=32000": "test_without_hub.py",
    "noloco init run.toml --preset finetune --pretrained Qwen/Qwen2.5-1.5B-Instruct": "test_fine_tuning.py",
    "noloco data check run.toml --data chats='chats/*.jsonl'": "test_data_and_evaluate.py",
    "noloco join run.toml --data chats='chats/*.jsonl' --activation-checkpointing": "test_fine_tuning.py, without it",
    "noloco join TICKET --data chats='chats/*.jsonl' --activation-checkpointing": "test_fine_tuning.py, without it",
    "noloco export --merge TICKET DIR --adapters": "test_fine_tuning.py",
    "noloco join TICKET --gpus 8": "test_gpus.py, with two processes",
    "noloco join run.toml --tracker wandb": "wandb is not among what tests install",
    "noloco join big.toml --stage 0": "test_stages.py",
    "noloco join TICKET --stage 1": "test_stages.py",
    "noloco join TICKET --stage 2 --revive-from runs/big-1a2b3c4d/stage-2": "test_stages.py",
}

pytestmark = pytest.mark.slow


class Desk:
    """Types commands. The peers of the first run stay until `leave`; those that found other runs leave at once."""

    def __init__(self, folder: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.ticket = ""
        self._stack = stack
        self._capsys = capsys
        self._peers: list[Command] = []
        self._typed = 0

    def type(self, command: str) -> None:
        self._typed += 1
        typed = [meant for word in arguments(command) for meant in self._meant(word)]
        founds_another_run = "run.toml" in typed and bool(self._peers)
        if typed[0] == "simulate" or "--data" in typed:
            self._other_spec(typed)
        sign = next((sign for sign in STAYS if sign in typed), None)
        if sign is None:  # in this process, which has imported torch
            code = run(typed)
            assert code == 0, f"{command}: {code}\n{self._capsys.readouterr()}"
            if typed[:2] == ["init", "run.toml"]:
                write_spec(small_spec("run"), self.folder)
            return
        log = self.folder / f"log-{self._typed}.txt"
        running = self._stack.enter_context(Command(*typed, log=log, **self._environment(own=sign == "join")))
        running.wait_for(STAYS[sign])
        if sign != "join":
            running.send(signal.SIGINT)
            assert running.wait() == 130, running.text
            return
        if founds_another_run:
            running.send(signal.SIGINT)
        elif self.ticket in typed:
            running.wait_for("% apart")  # a swap
        psutil.Process(running.process.pid).nice(10)  # it must not slow down the next commands
        if not self._peers:
            self.ticket = running.wait_for(TICKET_LINE).split()[-1]
        elif not founds_another_run:  # the first peer may leave
            self._capsys.readouterr()
            folder = typed[typed.index("--state-dir") + 1] if "--state-dir" in typed else f"state-{self._typed}"
            assert run(["ticket", "--state-dir", str(self.folder / folder)]) == 0
            self.ticket = self._capsys.readouterr().out.split()[-1]
        self._peers.append(running)

    def leave(self) -> None:
        """Let every peer leave in order, unless it has already left."""
        for peer in self._peers:
            if "leaving; thank you" not in peer.text:
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
                return self._runs("state")
            case "peer-*/runs/myrun-*":
                return self._runs("state*")
            case "DIR":
                return [f"export-{self._typed}"]
            case "0.0.0.0:31347":
                return ["127.0.0.1:0"]
        return [word.replace("=/data/", f"={self.folder}/data/")]

    def _runs(self, state_dir: str) -> list[str]:
        """Return the folders of the first run, once each has a checkpoint."""

        def found() -> list[str] | None:
            runs = [*self.folder.glob(f"{state_dir}/runs/run-*")]
            return [*map(str, runs)] if runs and all([*each.rglob("*-step-*")] for each in runs) else None

        return until(found, what="checkpoints")

    def _other_spec(self, typed: list[str]) -> None:
        """Replace the spec: fewer steps, or a run that reads the data which the command binds."""
        bound = [word.partition("=")[0] for word in typed if "=/" in word]
        spec = small_spec("small", train__total_steps=20, data__source=bound[0] if bound else "stdlib")
        typed[typed.index("run.toml")] = str(write_spec(spec, self.folder))

    def _environment(self, *, own: bool = False) -> dict[str, Any]:
        """Return the settings for a shared machine; `own` gives each further peer its own folder."""
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
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    for name, value in {"STATE_DIR": f"{tmp_path}/state", "LISTEN": "127.0.0.1:0", "THREADS": "1"}.items():
        monkeypatch.setenv(f"NOLOCO_{name}", value)
    write_data(tmp_path / "data")
    with ExitStack() as stack:
        made = Desk(tmp_path, stack, capsys)
        yield made
        made.leave()


def test_every_command_of_the_pages(desk: Desk) -> None:
    pages = sorted(PAGES, key=lambda page: page != ROOT / "README.md")  # README first
    commands = [command.partition("#")[0].strip() for page in pages for command in in_blocks(page)]
    for command in dict.fromkeys(commands):
        if command not in ELSEWHERE:
            desk.type(command)
