"""A peer without memory for a batch exits with a clear message, and affects no other peer."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from noloco_p2p.cli import local
from noloco_p2p.cli.app import run
from noloco_p2p.errors import DataError
from noloco_p2p.trainer.loop import draw


def no_memory() -> Tensor:
    raise MemoryError


def test_no_memory_for_a_batch_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"no memory.*last checkpoint is intact.*resume"):
        draw(no_memory)


def test_a_command_that_has_no_memory_ends_with_one_sentence_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands handle this error in one place, so any command will do."""
    monkeypatch.setattr(local, "ask", lambda *_: draw(no_memory))
    assert run(["status", "--state-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err.strip()
    assert "no memory" in said
    assert len(said.splitlines()) == 1
