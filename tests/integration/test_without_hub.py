"""The recipe for a run without the hub, in docs/operators.md, works as it stands, and nothing reaches the hub.

The commands run in a folder for each machine, with a small corpus. The model is made small when the spec is written.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from documented import FENCED, ROOT
from harness.patience import PATIENCE_S
from harness.processes import SMALL, TICKET_LINE, Command, until
from transformers import AutoModelForCausalLM, AutoTokenizer

from noloco_p2p.data.reader import Reader
from noloco_p2p.data.sources import builtin_corpus

PAGE = ROOT.joinpath("docs/operators.md").read_text(encoding="utf-8")
RECIPE = PAGE.partition("## A run without the hub\n")[2].partition("\n## ")[0]
NUM_FILES, NUM_DOCUMENTS = 2, 100

pytestmark = pytest.mark.slow


class Machine(Command):
    """A shell on a machine of its own, with its own folders, whose proxy leads nowhere. It runs one block of commands.

    The class ends every process of the block, because a shell may leave its last command behind.
    """

    def __init__(self, folder: Path, *blocks: str, replaced: dict[str, str] | None = None) -> None:
        self.log = folder / f"log-{len([*folder.glob('log-*')])}.txt"
        script = "\n".join(["set -e", *blocks])
        for word, value in (replaced or {}).items():
            script = script.replace(word, value)
        nowhere = dict.fromkeys(("HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")
        own = {"PATH": f"{folder.parent}/bin:{os.environ['PATH']}", "HF_HOME": f"{folder}/hub"}
        own |= {"XDG_STATE_HOME": f"{folder}/state", "XDG_CONFIG_HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
        own |= {"NOLOCO_LISTEN": "127.0.0.1:0", "NOLOCO_THREADS": "1", "NOLOCO_REPORT_EVERY_S": "0.3"}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **nowhere, **own, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(PATIENCE_S)

    def leave(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)
        self.wait()
        assert "left; run the same command to resume" in self.text, self.text


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of two machines that have the same corpus, and a `noloco init` that makes models small."""
    (tmp_path / "bin").mkdir()
    small = " ".join(f"--set {field}={value}" for field, value in (SMALL | {"outer.min_inner_steps": 1}).items())
    commands = {
        "noloco": f'[ "$1" = init ] && set -- "$@" {small}\nexec {sys.executable} -m noloco_p2p "$@"',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, script in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    texts = [str(document.content) for document in islice(Reader(builtin_corpus()).epoch(), NUM_FILES * NUM_DOCUMENTS)]
    folders = tmp_path / "first", tmp_path / "other"
    for folder in folders:
        (folder / "corpus").mkdir(parents=True)
        for number in range(NUM_FILES):
            lines = "\n".join(json.dumps({"text": text}) for text in texts[number::NUM_FILES])
            (folder / "corpus" / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folders


def test_the_recipe(machines: tuple[Path, Path]) -> None:
    first, other = machines
    prepare, bind, start, enter, end = FENCED.findall(RECIPE)
    with Machine(first, prepare, bind, start) as founder:
        ticket = founder.wait_for(TICKET_LINE).split()[-1]
        assert "faults: none" in founder.text
        needs = [line.partition("needs: ")[2] for line in founder.text.splitlines() if "needs: " in line]
        assert len(needs) == 3, "of init, doctor and join"
        of_model = re.findall(r"([\d.]+ [KMG]iB)(?: of it)? for the model", "\n".join(needs))
        assert len(of_model) == 3, needs
        assert len(set(of_model)) == 1, needs
        (other / "tokenizer").symlink_to(first / "tokenizer")
        with Machine(other, bind, enter, replaced={"TICKET": ticket}) as newcomer:
            newcomer.wait_for("% apart")  # a swap
            (run,) = first.glob("state/noloco/runs/mine-*")
            until(lambda: [*run.rglob("*-step-*")], what="a checkpoint")
            places = {"TICKET": ticket, "CHECKPOINT": str(run), "DIR": "model"}
            with Machine(first, bind, end, replaced=places) as closing:
                assert closing.wait() == 0, closing.text
                assert "validation loss" in closing.text
                assert "the mean of 2 peers" in closing.text
            newcomer.leave()
        founder.leave()
    tokenizer = AutoTokenizer.from_pretrained(first / "model")
    model = AutoModelForCausalLM.from_pretrained(first / "model")
    ids = tokenizer("import os", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "import os"
    assert torch.isfinite(model(input_ids=ids).logits).all()
    assert not [*first.glob("hub/**/models--*")]
