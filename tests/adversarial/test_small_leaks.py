"""Regression tests for the minor findings of a security audit."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from blake3 import blake3

from noloco_p2p import control
from noloco_p2p.errors import SettingsError, SpecError
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.spec import MAX_LAYERS, RunSpec, TrainerSpec


def test_a_model_without_end_is_refused_before_its_layers_are_counted() -> None:
    with pytest.raises(SpecError, match=r"model\.num_layers"):
        TrainerSpec.from_dict({"name": "run", "model": {"num_layers": MAX_LAYERS + 1}}, origin="a stranger")


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [("model", "hidden_size", 2**40), ("data", "sequence_length", 10**18), ("train", "batch_size", 10**18)],
)
def test_the_sizes_of_a_strangers_spec_are_bounded(section: str, field: str, value: int) -> None:
    with pytest.raises(SpecError, match=rf"{section}\.{field}"):
        TrainerSpec.from_dict({"name": "run", section: {field: value}}, origin="a stranger")


@pytest.mark.parametrize("data", [b"0", b"null", b"[]", b'"x"'])
def test_a_spec_that_is_no_table_is_a_spec_error(data: bytes) -> None:
    with pytest.raises(SpecError):
        RunSpec.from_json(data, expected_digest=blake3(data).hexdigest(), origin="a stranger")


def test_checkpoints_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder)._lock():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_control_socket_of_another_user_is_not_talked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control.socket_path(tmp_path).touch()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 4711)
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result((0o140600, 0, 0, 0, 99_999, 0, 0, 0, 0, 0)))
    with pytest.raises(SettingsError, match="another user"):
        control.ask(tmp_path, "status")
