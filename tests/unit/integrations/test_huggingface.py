"""The callback for the Trainer of transformers, in a real Trainer with peers in memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from harness.patience import PATIENCE_S, PATIENT
from harness.specs import FP32, published
from outer_states import check_same
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from noloco_p2p.errors import CheckpointError, ModelError, SettingsError
from noloco_p2p.integrations import session
from noloco_p2p.integrations.huggingface import NoLoCoCallback
from noloco_p2p.outer.noloco import NoLoCo, Swapped
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemoryPeer, MemorySwarm

SPEC = RunSpec(name="hf", outer=published(inner_steps=2), total_steps=100)


class Wave(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.linspace(0.0, 1.0, 4) * index / 64
        return {"inputs": inputs, "labels": inputs.sin().sum().reshape(1)}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(inputs) - labels).square().mean()}


@pytest.fixture
def swarm() -> Iterator[MemorySwarm]:
    with MemorySwarm(SPEC) as swarm:
        yield swarm


def make_trainer(folder: Path, *callbacks: TrainerCallback, model: nn.Module | None = None, **settings: Any) -> Trainer:
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 2, **settings}
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, **settings},
    )
    return Trainer(
        model or Regression(), arguments, train_dataset=Wave(), eval_dataset=Wave(), callbacks=list(callbacks)
    )


class AtStep(TrainerCallback):
    """Calls `action` after a step, before the callback of NoLoCo sees that step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == self.step - 1:  # the Trainer counts the step afterwards
            self.action()


def weights(model: nn.Module | None) -> list[Tensor]:
    assert model is not None
    return [param.detach().clone() for param in model.parameters()]


def assert_same(ones: list[Tensor], others: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_the_logs_have_the_values_of_noloco(
    tmp_path: Path, swarm: MemorySwarm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOG_S", 0.0)
    peer = swarm.peer("a", run_folder=tmp_path)
    trainer = make_trainer(tmp_path, NoLoCoCallback(peer), max_steps=4, gradient_accumulation_steps=3)
    with caplog.at_level(logging.INFO, logger="noloco_p2p"):
        trainer.train()
    first, second, _ = trainer.state.log_history
    assert [entry["noloco/progress"] for entry in (first, second)] == pytest.approx([0.02, 0.04])
    assert peer.metrics.loss == second["loss"]
    assert "step 4 | 0.0 swaps/min" in caplog.text, "accumulated batches are one inner step"


def test_two_peers_swap(tmp_path: Path) -> None:
    swaps: list[Swapped] = []
    with MemorySwarm(RunSpec(name="hf", codec=FP32, total_steps=10**9), deadlines=PATIENT) as swarm:
        peer, other = (swarm.peer(name, run_folder=tmp_path / name) for name in "ab")

        def told(swap: Swapped) -> None:
            swaps.append(swap)
            peer.leave_requested.set()

        thread = threading.Thread(target=train_without_trainer, args=[other])
        thread.start()
        try:
            make_trainer(tmp_path, NoLoCoCallback(peer, on_swap=told), max_steps=1_000_000).train()
        finally:
            other.leave_requested.set()
            thread.join(PATIENCE_S)
    assert {swap.partner for swap in swaps} == {"b"}


def train_without_trainer(peer: MemoryPeer) -> None:
    model = Regression()
    optimizer = AdamW(model.parameters(), lr=0.05)
    NoLoCo(model, optimizer, peer, save_every_s=0)
    while not peer.leave_requested.is_set():
        optimizer.zero_grad()
        model(torch.rand(4, 4), torch.rand(4, 1))["loss"].backward()
        optimizer.step()


def test_a_checkpoint_of_the_trainer_goes_on_with_the_same_bits(tmp_path: Path, swarm: MemorySwarm) -> None:
    """A checkpoint adds slow weights, momentum and the position to what the Trainer restores."""
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    whole = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path / "a"))
    trainer = make_trainer(tmp_path, whole, **settings)
    trainer.train()
    swarm.kill(swarm.peers[0])
    rest = NoLoCoCallback(swarm.peer("b", run_folder=tmp_path / "b"))
    again = make_trainer(tmp_path, rest, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-3"))
    assert rest.outer.num_steps == whole.outer.num_steps == 8
    assert_same(weights(again.model), weights(trainer.model))
    check_same(whole.outer, rest.outer)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, swarm: MemorySwarm) -> None:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path / "without", **settings).train()
    make_trainer(tmp_path / "with", NoLoCoCallback(swarm.peer("a", run_folder=tmp_path / "a")), **settings).train()
    callback = NoLoCoCallback(swarm.peer("b", run_folder=tmp_path / "b"))
    foreign = str(tmp_path / "without" / "trainer" / "checkpoint-3")
    with pytest.raises(CheckpointError, match="contains no NoLoCo state"):
        make_trainer(tmp_path / "without", callback, **settings).train(resume_from_checkpoint=foreign)
    with pytest.raises(CheckpointError, match=r"differ from the model.s"):
        make_trainer(tmp_path / "with", callback, **settings).train(resume_from_checkpoint=foreign)
    fresh = NoLoCoCallback(swarm.peer("c", run_folder=tmp_path / "c"), resume=False)
    make_trainer(tmp_path / "without", fresh, **{**settings, "max_steps": 4}).train(resume_from_checkpoint=foreign)
    assert fresh.outer.num_steps == 1


