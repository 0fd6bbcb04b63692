"""The model of a spec: the same bits on every machine, the stated size, no network, and no output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from noloco_p2p.errors import ModelError, SpecError
from noloco_p2p.spec import DataSpec, ModelSpec, TrainerSpec
from noloco_p2p.trainer.model import build_model, build_tokenizer, check_vocabulary

SMALL = ModelSpec(hidden_size=32, num_layers=2, num_heads=4, mlp_size=48)
NAMED = ModelSpec(pretrained="mine")

SILENT_AND_OFFLINE = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"network: {event} {args}")
sys.addaudithook(refuse)
from noloco_p2p.spec import DataSpec, ModelSpec
from noloco_p2p.trainer.model import build_model, build_tokenizer
build_model(ModelSpec(hidden_size=32, num_layers=1, mlp_size=48), sequence_length=16)
build_tokenizer(DataSpec())
"""


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        SMALL.model_copy(update={"tied_embeddings": False}),
        SMALL.model_copy(update={"num_kv_heads": 2}),
        ModelSpec(),
    ],
)
def test_the_model_has_as_many_parameters_as_its_spec_says(spec: ModelSpec) -> None:
    model = build_model(spec, sequence_length=16)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters()


def test_the_same_spec_gives_the_same_bits_and_leaves_the_callers_random_state_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(SMALL, sequence_length=16)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model(SMALL, sequence_length=16)
    for (name, one), (_, two) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, two), name


def test_building_it_uses_no_network_and_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SILENT_AND_OFFLINE], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_saved_folder_is_a_pretrained_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build_model(SMALL.model_copy(update={"seed": 5}), sequence_length=16)
    model.save_pretrained(tmp_path)
    capfd.readouterr()  # discard the output of save_pretrained
    again = build_model(NAMED, sequence_length=16, folders={"mine": str(tmp_path)})
    assert torch.equal(_embeddings(again), _embeddings(model))
    assert again.training
    assert again.dtype == torch.float32
    assert capfd.readouterr() == ("", "")


def test_a_sequence_longer_than_the_pretrained_model_knows_is_refused(tmp_path: Path) -> None:
    build_model(SMALL, sequence_length=16).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"data\.sequence_length is 32, .* only 16 positions"):
        build_model(NAMED, sequence_length=32, folders={"mine": str(tmp_path)})


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = build_model(SMALL, sequence_length=16)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        build_model(NAMED, sequence_length=16, folders={"mine": str(tmp_path)})


def test_a_hub_name_that_cannot_be_reached_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"model 'nobody/nothing' at revision 'abc' cannot be loaded"):
        build_model(ModelSpec(pretrained="nobody/nothing", revision="abc"), sequence_length=16)
    with pytest.raises(ModelError, match="tokenizer 'nobody/nothing' cannot be loaded"):
        build_tokenizer(DataSpec(tokenizer="nobody/nothing"))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    tokenizer = build_tokenizer(DataSpec())
    check_vocabulary(build_model(SMALL, sequence_length=16), tokenizer)
    small = build_model(SMALL.model_copy(update={"vocab_size": 300}), sequence_length=16)
    with pytest.raises(ModelError, match=r"model\.vocab_size is 300.*384"):
        check_vocabulary(small, tokenizer)


def test_the_architecture_of_a_named_model_takes_weights_of_the_seed(tmp_path: Path) -> None:
    """Any architecture that transformers knows is valid, not only Llama."""
    config = GPT2Config(vocab_size=384, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    folders = {"mine": str(tmp_path)}
    spec = NAMED.model_copy(update={"random_weights": True})
    one, two = (build_model(spec, sequence_length=16, folders=folders) for _ in range(2))
    saved = build_model(NAMED, sequence_length=16, folders=folders)
    assert isinstance(one, GPT2LMHeadModel)
    head = [model.get_parameter("transformer.wte.weight") for model in (one, two, saved)]
    assert torch.equal(head[0], head[1])
    assert not torch.equal(head[0], head[2])


def test_a_path_in_a_spec_is_refused_with_the_way_to_name_it() -> None:
    for values in ({"model": {"pretrained": "/etc"}}, {"data": {"tokenizer": "../x"}}):
        with pytest.raises(SpecError, match=r"is neither OWNER/NAME on the hub nor a plain name.*--model NAME=FOLDER"):
            TrainerSpec.from_dict({"name": "x", **values}, origin="run.toml")
    with pytest.raises(SpecError, match=r"model\.random_weights requires model"):
        TrainerSpec.from_dict({"name": "x", "model": {"random_weights": True}}, origin="run.toml")


def _embeddings(model: PreTrainedModel) -> torch.Tensor:
    return model.get_parameter("model.embed_tokens.weight")


def test_a_folder_that_is_bound_and_not_here_is_told(tmp_path: Path) -> None:
    """The hub is not asked instead, as the name may belong to somebody else there."""
    bound = {"llama": str(tmp_path / "llama")}
    with pytest.raises(ModelError, match=r"llama is bound to .*llama, which is not a folder"):
        build_model(ModelSpec(pretrained="llama"), sequence_length=16, folders=bound)
    with pytest.raises(ModelError, match="which is not a folder"):
        build_tokenizer(DataSpec(tokenizer="llama"), folders=bound)
