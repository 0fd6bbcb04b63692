"""The trainer stops anywhere and resumes with the same losses and the same bits as without the stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import small_spec
from training_peer import training_peer

from noloco_p2p.data.stream import validation_batches
from noloco_p2p.outer.checkpoint import Checkpoint
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.events import read_events
from noloco_p2p.testing.peers import MemorySwarm
from noloco_p2p.trainer import loop
from noloco_p2p.trainer.loop import Trainer

NUM_STEPS = 11
SPEC = small_spec("resume", evaluate__every_steps=4, train__total_steps=60)
MOMENTUM = SPEC.with_changes({"outer.alpha": 0.5, "outer.inner_steps": 4})


def train(folder: Path, num_steps: int, spec: TrainerSpec = SPEC) -> Checkpoint:
    """Resume from `folder`, take `num_steps` inner steps, and return the last checkpoint."""
    with MemorySwarm(spec) as swarm:
        peer = training_peer(swarm, folder, max_steps=num_steps, save_every_s=1e-9, report_every_s=1e-9)
        trainer = Trainer(peer, say=lambda line: None)
        trainer.needs()
        path = trainer.train()
        assert path is not None
        return Checkpoint(path)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "report")]


@pytest.mark.parametrize(
    ("spec", "stops", "stems"),
    [
        (SPEC, [1, 5, 5], ["weights", "optimizer"]),
        (MOMENTUM, [4, 7], ["weights", "model", "optimizer"]),
        (MOMENTUM, [1, 5, 5], ["weights", "model", "optimizer"]),
    ],
    ids=["no outer step", "after an outer step", "between outer steps"],
)
def test_the_losses_after_a_stop_are_those_without_it(
    tmp_path: Path, spec: TrainerSpec, stops: list[int], stems: list[str]
) -> None:
    whole = train(tmp_path / "whole", NUM_STEPS, spec)
    last = [train(tmp_path / "parts", num_steps, spec) for num_steps in stops][-1]
    for stem in stems:
        expected, found = whole.load(stem), last.load(stem)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(found[name], values), f"{stem}: {name}"
    assert last.meta["data"] == whole.meta["data"]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [event["step"] for event in events(tmp_path / "whole", "evaluated")] == [1, 4, 8, 11]
    step_tokens = SPEC.train.batch_size * SPEC.data.sequence_length
    for each in (last, whole):
        metrics = each.meta["outer"]["metrics"]
        assert metrics["tokens"] == NUM_STEPS * step_tokens
        assert metrics["validation_progress"] == metrics["progress"] > 0


def test_training_begins_before_the_held_out_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[int]()

    def reads(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        steps.append(trainer.outer.num_steps)
        return validation_batches(*arguments, **options)

    monkeypatch.setattr(loop, "validation_batches", reads)
    with MemorySwarm(SPEC) as swarm:
        trainer = Trainer(training_peer(swarm, tmp_path, max_steps=9), say=lambda line: None)
        trainer.needs()
        trainer.train()
    assert steps == [1], "for the first evaluation, and for no other"
