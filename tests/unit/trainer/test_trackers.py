"""Trackers get the metrics under their names in the table; one that fails is dropped, and training continues."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from noloco_p2p.errors import SettingsError
from noloco_p2p.telemetry.metrics import Metrics, numbers
from noloco_p2p.trainer.trackers import Trackers

METRICS = Metrics(step=40, loss=3.5, tokens_per_s=100.0, last_partner="12D3KooWpartner")


def make(folder: Path, *names: str) -> Trackers:
    return Trackers.of(names, folder=folder, run="run-1", peer_id="12D3KooWpeerid123", config={"a": {"b": 1}})


def test_tensorboard_has_the_curves_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    for step in (40, 80):
        trackers = make(tmp_path, "tensorboard")
        trackers.log({**METRICS.as_dict(), "step": step})
        trackers.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(numbers(METRICS.as_dict()))
    assert [(point.step, point.value) for point in read.Scalars("loss")] == [(40, 3.5), (80, 3.5)]


def test_a_tracker_that_fails_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def broken(*args: object) -> None:
        calls.append(len(args))
        raise OSError("no space left")

    trackers = Trackers({"one": (broken, broken), "two": (broken, broken)})
    for _ in range(3):
        trackers.log(METRICS.as_dict())
    trackers.close()
    assert calls == [2, 2]
    assert caplog.text.count("one failed and will not receive further metrics of this run: no space left") == 1


def test_wandb_is_told_the_run_and_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of the library has `init`, `Settings`, and a run with `log` and `finish`."""
    begun: dict[str, Any] = {}
    logged: list[tuple[dict[str, float], int]] = []
    ended: list[bool] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: ended.append(True))
    twin = SimpleNamespace(init=lambda **options: begun.update(options) or run, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", twin)
    trackers = make(tmp_path, "wandb")
    trackers.log(METRICS.as_dict())
    trackers.close()
    assert (begun["group"], begun["id"], begun["resume"]) == ("run-1", "run-1-ooWpeerid123", "allow")
    assert begun["config"] == {"a": {"b": 1}}
    assert logged == [(numbers(METRICS.as_dict()), 40)]
    assert ended == [True]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_an_extra_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--tracker wandb requires .*pip install wandb"):
        make(tmp_path, "wandb")


def test_a_tracker_that_cannot_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise RuntimeError("no API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, Settings=lambda **options: options))
    with pytest.raises(SettingsError, match="--tracker wandb cannot be started: no API key configured"):
        make(tmp_path, "wandb")
