"""What a run needs from a machine; a model that can never fit is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from noloco_p2p.errors import SettingsError
from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import OuterSpec, TrainerSpec
from noloco_p2p.trainer import needs
from noloco_p2p.trainer.compute import Compute
from noloco_p2p.trainer.model import build_model, count_parameters
from noloco_p2p.trainer.needs import check_memory, estimate

CPU = torch.device("cpu")
TINY = PRESETS["tiny"].model


def check(spec: TrainerSpec, num_parameters: int, *, frozen_bytes: int = 0) -> None:
    check_memory(
        spec, PeerSettings(), num_parameters=num_parameters, frozen_bytes=frozen_bytes, compute=Compute(), device=CPU
    )


@pytest.mark.parametrize("rank", [0, 4])
def test_parameters_are_counted_without_a_model(rank: int) -> None:
    spec = TINY.model_copy(update={"lora": TINY.lora.model_copy(update={"rank": rank})})
    model = build_model(spec, sequence_length=16)
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    frozen_bytes = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    assert count_parameters(spec, sequence_length=16) == (trainable, frozen_bytes)


def test_a_model_of_any_size_is_counted_at_once() -> None:
    vast = TINY.model_copy(update={"hidden_size": 131_072, "num_heads": 1024, "mlp_size": 524_288})
    num_parameters, _ = count_parameters(vast, sequence_length=16)
    assert num_parameters == vast.num_parameters() > 10**11


def test_what_a_machine_can_never_hold_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "total_memory", lambda: 1 << 30)
    with pytest.raises(SettingsError, match=r"trains 100M parameters and needs at least \d\.\d GiB of main memory"):
        check(TrainerSpec(name="r"), 100_000_000)
    with pytest.raises(SettingsError, match=r"this machine has 1\.0 GiB"):
        check(TrainerSpec(name="r"), 1_000_000, frozen_bytes=1 << 30)
    check(TrainerSpec(name="r"), 10_000_000)


def test_only_an_outer_step_takes_memory_that_grows_with_the_model(tmp_path: Path) -> None:
    plain, momentum = TrainerSpec(name="r"), TrainerSpec(name="r", outer=OuterSpec(alpha=0.5))
    small, large, with_momentum = (
        estimate(spec, num_parameters=size, folder=tmp_path, settings=PeerSettings())
        for spec, size in ((plain, 10**8), (plain, 10**10), (momentum, 10**10))
    )
    assert small.host_bytes == large.host_bytes < 1 << 30
    assert with_momentum.host_bytes - large.host_bytes == 8 * 10**10  # slow weights and momentum
    assert with_momentum.disk_bytes - large.disk_bytes == 3 * 8 * 10**10


def test_muon_keeps_one_moment_of_its_matrices(tmp_path: Path) -> None:
    spec = TrainerSpec(name="r")
    adamw, muon = (
        estimate(spec, num_parameters=10**9, num_matrix_parameters=n, folder=tmp_path, settings=PeerSettings())
        for n in (0, 10**8)
    )
    assert adamw.model_bytes - muon.model_bytes == 4 * 10**8
    assert adamw.disk_bytes - muon.disk_bytes == 3 * 4 * 10**8


@pytest.mark.parametrize(
    ("activation_bytes", "text"),
    [
        (None, r"1\.5 GiB for the model \(plus activations\), "),
        (3 << 30, r"1\.5 GiB for the model and 3\.0 GiB for act"),
    ],
)
def test_activations_are_told_if_they_are_known(tmp_path: Path, activation_bytes: int | None, text: str) -> None:
    spec = TrainerSpec(name="r")
    needs = estimate(
        spec, num_parameters=10**8, activation_bytes=activation_bytes, folder=tmp_path, settings=PeerSettings()
    )
    assert re.search(text, needs.summary())
