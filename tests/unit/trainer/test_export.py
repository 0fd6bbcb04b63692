"""An export loads in plain transformers without a network; a failed export writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.spec import DataSpec, ModelSpec
from noloco_p2p.trainer.export import check_export_folder, export_model
from noloco_p2p.trainer.model import build_model, build_tokenizer, configure_for_export

SMALL = ModelSpec(hidden_size=32, num_layers=1, num_heads=4, mlp_size=48)

STRANGER = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"network: {event} {args}")
sys.addaudithook(refuse)
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer("import o", return_tensors="pt").input_ids
written = model.generate(ids, max_new_tokens=4, do_sample=False)
print(ids.tolist(), written.shape[1], model.config.use_cache)
"""


@pytest.mark.parametrize("tied", [True, False])
def test_model_and_tokenizer_load_again(tmp_path: Path, tied: bool, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_model(SMALL.model_copy(update={"tied_embeddings": tied, "seed": 3}), sequence_length=16)
    folder = export_model(model, build_tokenizer(DataSpec()), tmp_path / "new" / "exported")
    assert capfd.readouterr() == ("", "")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 19).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model.eval().forward(input_ids=ids).logits)
    weights = dict(loaded.named_parameters(remove_duplicate=False))
    assert (weights["lm_head.weight"] is weights["model.embed_tokens.weight"]) is tied
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return 'é \x00\U0001f642'\n"
    ids = tokenizer(text).input_ids
    assert ids == [byte + 3 for byte in text.encode()], "as it was trained, and open at its end: a prompt goes on"
    assert tokenizer.decode(ids) == text
    assert tokenizer.pad_token_id == 0
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == ["exported"]


def test_a_stranger_needs_no_network_to_use_it(tmp_path: Path) -> None:
    folder = export_model(build_model(SMALL, sequence_length=16), build_tokenizer(DataSpec()), tmp_path / "exported")
    done = subprocess.run([sys.executable, "-c", STRANGER, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ids = [byte + 3 for byte in b"import o"]
    assert done.stdout.startswith(f"[{ids}] ")
    assert done.stdout.endswith(" True\n")


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    model, tokenizer = build_model(SMALL, sequence_length=16), build_tokenizer(DataSpec())
    with pytest.raises(SettingsError, match="not an empty folder; choose another"):
        export_model(model, tokenizer, tmp_path)
    with pytest.raises(SettingsError, match="not an empty folder"):
        export_model(model, tokenizer, tmp_path / "precious")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("kind", ["plain", "link", "current", "volume"])
def test_an_empty_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It may be mounted, so that nothing can be renamed to it, or be the only folder that may be written."""
    real = tmp_path / "parent" / "real"
    real.mkdir(parents=True)
    before = real.stat().st_ino
    if kind == "volume":
        (real / "lost+found").mkdir()
    folder = real
    if kind == "link":
        folder = tmp_path / "link"
        folder.symlink_to(real)
    elif kind == "current":
        monkeypatch.chdir(real)
        folder = Path()
    export_model(build_model(SMALL, sequence_length=16), build_tokenizer(DataSpec()), folder)
    assert real.stat().st_ino == before
    assert (real / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert not [path for path in (*real.iterdir(), *real.parent.iterdir()) if path.name.startswith(".")]


def test_a_place_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SettingsError, match="may not write to"):
        check_export_folder(tmp_path / "new" / "folder")


@pytest.mark.parametrize(
    ("ends", "pad", "expected"), [([1, 7], 5, ([1, 7], 0)), (1, None, (1, 0)), (9, None, (1, 0)), (None, None, (1, 0))]
)
def test_a_fine_tuned_model_keeps_its_end_tokens(ends: list[int] | int | None, pad: int | None, expected: Any) -> None:
    model, tokenizer = build_model(SMALL, sequence_length=16), build_tokenizer(DataSpec())
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = ends, pad
    configure_for_export(model, tokenizer)
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == expected


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    model, tokenizer = build_model(SMALL, sequence_length=16), build_tokenizer(DataSpec())
    with pytest.raises(CheckpointError, match="cannot be exported"):
        export_model(model, tokenizer, tmp_path / "file" / "below")

    def full(*_args: object, **_kwargs: object) -> tuple[str, ...]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_model(model, tokenizer, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
