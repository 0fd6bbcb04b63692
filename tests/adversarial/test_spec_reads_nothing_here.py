"""A stranger's spec cannot read the text, models or tokenizers of this machine, whatever names it uses.

Each test starts in a folder with a private text and a private model; the stranger owns the hub, which runs on loopback.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.processes import noloco
from harness.small_hub import SmallHub
from transformers import LlamaConfig, LlamaForCausalLM

from noloco_p2p.data.sources import open_source
from noloco_p2p.errors import DataError, ModelError, SpecError
from noloco_p2p.spec import DataSpec, ModelSpec, TrainerSpec
from noloco_p2p.trainer.model import build_model, build_tokenizer

SECRET = "a private sentence"
README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {path}
---
"""


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a text and models that nobody has bound."""
    (tmp_path / "diary.txt").write_text(SECRET)
    model = small_llama(1)
    for name in ("private", "lab/private"):
        model.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=384, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.source", "hub:text"),
        ("data.source", "hub:json"),
        ("data.source", "hub:../lab/texts"),
        ("model.pretrained", "./private"),
        ("model.pretrained", "lab/private/."),
        ("data.tokenizer", "/etc"),
    ],
)
def test_a_name_of_this_machine_is_a_wrong_spec(field: str, value: str, private: Path) -> None:
    section, key = field.split(".")
    (private / "run.toml").write_text(f'name = "r"\n[{section}]\n{key} = "{value}"\n')
    done = noloco("join", private / "run.toml", "--listen", "127.0.0.1:0", "--state-dir", private / "peer")
    assert done.returncode == 3, done.stderr
    assert field in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_plain_name_must_be_bound(private: Path) -> None:
    with pytest.raises(SpecError, match=r"model\.pretrained 'private' is neither OWNER/NAME .* --model private=FOLDER"):
        build_model(ModelSpec(pretrained="private"), sequence_length=16)
    with pytest.raises(SpecError, match=r"data\.tokenizer 'private' is neither OWNER/NAME"):
        build_tokenizer(DataSpec(tokenizer="private"))


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> SmallHub:
    """Serve a hub and point `huggingface_hub` to it, which reads its addresses when it is imported."""
    hub, home = SmallHub({}), tmp_path_factory.mktemp("home")
    endpoint = hub.environment(home)["HF_ENDPOINT"]
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    return hub


def test_a_hub_name_is_never_a_folder_here(private: Path, hub: SmallHub, tmp_path: Path) -> None:
    theirs = small_llama(2)
    theirs.save_pretrained(tmp_path / "theirs")
    with hub:
        hub.files = {"lab/private": files_of(tmp_path / "theirs")}
        model = build_model(ModelSpec(pretrained="lab/private"), sequence_length=16)
    for name, param in model.named_parameters():
        assert torch.equal(param, theirs.get_parameter(name)), name


def test_an_adapter_does_not_lead_to_a_model_here(private: Path, hub: SmallHub) -> None:
    pytest.importorskip("peft")
    config = {"base_model_name_or_path": str(private / "private"), "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    files = {"adapter_config.json": json.dumps(config).encode()}
    with hub:
        hub.files = {"lab/adapter": files, "lab/both": {**files, **files_of(private / "lab" / "private")}}
        with pytest.raises(ModelError, match="lab/adapter"):
            build_model(ModelSpec(pretrained="lab/adapter"), sequence_length=16)
        build_model(ModelSpec(pretrained="lab/both"), sequence_length=16)
    assert not hub.asked["adapter_config.json"]


def test_a_bound_adapter_whose_model_is_elsewhere_is_refused(private: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(private / "private")}))
    with pytest.raises(ModelError, match="is an adapter without its base model"):
        build_model(ModelSpec(pretrained="mine"), sequence_length=16, folders={"mine": str(folder)})


@pytest.mark.slow
@pytest.mark.parametrize("path", ["diary.txt", "https://example.invalid/x.txt"])
def test_a_data_set_that_lists_files_elsewhere_is_refused(path: str, private: Path, tmp_path: Path) -> None:
    """The card of a data set may name any path, and `datasets` would read it."""
    listed = path if "://" in path else str(private / path)
    spec = TrainerSpec.from_dict({"name": "r", "data": {"source": "hub:lab/texts"}}, origin="test")
    (tmp_path / "run.toml").write_text(f'name = "r"\n[data]\nsource = "{spec.data.source}"\n')
    with SmallHub({"lab/texts": {"README.md": README.format(path=listed).encode(), "a.txt": b"public"}}) as hub:
        done = noloco("data", "check", tmp_path / "run.toml", **hub.environment(tmp_path / "home"))
    assert done.returncode in (1, 3), done.stdout
    assert SECRET not in done.stdout + done.stderr
    assert "which is not part of that data set" in done.stderr or "cannot be opened" in done.stderr


def test_files_elsewhere_are_found_before_they_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from noloco_p2p.data.hub import _check_files

    _check_files({"train": ["hf://datasets/lab/texts@0123/a.txt"]}, "lab/texts")
    for file in ("/etc/passwd", "https://example.invalid/x", "hf://datasets/lab/other@0123/a.txt", "diary.txt"):
        with pytest.raises(SpecError, match="which is not part of that data set"):
            _check_files({"train": [file]}, "lab/texts")


def test_files_that_nobody_bound_are_refused() -> None:
    with pytest.raises(DataError, match="--data diary=GLOB"):
        open_source(DataSpec(source="diary"), {})
