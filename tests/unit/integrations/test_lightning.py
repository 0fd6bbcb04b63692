"""The callback for the Trainer of Lightning. test_huggingface.py tests what both callbacks share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.specs import published
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from outer_states import check_same
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.integrations import session
from noloco_p2p.integrations.lightning import NoLoCoCallback
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="lightning", outer=published(inner_steps=2), total_steps=100)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'train_dataloader' does not have many workers",  # tiny data needs none
    "ignore:Checkpoint directory .* exists and is not empty",  # after a restart
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",  # raised within Lightning
)


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=0.05)


class Alternating(Regression):
    """Manual optimization with two optimizers, each of which freezes the parameters of the other, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [AdamW(self.net[0].parameters(), lr=0.05), SGD(self.net[2].parameters(), lr=0.05)]


class Scaled(Regression):
    """A GradScaler for the CPU, as Lightning uses one only with CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        assert not isinstance(optimizer, list)
        self.scaler.scale(loss * (float("inf") if batch_idx == 1 else 1.0)).backward()
        self.scaler.step(optimizer.optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return loss.detach()


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with MemorySwarm(SPEC) as swarm:
        yield swarm


def make_trainer(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **settings}
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def batches(num: int) -> DataLoader[Any]:
    inputs = torch.rand(4 * num, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs), batch_size=4)


class AtBatch(Callback):
    def __init__(self, batch_idx: int, action: Any) -> None:
        self.batch_idx, self.action = batch_idx, action

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            self.action()


def test_accumulated_batches_are_one_inner_step(
    tmp_path: Path, swarm: MemorySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOG_S", 0.0)
    peer = swarm.peer("a", run_folder=tmp_path)
    callback = NoLoCoCallback(peer)
    make_trainer(tmp_path, callback, accumulate_grad_batches=3).fit(Regression(), batches(14))
    assert callback.outer.num_steps == 5
    assert peer.metrics.loss is not None
    assert 0 < peer.metrics.loss < 20


@pytest.mark.parametrize(("module", "num_steps"), [(Alternating, 5), (Scaled, 4)])
def test_steps_in_manual_optimization(
    tmp_path: Path, swarm: MemorySwarm, module: type[LightningModule], num_steps: int
) -> None:
    """With several optimizers the steps of the last one count, except steps that a GradScaler skips."""
    callback = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path))
    make_trainer(tmp_path, callback).fit(module(), batches(5))
    assert callback.outer.num_steps == num_steps


def test_the_loggers_have_the_values_of_noloco(
    tmp_path: Path, swarm: MemorySwarm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOG_S", 0.0)
    callback = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path))
    with caplog.at_level(logging.INFO, logger="noloco_p2p"):
        make_trainer(tmp_path, callback, logger=CSVLogger(tmp_path), log_every_n_steps=1).fit(Regression(), batches(5))
    [file] = tmp_path.rglob("metrics.csv")
    header, *rows = file.read_text().splitlines()
    assert "noloco/progress" in header
    assert len(rows) == 5
    assert "step 5 | 0.0 swaps/min" in caplog.text


def keep_all(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "kept", filename="{epoch}", save_top_k=-1)


def test_a_checkpoint_of_lightning_goes_on_with_the_same_bits(tmp_path: Path, swarm: MemorySwarm) -> None:
    """A checkpoint adds slow weights, momentum and the position to what Lightning restores."""
    whole, model = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path / "a")), Regression()
    settings = {"max_epochs": 2, "enable_checkpointing": True}
    make_trainer(tmp_path, whole, keep_all(tmp_path), **settings).fit(model, batches(3))
    swarm.kill(swarm.peers[0])
    rest, again = NoLoCoCallback(swarm.peer("b", run_folder=tmp_path / "b")), Regression()
    kept = tmp_path / "kept" / "epoch=0.ckpt"
    torch.load(kept, weights_only=True)  # the state of NoLoCo needs no pickle
    make_trainer(tmp_path, rest, keep_all(tmp_path), **settings).fit(again, batches(3), ckpt_path=kept)
    assert rest.outer.num_steps == whole.outer.num_steps == 6
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    check_same(whole.outer, rest.outer)


def test_a_checkpoint_without_noloco_is_refused(tmp_path: Path, swarm: MemorySwarm) -> None:
    kept = tmp_path / "kept.ckpt"
    without = make_trainer(tmp_path)
    without.fit(Regression(), batches(3))
    without.save_checkpoint(kept)
    callback = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path / "a"))
    with pytest.raises(CheckpointError, match=r"kept\.ckpt contains no NoLoCo state"):
        make_trainer(tmp_path, callback, max_epochs=2).fit(Regression(), batches(3), ckpt_path=kept)
    fresh = NoLoCoCallback(swarm.peer("b", run_folder=tmp_path / "b"), resume=False)
    make_trainer(tmp_path, fresh, max_epochs=2).fit(Regression(), batches(3), ckpt_path=kept)
    assert fresh.outer.num_steps == 3


def test_a_request_to_leave_ends_the_training(tmp_path: Path, swarm: MemorySwarm) -> None:
    peer = swarm.peer("a", run_folder=tmp_path)
    trainer = make_trainer(tmp_path, AtBatch(2, peer.leave_requested.set), NoLoCoCallback(peer), min_epochs=4)
    trainer.fit(Regression(), batches(6))
    assert trainer.global_step == 3
    assert peer.states.saved is not None  # newcomers can fetch the last state
    assert peer.states.saved.manifest.progress == pytest.approx(0.03)


def test_trainers_that_spread_the_model_are_refused(tmp_path: Path, swarm: MemorySwarm) -> None:
    callback = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path))
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    with pytest.raises(SettingsError, match=r"in one process on one device.*DDPStrategy"):
        callback.setup(trainer, Regression(), "fit")
    callback.setup(trainer, Regression(), "test")  # "test" does not train
