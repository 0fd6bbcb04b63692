"""A script that uses only the library: restarts, the end of a run, and mistakes."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE_S
from harness.processes import until
from torch import nn

from noloco_p2p.errors import CheckpointError, ModelError, Refused, SettingsError
from noloco_p2p.gossip.frames import StateManifest, WantManifest
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.noloco import MOST_RECOVERIES, NoLoCo
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="own", total_steps=100)


def make_model() -> nn.Linear:
    return nn.Linear(4, 3)


def train(model: nn.Module, outer: NoLoCo, *, num_steps: int) -> None:
    for _ in range(num_steps):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.5)
        outer.step()


def test_a_restarted_peer_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path))
        train(model, outer, num_steps=1)  # which writes the first checkpoint
        outer._saver.wait()  # as there is one writer
        train(model, outer, num_steps=3)
        outer._peer.metrics.swaps, outer._peer.metrics.tokens = 7, 900
        outer.save()
        train(model, outer, num_steps=1)
    with MemorySwarm(SPEC) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        again = NoLoCo(other, None, peer)
        assert again.resumed is not None
        assert (again.num_steps, again.progress, again.entered) == (4, pytest.approx(0.04), False)
        assert (peer.metrics.swaps, peer.metrics.tokens) == (7, 900)
        assert peer.states.saved is not None  # newcomers can fetch it at once
        assert peer.states.saved.manifest.progress == again.progress
    torch.testing.assert_close(other.weight, model.weight - 0.5)


def test_a_newcomer_gets_a_state_of_now_and_not_of_the_last_checkpoint(tmp_path: Path) -> None:
    """A state from far behind would make it too old to swap with anybody."""
    model = make_model()
    with MemorySwarm(SPEC) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        outer = NoLoCo(model, None, peer)
        train(model, outer, num_steps=1)
        outer._saver.wait()
        old = peer.states.saved
        train(model, outer, num_steps=60)
        with pytest.raises(Refused, match="saving a newer state"):
            asyncio.run(anext(peer.states.serve(WantManifest())))
        until(lambda: train(model, outer, num_steps=1) or peer.states.saved is not old, what="a newer state")
        manifest = asyncio.run(anext(peer.states.serve(WantManifest())))
        assert isinstance(manifest, StateManifest)
        assert manifest.progress > 0.6


@pytest.mark.parametrize("total_steps", [480, 2_000])
def test_a_script_that_trains_to_the_end_may_close(tmp_path: Path, total_steps: int) -> None:
    """Sums of fractions may miss 1 slightly; no step may be left over."""
    spec = SPEC.model_copy(update={"total_steps": total_steps})
    with MemorySwarm(spec) as swarm:
        model, peer = make_model(), swarm.peer("a", run_folder=tmp_path)
        outer, num_steps = NoLoCo(model, None, peer, save_every_s=0), 0
        while outer.progress < 1:
            train(model, outer, num_steps=1)
            num_steps += 1
        assert num_steps == total_steps
        outer.close()  # there is nobody to swap with


def test_a_buffer_of_any_layout_comes_back(tmp_path: Path) -> None:
    for value in (1.0, 0.0):
        model = make_model()
        model.register_buffer("mask", torch.full((1,), value).expand(2, 3))
        model.register_buffer("sign", torch.full((2,), value * 1j).conj())
        with MemorySwarm(SPEC) as swarm:
            outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
            outer.save()
        assert torch.equal(model.get_buffer("mask"), torch.ones(2, 3))
        assert torch.equal(model.get_buffer("sign"), torch.full((2,), -1j))


@pytest.mark.parametrize("seconds", ["600", None, -1, math.nan])
def test_an_interval_that_is_no_time_is_refused(tmp_path: Path, seconds: Any) -> None:
    with MemorySwarm(SPEC) as swarm, pytest.raises(SettingsError, match="save_every_s must be a number of seconds"):
        NoLoCo(make_model(), None, swarm.peer("a", run_folder=tmp_path), save_every_s=seconds)


def test_one_peer_trains_one_model(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        peer = swarm.peer("a", run_folder=tmp_path)
        models = [make_model(), make_model()]
        first, second = (NoLoCo(model, None, peer, save_every_s=0) for model in models)
        train(models[1], second, num_steps=3)
        with pytest.raises(SettingsError, match="can train only one model"):
            first.step()


@pytest.mark.parametrize("change", ["replace", "freeze"])
def test_parameters_that_would_not_be_swapped_are_told(change: str, tmp_path: Path) -> None:
    model = nn.Sequential(make_model(), make_model())
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
        train(model, outer, num_steps=1)
        if change == "replace":
            model[0] = make_model()
        else:
            model[0].requires_grad_(False)
        outer._looked_at_s = 0.0  # it looks once a second
        with pytest.raises(ModelError, match="create a new NoLoCo"):
            train(model, outer, num_steps=2)


ENDS_AT_ONCE = """
import sys, torch
from pathlib import Path
from noloco_p2p.outer.checkpoint import Checkpoints, Saver
checkpoints = Checkpoints(Path(sys.argv[1]))
live = {"state": {"weights": torch.ones(30_000_000)}}
Saver().begin(checkpoints.begin(0, files=live, meta={}))
"""


def test_a_script_that_ends_waits_for_its_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert Checkpoints(tmp_path).newest() is not None


def test_weights_that_diverge_again_and_again_end_training_with_advice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
        outer.save()

        def diverge() -> None:
            for param in model.parameters():
                param.data.fill_(torch.nan)
            outer._looked_at_s = 0.0  # it looks once a second
            outer.step()

        for number in range(1, MOST_RECOVERIES + 1):
            diverge()
            assert outer.weights.looks_finite()
            assert len(caplog.records) == number
        assert "learning rate" not in caplog.records[0].message
        assert "use a lower learning rate, or look for NaN in the data" in caplog.records[1].message
        with pytest.raises(ModelError, match=r"times within .*: use a lower learning rate"):
            diverge()


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(model, None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
        saved = outer.save()
        for param in model.parameters():
            param.data.fill_(torch.nan)
        with pytest.raises(CheckpointError, match="not finite"):
            outer.save()
        assert not outer.save_in_background()
        assert "the weights are not finite, so they are not saved" in caplog.text
        found = Checkpoints(tmp_path / "checkpoints").newest()
        assert found is not None
        assert found.path == saved


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"meta": {"scheduler": 1}}, "meta must be a function"),
        ({"on_swap": None}, "on_swap must be a function"),
        ({"loss": 2.5}, "loss must be a function"),
        ({"meta": lambda: None}, "meta must return a dictionary, but it returned a NoneType"),
        ({"meta": lambda: [1, 2]}, "meta must return a dictionary, but it returned a list"),
    ],
)
def test_what_is_no_function_is_refused_before_training(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm, pytest.raises(SettingsError, match=message):
        NoLoCo(make_model(), None, swarm.peer("a", run_folder=tmp_path), **wrong)


def test_a_position_that_a_script_sets_is_one_that_other_peers_can_use(tmp_path: Path) -> None:
    with MemorySwarm(SPEC) as swarm:
        outer = NoLoCo(make_model(), None, swarm.peer("a", run_folder=tmp_path), save_every_s=0)
        cases: list[tuple[Any, float]] = [(torch.tensor(0.25), 0.25), (1 + 1e-9, 1.0), (-0.5, 0.0)]
        for told, used in cases:
            outer.progress = told
            assert type(outer.progress) is float
            assert outer.progress == used
        with pytest.raises(SettingsError, match="NaN"):
            outer.progress = math.nan
