"""A script that is started again continues bit for bit: with any scheduler, several groups, and several optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.specs import published
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from noloco_p2p.errors import ModelError, SettingsError
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="restart", outer=published(inner_steps=5, wait=True, max_wait_s=0.0), total_steps=100)
FIRST, ALL = 10, 20


def warm_up_and_cosine(optimizer: Optimizer) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, 15)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


def chained(optimizer: Optimizer) -> lr_scheduler.ChainedScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=12), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(parts)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 4),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 12, 12, 17]),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, ALL),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=15),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=12),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, ALL, power=2.0),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=ALL + 1),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3, cycle_momentum=False),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
    "warm-up and cosine": warm_up_and_cosine,
    "chained": chained,
}
OPTIMIZERS: dict[str, Callable[[nn.Sequential], list[Optimizer]]] = {
    "AdamW": lambda model: [AdamW(model.parameters(), lr=0.1)],
    "two groups": lambda model: [
        SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}], lr=0.1, momentum=0.9)
    ],
    "two optimizers": lambda model: [
        Adam(model[0].parameters(), lr=0.1, amsgrad=True),
        SGD(model[1].parameters(), lr=0.05, momentum=0.9, nesterov=True),
    ],
    "learning rate in a tensor": lambda model: [AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=False)],
}


def train(folder: Path, optimizers: str, scheduler: str, *, until: int, ends: bool = True) -> list[Any]:
    """Train as a script does that knows only the guide: it makes everything, resumes, and takes the missing steps.

    Returns the learning rates of each step, and the weights. If not `ends`, the last checkpoint is the one that NoLoCo
    takes by itself.
    """
    with MemorySwarm(SPEC) as swarm:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        made = OPTIMIZERS[optimizers](model)
        schedulers = [SCHEDULERS[scheduler](each) for each in made]
        peer = swarm.peer("a", run_folder=folder)
        outer = NoLoCo(
            model,
            made,
            peer,
            save_every_s=0 if ends else 1e-9,
            meta=lambda: {"schedulers": [each.state_dict() for each in schedulers]},
        )
        if outer.resumed:
            for each, state in zip(schedulers, outer.resumed.meta["schedulers"], strict=True):
                each.load_state_dict(state)
        seen: list[Any] = []
        for step in range(outer.num_steps, until):
            inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            seen.append([float(group["lr"]) for each in made for group in each.param_groups])
            for each in made:
                each.step()
            for each in made:
                each.zero_grad()
            for each in schedulers:
                each.step(1.0) if isinstance(each, lr_scheduler.ReduceLROnPlateau) else each.step()
        if ends:
            outer.save()
        outer._saver.wait()
        return [*seen, *(param.tolist() for param in model.parameters())]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_of_torch_continues(tmp_path: Path, scheduler: str) -> None:
    whole = train(tmp_path / "whole", "two groups", scheduler, until=ALL)
    first = train(tmp_path / "cut", "two groups", scheduler, until=FIRST)
    assert first[:FIRST] + train(tmp_path / "cut", "two groups", scheduler, until=ALL) == whole


@pytest.mark.parametrize("optimizers", OPTIMIZERS)
def test_every_set_of_optimizers_continues(tmp_path: Path, optimizers: str) -> None:
    whole = train(tmp_path / "whole", optimizers, "warm-up and cosine", until=ALL)
    first = train(tmp_path / "cut", optimizers, "warm-up and cosine", until=FIRST)
    assert first[:FIRST] + train(tmp_path / "cut", optimizers, "warm-up and cosine", until=ALL) == whole


def test_a_checkpoint_that_is_taken_during_training_continues_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NoLoCo counts a step before the script calls its scheduler, so it takes the checkpoint later."""
    monkeypatch.setattr("noloco_p2p.outer.noloco.LOOK_S", 0.0)
    whole = train(tmp_path / "whole", "AdamW", "ExponentialLR", until=ALL)
    train(tmp_path / "cut", "AdamW", "ExponentialLR", until=FIRST, ends=False)
    rest = train(tmp_path / "cut", "AdamW", "ExponentialLR", until=ALL)
    assert 0 < len(rest) - 4 < ALL
    assert rest == whole[-len(rest) :]


class Lookahead:
    """A wrapper, as people write it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state: dict[str, Any] = {}

    def step(self) -> None:
        self.optimizer.step()


class Subclass(SGD):
    def __init__(self, base: Optimizer) -> None:
        self.base_optimizer = base
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


@pytest.mark.parametrize("wrapper", [Lookahead, Subclass])
def test_the_steps_inside_a_wrapper_are_counted(tmp_path: Path, wrapper: Callable[[Optimizer], Any]) -> None:
    with MemorySwarm(SPEC) as swarm:
        model = nn.Linear(4, 2)
        optimizer = wrapper(SGD(model.parameters(), lr=0.1))
        outer = NoLoCo(model, optimizer, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert outer.num_steps == 1
        outer.save()


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm, pytest.raises(ModelError, match="the steps of dict cannot be counted"):
        NoLoCo(nn.Linear(4, 2), {}, swarm.peer("a", run_folder=tmp_path))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("meta", "message"), [({"x": torch.ones(1)}, r"meta\['x'\] is a torch.Tensor"), ({"outer": 1}, "another key")]
)
def test_meta_is_checked_before_training(tmp_path: Path, meta: dict[str, Any], message: str) -> None:
    with MemorySwarm(SPEC) as swarm, pytest.raises(SettingsError, match=message):
        NoLoCo(nn.Linear(4, 2), None, swarm.peer("a", run_folder=tmp_path), meta=lambda: meta)
