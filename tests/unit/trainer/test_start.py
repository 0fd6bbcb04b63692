"""The initial state of a forked run: stored by name, verified by its digest, and read in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from noloco_p2p.errors import CheckpointError, ModelError
from noloco_p2p.trainer.start import DIGESTS, has_start, load_start, new_start


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(sum(sizes))
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for size in sizes))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def kept(model: nn.Module, state_dir: Path) -> tuple[str, Path]:
    """Store a file for each parameter; return the digest and the folder."""
    with new_start(state_dir) as start:
        for name, values in values_of(model).items():
            start.add({name: values})
    return start.digest, start.folder


def test_a_model_gets_the_state_that_was_kept_and_keeping_it_again_gives_the_same_name(tmp_path: Path) -> None:
    model, other = model_of(2, 3), model_of(2, 3)
    start, folder = kept(model, tmp_path)
    nn.init.zeros_(other.get_parameter("0.weight"))
    load_start(other, start, state_dir=tmp_path)
    assert torch.equal(other.get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert kept(model, tmp_path) == (start, folder)
    assert [path.name for path in (tmp_path / "starts").iterdir()] == [folder.name]


def test_a_part_of_a_model_needs_its_own_files_alone(tmp_path: Path) -> None:
    model = model_of(2, 3)
    start, folder = kept(model, tmp_path)
    (folder / "00001.safetensors").unlink()
    part = model_of(2)
    nn.init.zeros_(part.get_parameter("0.weight"))
    load_start(part, start, state_dir=tmp_path)
    assert torch.equal(part.get_parameter("0.weight"), model.get_parameter("0.weight"))
    with pytest.raises(
        ModelError, match=r"1\.weight has the shape \[3, 3\] .*, but no values in model\.start; a fork cannot"
    ):
        load_start(model_of(2, 3), start, state_dir=tmp_path)


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    model = model_of(2)
    start, folder = kept(model, tmp_path)
    path, listed = folder / "00000.safetensors", (folder / DIGESTS).read_bytes()
    save_file({"0.weight": load_file(path)["0.weight"] + 1}, path)
    with pytest.raises(ModelError, match=r"is damaged: its digest differs from model\.start"):
        load_start(model, start, state_dir=tmp_path)
    (folder / DIGESTS).write_bytes(listed.replace(b"0.weight", b"1.weight"))
    with pytest.raises(ModelError, match="is damaged"):
        load_start(model, start, state_dir=tmp_path)
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        load_start(model, start, state_dir=tmp_path)


def test_a_state_that_is_not_here_changes_nothing(tmp_path: Path) -> None:
    model = model_of(2)
    before = values_of(model)
    for start in ("", "blake3:" + "0" * 64):
        load_start(model, start, state_dir=tmp_path)
        assert has_start(start, state_dir=tmp_path) is (not start)
    assert torch.equal(model.get_parameter("0.weight"), before["0.weight"])


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the start state cannot be written"), new_start(tmp_path):
        raise OSError("no space")
    assert not list((tmp_path / "starts").iterdir())
