"""Only adapters are trained and swapped; an export is the whole model, or the adapters in the format of peft."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from noloco_p2p.errors import ModelError
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.spec import DataSpec, LoraSpec, ModelSpec, TrainSpec
from noloco_p2p.trainer.compute import flops_per_token
from noloco_p2p.trainer.export import export_model
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.lora import merged_weights
from noloco_p2p.trainer.model import build_model, build_outline, build_tokenizer, count_parameters

BASE = ModelSpec(hidden_size=32, num_layers=2, num_heads=4, mlp_size=48, seed=3)
LORA = BASE.model_copy(update={"lora": LoraSpec(rank=4, alpha=8.0)})
IDS = torch.arange(3, 19).unsqueeze(0)


def build(spec: ModelSpec = LORA) -> PreTrainedModel:
    return build_model(spec, sequence_length=16)


def train(model: nn.Module, steps: int = 3) -> None:
    inner = InnerStep(model, TrainSpec(learning_rate=1e-2, warmup_steps=0, total_steps=50))
    for _ in range(steps):
        inner(IDS.repeat(2, 1), progress=0.1)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_only_adapters_are_trained_and_travel() -> None:
    model = build()
    flat = FlatParameters(model)
    assert all("lora_" in name for name, _ in flat.named)
    assert flat.num_elements == 2 * (4 * (32 + 32) * 4 + 3 * 4 * (32 + 48))
    frozen = {name: param.clone() for name, param in model.named_parameters() if not param.requires_grad}
    before = flat.read(0, flat.num_elements)
    train(model)
    assert not torch.equal(flat.read(0, flat.num_elements), before)
    assert all(torch.equal(model.get_parameter(name), param) for name, param in frozen.items())


def test_at_first_adapters_change_nothing_and_peers_start_equal() -> None:
    one, two = FlatParameters(build()), FlatParameters(build())
    assert torch.equal(one.read(0, one.num_elements), two.read(0, two.num_elements))
    assert one.layout() == two.layout()
    assert torch.equal(logits(build()), logits(build(BASE)))


def test_the_export_is_the_merged_model_and_training_goes_on(tmp_path: Path) -> None:
    model = build()
    train(model)
    expected = logits(model)
    model.train()
    folder = export_model(model, build_tokenizer(DataSpec()), tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(logits(loaded), expected, atol=1e-5)
    assert not torch.allclose(logits(build(BASE)), expected, atol=1e-3)
    assert not [name for name, _ in loaded.named_parameters() if "lora" in name]
    assert {param.requires_grad for name, param in model.named_parameters() if "lora_" in name} == {True}
    train(model, steps=1)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft makes transformers raise it
def test_adapters_alone_load_in_peft(tmp_path: Path) -> None:
    model = build()
    train(model)
    folder = export_model(model, build_tokenizer(DataSpec()), tmp_path / "adapters", adapters_of=LORA)
    assert (folder / "adapter_model.safetensors").stat().st_size < 40_000
    assert torch.allclose(logits(PeftModel.from_pretrained(build(BASE), str(folder))), logits(model), atol=1e-5)


def test_adapters_have_the_names_and_the_config_that_other_programs_expect(tmp_path: Path) -> None:
    """vLLM and llama.cpp's converter read these fields, and tensors with these names."""
    spec = LORA.model_copy(update={"pretrained": "lab/base"})
    folder = export_model(build(), build_tokenizer(DataSpec()), tmp_path / "adapters", adapters_of=spec)
    config = json.loads((folder / "adapter_config.json").read_text())
    modules = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(config["target_modules"]) == modules
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 4, 8.0, "none")
    assert config["base_model_name_or_path"] == "lab/base"
    names = load_file(folder / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 2 * len(modules)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names


def test_a_frozen_base_may_be_bf16_and_adapters_stay_fp32() -> None:
    model = build(LORA.model_copy(update={"lora": LoraSpec(rank=4, base_dtype="bf16")}))
    dtypes = {(param.requires_grad, param.dtype) for param in model.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    train(model)


WIDE = BASE.model_copy(update={"hidden_size": 64, "mlp_size": 128})  # whole blocks of NF4
QLORA = WIDE.model_copy(update={"lora": LoraSpec(rank=4, base_dtype="nf4")})


def test_a_base_in_nf4_has_the_size_that_is_told_and_the_same_bytes_on_every_peer() -> None:
    model, outline = build(QLORA), build_outline(QLORA, sequence_length=16)
    plain = WIDE.model_copy(update={"lora": LoraSpec(rank=4)})
    kinds = {type(module).__name__ for name, module in model.named_modules() if name.endswith("base_layer")}
    assert kinds == {"Linear4bit"}
    assert type(model.get_output_embeddings()) is nn.Linear
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad}
    assert {param.dtype for param in frozen.values()} == {torch.uint8, torch.bfloat16}
    scales = [state for param in frozen.values() if (state := getattr(param, "quant_state", None))]
    held = sum(param.nbytes for param in frozen.values())
    held += sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in scales)
    told = sum(param.nbytes for param in outline.parameters() if not param.requires_grad)
    assert held == pytest.approx(told, rel=0.01)
    assert FlatParameters(model).layout() == FlatParameters(build(QLORA)).layout()
    assert flops_per_token(model, sequence_length=16) == flops_per_token(build(plain), sequence_length=16)


