"""A mismatched model is refused with its first differing tensor, wherever two models meet; buffers are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.specs import published
from torch import nn

from noloco_p2p.errors import CheckpointError
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.outer.saved_state import persistent_buffers
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="t", outer=published(inner_steps=2), total_steps=50)


class Net(nn.Module):
    """A module with a frozen layer, a tied pair, running statistics, and a buffer that is not persistent."""

    def __init__(self, width: int = 4, *, seed: int = 0, frozen_seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(frozen_seed)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        torch.manual_seed(seed)
        self.first = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.tied = nn.Linear(4, width)
        self.tied.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(self.frozen(inputs)) + self.tied(inputs))


def layout(**options: int) -> ModelLayout:
    return FlatParameters(Net(**options)).model_layout


def test_tied_parameters_are_there_once_frozen_ones_by_content_and_buffers_not_at_all() -> None:
    found = layout()
    assert [name for name, _ in found.trainable] == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "tied.bias",
    ]
    assert [name for name, _, _ in found.frozen] == ["frozen.weight", "frozen.bias"]
    assert layout(seed=1).digest() == found.digest()


def test_the_first_differing_tensor_is_named() -> None:
    assert layout().first_difference(layout()) == ""
    assert layout().first_difference(layout(width=5)) == (
        "the trainable tensors differ: this model has first.weight [4, 4], the other has first.weight [5, 4]"
    )
    assert layout().first_difference(layout(frozen_seed=1)) == (
        "the frozen tensor frozen.weight [4, 4] has different values, perhaps because of another revision or seed"
    )
    less = ModelLayout(layout().trainable[:-1], layout().frozen)
    assert layout().first_difference(less) == (
        "the trainable tensors differ: this model has tied.bias [4], the other has none"
    )


def test_a_checkpoint_of_another_model_is_refused_and_the_tensor_is_named(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(Net(), None, swarm.peer("one", run_folder=tmp_path), save_every_s=0)
        outer.save()
        for other, message in (
            (Net(5), r"first\.weight \[5, 4\], the other has"),
            (Net(frozen_seed=2), r"frozen\.weight"),
        ):
            with pytest.raises(CheckpointError, match=rf"belongs to another model: .*{message}"):
                NoLoCo(other, None, swarm.peer(message, run_folder=tmp_path), save_every_s=0)


def test_buffers_stay_each_peers_own_and_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    model = Net()
    assert list(persistent_buffers(model)) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(model, None, swarm.peer("one", run_folder=tmp_path), save_every_s=0)
        model(torch.randn(16, 4))
        statistics = model.norm.running_mean.clone()  # pyright: ignore[reportOptionalMemberAccess]
        assert statistics.abs().sum() > 0
        outer.step()
        assert torch.equal(persistent_buffers(model)["norm.running_mean"], statistics)
        outer.save()
        again = Net()
        NoLoCo(again, None, swarm.peer("two", run_folder=tmp_path), save_every_s=0)
    assert torch.equal(persistent_buffers(again)["norm.running_mean"], statistics)
    assert int(persistent_buffers(again)["norm.num_batches_tracked"]) == 1
