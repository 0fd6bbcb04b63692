"""The trainer of one stage: the stage that it takes, what it waits for, and a resume with the same bits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from staged_reference import spec_of
from training_peer import training_peer

from noloco_p2p.errors import CheckpointError, Left, ModelError, SettingsError
from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.flow.node import Task
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer.checkpoint import Checkpoint
from noloco_p2p.peer.run_folder import stage_folder
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.peers import MemorySwarm
from noloco_p2p.trainer.export import export_model
from noloco_p2p.trainer.model import build_model, build_tokenizer
from noloco_p2p.trainer.stage_trainer import StageTrainer
from noloco_p2p.trainer.start import new_start

SPEC = spec_of(steps=100)


def trainer_of(
    swarm: MemorySwarm,
    folder: Path,
    *,
    others: Sequence[Candidate] = (),
    said: list[str] | None = None,
    leaves: bool = False,
    **settings: Any,
) -> StageTrainer:
    peer = training_peer(swarm, folder, others=others, **settings)
    if leaves:
        peer.leave_requested.set()
    return StageTrainer(peer, say=(said if said is not None else []).append, look_s=0.01)


def train_some(trainer: StageTrainer, number: int) -> None:
    """Take inner steps of one microbatch each, with random data in place of that of other stages."""
    shape = (1, SPEC.data.sequence_length, SPEC.model.hidden_size)
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    for _ in range(number):
        id, data = MicrobatchId("head", 1), hidden
        if trainer.batches:
            data = next(trainer.batches)
            trainer.work.compute(Task(Kind.LOSS, id, data, hidden))
        trainer.work.compute(Task(Kind.BACKWARD, id, data, hidden / 100))
        trainer.work.close(trainer.inner_step, 15, progress=trainer.outer.progress)
        trainer.outer.step()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_goes_on_from_its_checkpoint_bit_for_bit(stage: int, tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        first = trainer_of(swarm, tmp_path, stage=stage)
        train_some(first, 3)
        assert first._save()
    said: list[str] = []
    with MemorySwarm(SPEC) as swarm:
        second = trainer_of(swarm, tmp_path, said=said)
    assert second.stage == stage, "without --stage it goes on with the one that it held"
    assert any(line.startswith("resumed from step 3") for line in said)
    for name, param in first.inner_step.trainable.items():
        assert torch.equal(second.inner_step.trainable[name], param), name
    moments = first.inner_step.state()
    assert moments
    assert moments.keys() == second.inner_step.state().keys()
    for name, moment in moments.items():
        assert torch.equal(second.inner_step.state()[name], moment), name
    assert second.outer.progress == first.outer.progress
    assert second._meta()["data"] == first._meta()["data"]


def test_a_copied_folder_goes_on_with_the_stage_that_was_held_last(tmp_path: Path) -> None:
    """The times of files in a copy say nothing. A folder without a checkpoint is that of a start that was killed."""
    for stage, progress in ((1, 0.2), (0, 0.3)):
        with MemorySwarm(SPEC) as swarm:
            trainer = trainer_of(swarm, tmp_path / "old", stage=stage)
            trainer.outer.progress = progress
            assert trainer._save()
    stage_folder(tmp_path / "old", 2).mkdir()
    for stage in (0, 1, 2):
        shutil.copytree(stage_folder(tmp_path / "old", stage), stage_folder(tmp_path / "new", stage))
    os.utime(stage_folder(tmp_path / "new", 0), (0, 0))
    with MemorySwarm(SPEC) as swarm:
        assert trainer_of(swarm, tmp_path / "new").stage == 0


def other(stage: int, progress: float) -> Candidate:
    return Candidate(f"other-{stage}", "", stage=stage, progress=progress)


def test_a_newcomer_does_not_begin_a_stage_that_has_trained(tmp_path: Path) -> None:
    said: list[str] = []
    with MemorySwarm(SPEC) as swarm:
        with pytest.raises(Left):
            trainer_of(swarm, tmp_path, others=[other(0, 0.2), other(1, 0.2)], said=said, leaves=True, stage=2)
        assert len(said) == 1
        assert "stage 2 has been trained, but no live peer holds it" in said[0]
        fresh = trainer_of(swarm, tmp_path, others=[other(0, 0.0), other(1, 0.0)], stage=2)
        assert fresh.outer.progress == 0.0


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_the_operator_revives_a_stage(kind: str, tmp_path: Path) -> None:
    others = [other(0, 0.25), other(1, 0.5), other(1, 0.5)]
    with MemorySwarm(SPEC) as swarm:
        old = trainer_of(swarm, tmp_path / "old", stage=2)
        train_some(old, 3)
        old._save()
        source = stage_folder(tmp_path / "old", 2)
        if kind == "export":
            source = tmp_path / "export"
            model = build_model(SPEC.model, sequence_length=SPEC.data.sequence_length)
            kept = dict(old.work.stage.model.named_parameters())
            model.load_state_dict({**model.state_dict(), **kept})
            export_model(model, build_tokenizer(SPEC.data), source)
        revived = trainer_of(swarm, tmp_path / "new", others=others, stage=2, revive_from=source)
        assert revived.outer.progress == 0.5
        for name, param in old.inner_step.trainable.items():
            assert torch.equal(revived.inner_step.trainable[name], param), name


def test_what_cannot_revive_a_stage_is_refused(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        head = trainer_of(swarm, tmp_path / "head", stage=0)
        head._save()
        for source, why in (
            (stage_folder(tmp_path / "head", 0), "belongs to another model"),
            (tmp_path, "contains neither a checkpoint of this stage nor an exported model"),
        ):
            with pytest.raises(CheckpointError, match=why):
                trainer_of(swarm, tmp_path / "new", others=[other(0, 0.5)], stage=2, revive_from=source)


def test_a_stage_of_a_fork_begins_from_its_part_of_the_start_state(tmp_path: Path) -> None:
    """The peer serves that part at once, as a newcomer without the state waits for such a peer or for the operator."""
    whole = build_model(SPEC.model.model_copy(update={"seed": 7}), sequence_length=SPEC.data.sequence_length)
    weights = {name: param.detach() for name, param in whole.named_parameters()}
    with new_start(tmp_path / "first") as start:
        start.add(weights)
    forked = SPEC.with_changes({"model.start": start.digest})
    with MemorySwarm(forked) as swarm:
        first = trainer_of(swarm, tmp_path / "first", stage=2)
        for name, param in first.inner_step.trainable.items():
            assert torch.equal(param, weights[name]), name
        kept = Checkpoint(next(stage_folder(tmp_path / "first", 2).glob("*-step-*")))
        assert kept.meta["outer"]["num_steps"] == 0
        said: list[str] = []
        with pytest.raises(Left):
            trainer_of(swarm, tmp_path / "second", stage=2, said=said, leaves=True)
        assert len(said) == 1
        assert "no live peer holds stage 2; waiting for a peer that holds it (the operator of the run can" in said[0]
        with pytest.raises(ModelError, match=r"the start state blake3:.* is not on this machine"):
            trainer_of(swarm, tmp_path / "second", stage=2, others=[other(2, 0.0)])
        revived = trainer_of(swarm, tmp_path / "third", stage=2, revive_from=stage_folder(tmp_path / "first", 2))
        assert revived.outer.progress == 0.0
        for name, param in revived.inner_step.trainable.items():
            assert torch.equal(param, weights[name]), name


def test_a_peer_takes_only_what_fits_and_reads_data_only_where_it_has_them(tmp_path: Path) -> None:
    bound: TrainerSpec = SPEC.with_changes({"data.source": "books"})
    with MemorySwarm(bound) as swarm:
        assert trainer_of(swarm, tmp_path / "any").stage in (1, 2)
        with pytest.raises(SettingsError, match="--stage 0: stage 0 reads the data, but the run trains on data named"):
            trainer_of(swarm, tmp_path / "head", stage=0)
        with pytest.raises(SettingsError, match="this machine cannot hold any stage: stage 0 needs at least"):
            trainer_of(swarm, tmp_path / "small", max_memory="0.01MB")
        with pytest.raises(SettingsError, match="--stage 3 does not exist: the run staged has stages 0 to 2"):
            trainer_of(swarm, tmp_path / "none", stage=3)