def test_adapters_on_nf4_train_and_their_export_is_the_model_that_was_trained(tmp_path: Path) -> None:
    model, plain = build(QLORA), build(WIDE).state_dict()
    for name, tensor in merged_weights(model).items():
        error = float((tensor.detach().float() - plain[name]).norm() / plain[name].norm())
        assert error < (0.11 if "proj" in name else 0.003), f"{name}: NF4 rounds normal weights by 9 %"
    inner = InnerStep(model, TrainSpec(learning_rate=1e-2, warmup_steps=0, total_steps=50))
    first, *_, last = (float(inner(IDS.repeat(2, 1), progress=0.1)) for _ in range(20))
    assert last < first - 1
    expected = logits(model).float()
    loaded = AutoModelForCausalLM.from_pretrained(export_model(model, build_tokenizer(DataSpec()), tmp_path / "out"))
    assert float((logits(loaded).float() - expected).norm() / expected.norm()) < 0.02
    assert not [name for name in loaded.state_dict() if "absmax" in name or "lora" in name]


def test_a_layer_that_does_not_fill_whole_blocks_is_not_quantized() -> None:
    model = build(QLORA.model_copy(update={"mlp_size": 80}))
    kinds = {
        name.split(".")[-2]: type(module).__name__ for name, module in model.named_modules() if "base_layer" in name
    }
    assert (kinds["up_proj"], kinds["down_proj"]) == ("Linear4bit", "Linear")


def test_without_bitsandbytes_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    remedy = r" requires the package bitsandbytes: pip install bitsandbytes"
    with pytest.raises(ModelError, match=r"^model\.lora\.base_dtype 'nf4'" + remedy):
        build(QLORA)
    with pytest.raises(ModelError, match=r"^train\.inner_optimizer 'adamw8bit'" + remedy):
        InnerStep(build(), TrainSpec(inner_optimizer="adamw8bit"))
    count_parameters(QLORA, sequence_length=16)  # does not need it


def test_bitsandbytes_cannot_fetch_code_from_the_hub() -> None:
    """It does so through the package `kernels`, if that is installed."""
    build(QLORA)
    with pytest.raises(ImportError):
        importlib.import_module("kernels")


def test_quantized_weights_cannot_be_trained() -> None:
    with pytest.raises(ValidationError, match="base_dtype can be 'nf4' only with a rank above 0"):
        LoraSpec(base_dtype="nf4")


def test_targets_that_no_module_has_are_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.lora\.targets 'nothing'"):
        build(LORA.model_copy(update={"lora": LoraSpec(rank=4, targets="nothing")}))
    one = build(LORA.model_copy(update={"lora": LoraSpec(rank=4, targets="q_proj, v_proj")}))
    assert {name.split(".")[-4] for name, _ in FlatParameters(one).named} == {"q_proj", "v_proj"}
