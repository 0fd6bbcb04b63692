"""A checkpoint in the background holds the state at the time of the call, and training does not wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE_S
from torch import nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.outer.weights import Weights
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="test", total_steps=100)


class SlowDisk(Checkpoints):
    """Completes a checkpoint only when the test allows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go_on = threading.Event()

    def begin(self, step: int, **content: Any) -> Callable[[], Path]:
        complete = super().begin(step, **content)

        def wait_and_complete() -> Path:
            assert self.go_on.wait(PATIENCE_S)
            return complete()

        return wait_and_complete


class FullDisk(Checkpoints):
    """Is full when the files are written, or later, when they are synced."""

    is_full_at_once = True

    def begin(self, step: int, **content: Any) -> Callable[[], Path]:
        def fail() -> Path:
            raise CheckpointError("the disk is full")

        return fail() if self.is_full_at_once else fail  # pyright: ignore[reportReturnType] - it does not return


def make_noloco(swarm: MemorySwarm, disk: Checkpoints) -> tuple[NoLoCo, nn.BatchNorm1d]:
    model = nn.BatchNorm1d(4)  # a checkpoint contains its running statistics
    return NoLoCo(model, None, swarm.peer("a"), save_every_s=0, checkpoints=disk), model


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_it_is_of_the_moment_and_a_second_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, on_accelerator: bool
) -> None:
    monkeypatch.setattr(Weights, "is_on_accelerator", on_accelerator)
    disk, folders = SlowDisk(tmp_path), list[Path]()
    with MemorySwarm(SPEC) as swarm:
        outer, model = make_noloco(swarm, disk)
        assert outer.save_in_background(done=folders.append)
        model.load_state_dict({"running_mean": torch.full((4,), 7.0)}, strict=False)  # training goes on
        assert not outer.save_in_background()
        assert "skipped the checkpoint of step 0" in caplog.text
        disk.go_on.set()
        folders.append(outer.save())
    found = [float(Checkpoint(path).load("buffers")["running_mean"][0]) for path in folders]
    assert found == [0.0, 7.0]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_full_disk_is_told_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, at_once: bool
) -> None:
    with MemorySwarm(SPEC) as swarm, caplog.at_level(logging.ERROR):
        disk = FullDisk(tmp_path)
        disk.is_full_at_once = at_once
        outer, _ = make_noloco(swarm, disk)
        assert outer.save_in_background() is not at_once
        outer._saver.wait()
    assert "the disk is full" in caplog.text


def test_the_state_that_is_served_is_the_one_that_was_written(tmp_path: Path) -> None:
    """Training continues while the disk is slow; newcomers get the state with the position at which it was taken."""
    with MemorySwarm(SPEC) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        model, disk = nn.Linear(3, 2), SlowDisk(tmp_path / "checkpoints")
        outer = NoLoCo(model, None, peer, save_every_s=0, checkpoints=disk)
        for _ in range(4):
            model.bias.data.add_(0.1)
            outer.step()
        at_two = outer.weights.tensors()["weights"]
        assert outer.save_in_background()
        for _ in range(4):
            model.bias.data.add_(0.1)
            outer.step()
        disk.go_on.set()
        path = outer.save()
        newest, older = (Checkpoint(folder) for folder in (path, path.parent / "00000000-step-4"))
        assert (newest.step, older.step) == (8, 4)
        assert torch.equal(older.load("weights")["weights"], at_two)
        saved = peer.states.saved
        assert saved is not None
        assert (saved.manifest.progress, saved.path.parent) == (pytest.approx(0.08), path)
