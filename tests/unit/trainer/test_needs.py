"""What a run needs from a machine; a model that can never fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from noloco_p2p.devices import free_memory, total_memory
from noloco_p2p.errors import SettingsError
from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec
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
    with pytest.raises(SettingsError, match=r"trains 100M parameters and needs at least 2\.\d GiB of main memory"):
        check(TrainerSpec(name="r"), 100_000_000)
    with pytest.raises(SettingsError, match=r"this machine has 1\.0 GiB"):
        check(TrainerSpec(name="r"), 1_000_000, frozen_bytes=1 << 30)
    check(TrainerSpec(name="r"), 10_000_000)


def test_momentum_that_is_not_kept_takes_no_memory_and_no_disk(tmp_path: Path) -> None:
    published = TrainerSpec.from_dict({"name": "r", "outer": {"alpha": 0.5, "gamma": 0.7}}, origin="test")
    with_momentum, without = (
        estimate(spec, num_parameters=1000, step_s=1.0, folder=tmp_path) for spec in (published, TrainerSpec(name="r"))
    )
    assert with_momentum.outer_bytes - without.outer_bytes >= 4000
    assert with_momentum.disk_bytes - without.disk_bytes == 3 * 4000


def test_a_machine_has_as_much_memory_as_is_free_or_more() -> None:
    assert 0 < free_memory() <= total_memory()