def test_without_a_checkpoint_of_the_trainer_the_peers_own_is_resumed(
    tmp_path: Path, swarm: MemorySwarm, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_trainer(tmp_path, NoLoCoCallback(swarm.peer("a", run_folder=tmp_path)), max_steps=3)
    first.train()
    swarm.kill(swarm.peers[0])
    model = Regression()
    callback = NoLoCoCallback(swarm.peer("b", run_folder=tmp_path))
    begun: list[list[Tensor]] = []
    at_begin = AtStep(1, lambda: None)
    at_begin.on_step_begin = lambda *args, **kwargs: begun.append(weights(model))  # type: ignore[method-assign]
    make_trainer(tmp_path, callback, at_begin, model=model, max_steps=2).train()
    assert_same(begun[0], weights(first.model))
    assert callback.outer.num_steps == 5
    assert "own checkpoint at step 3" in caplog.text


def test_a_request_to_leave_ends_the_training_with_a_checkpoint(tmp_path: Path, swarm: MemorySwarm) -> None:
    peer = swarm.peer("a", run_folder=tmp_path)
    trainer = make_trainer(
        tmp_path, AtStep(3, peer.leave_requested.set), NoLoCoCallback(peer), save_strategy="steps", save_steps=100
    )
    assert trainer.train().global_step == 3
    assert (tmp_path / "trainer" / "checkpoint-3" / "noloco").is_dir()
    assert peer.states.saved is not None  # newcomers can fetch the last state
    assert peer.states.saved.manifest.progress == pytest.approx(0.03)


def test_a_pause_holds_the_training(tmp_path: Path, swarm: MemorySwarm) -> None:
    peer = swarm.peer("a", run_folder=tmp_path)
    waits: list[bool] = []

    def resume() -> None:
        waits.append(peer.pause_requested.is_set())
        peer.pause_requested.clear()

    peer.wait_while_paused = resume  # type: ignore[method-assign]
    trainer = make_trainer(tmp_path, AtStep(3, peer.pause_requested.set), NoLoCoCallback(peer))
    assert trainer.train().global_step == 6
    assert waits == [True]


def test_trainers_that_spread_the_model_are_refused(
    tmp_path: Path, swarm: MemorySwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path))
    trainer = make_trainer(tmp_path, callback)
    monkeypatch.setattr(trainer.args, "_n_gpu", 2)
    with pytest.raises(SettingsError, match="DataParallel on 2 GPUs"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    monkeypatch.undo()
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MULTI_GPU):
        monkeypatch.setattr(trainer.args.distributed_state, "distributed_type", kind)
        with pytest.raises(SettingsError, match=r"in one process on one device.*mode distributed"):
            callback.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_a_model_on_two_devices_is_refused(tmp_path: Path, swarm: MemorySwarm) -> None:
    model = Regression()
    model.net[3].to("meta")
    callback = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path))
    trainer = make_trainer(tmp_path, callback)
    with pytest.raises(ModelError, match="are on cpu and meta"):
        callback.on_train_begin(
            trainer.args, trainer.state, trainer.control, model=model, optimizer=AdamW(model.parameters())
        )


class Overflowing(Regression):
    """A model whose second batch has infinite gradients."""

    num_batches = 0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.num_batches += 1
        return {"loss": super().forward(inputs, labels)["loss"] * (float("inf") if self.num_batches == 2 else 1.0)}


def test_a_step_that_the_scaler_of_accelerate_skips_is_not_counted(tmp_path: Path, swarm: MemorySwarm) -> None:
    callback = NoLoCoCallback(swarm.peer("a", run_folder=tmp_path))
    trainer = make_trainer(tmp_path, callback, model=Overflowing(), max_steps=5, max_grad_norm=0.0)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")  # accelerate creates one only for a GPU
    assert trainer.train().global_step == 5
    assert callback.outer.num_steps == 4


def test_the_best_model_is_not_saved_as_the_last_one(tmp_path: Path, swarm: MemorySwarm) -> None:
    """At the end the Trainer loads the best weights into the model, but its outer state is that of the last step."""
    peer = swarm.peer("a", run_folder=tmp_path)
    every_3 = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(
        tmp_path,
        NoLoCoCallback(peer, save_every_s=0),
        load_best_model_at_end=True,
        label_names=["labels"],
        **every_3,
    )
    trainer.train()
    assert peer.metrics.validation_loss is not None
    assert peer.metrics.validation_progress == peer.metrics.progress > 0
    assert peer.states.saved is None
