"""What a GPU has to hold is computed from the numbers in a model's config, and agrees with the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from noloco_p2p.presets import PRESETS
from noloco_p2p.spec import LoraSpec, ModelSpec, TrainSpec
from noloco_p2p.trainer.compute import TEMPORARY, Compute, sequence_bytes
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import build_model, count_parameters
from noloco_p2p.trainer.needs import NF4_BYTES, Sizes

SPEC = PRESETS["tiny"].with_changes(
    {"data.sequence_length": 2048, "model.lora.rank": 16, "train.inner_optimizer": "adamw"}
)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma", "gemma2"])
def test_the_numbers_of_a_config_give_the_parameters_of_its_model(kind: str, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {**SMALL, "head_dim": 32} if kind != "llama" else SMALL
    AutoConfig.for_model(kind, **numbers).save_pretrained(tmp_path)
    model = ModelSpec(pretrained="mine", random_weights=True, lora=LoraSpec(rank=4, base_dtype="nf4"))
    sizes = Sizes.of(model, folders={"mine": str(tmp_path)})
    assert sizes
    own = sum(rows * columns for rows, columns in sizes.matrices) * sizes.num_layers
    counts = count_parameters(model, sequence_length=16, folders={"mine": str(tmp_path)})
    others = sizes.vocab_size * sizes.hidden_size * (1 if sizes.is_tied else 2)
    assert counts.frozen_bytes == pytest.approx(NF4_BYTES * own + 2 * others, rel=0.03), "norms are not counted here"
    assert counts.num_parameters == 4 * sizes.num_layers * sum(map(sum, sizes.matrices))


def test_a_model_of_another_kind_has_no_sizes(tmp_path: Path) -> None:
    model = ModelSpec(pretrained="mine")
    assert Sizes.of(model, folders={"mine": str(tmp_path)}) is None
    for numbers in ({"n_embd": 8, "n_layer": 2}, {**SMALL, "num_local_experts": 4}):
        (tmp_path / "config.json").write_text(json.dumps(numbers))
        assert Sizes.of(model, folders={"mine": str(tmp_path)}) is None


def kept_per_token(num_layers: int, lora: LoraSpec) -> float:
    """Measure what a pass in bf16 keeps of each token, with adapters or without."""
    model = ModelSpec(hidden_size=64, num_layers=num_layers, num_heads=4, mlp_size=176, lora=lora)
    step = InnerStep(build_model(model, sequence_length=256), TrainSpec(), Compute(precision="bf16"))
    tokens = torch.zeros(1, 256, dtype=torch.long)
    return sequence_bytes(step.backward, tokens, torch.device("cpu")) / TEMPORARY / 256


@pytest.mark.parametrize("lora", [LoraSpec(), LoraSpec(rank=2, base_dtype="bf16")], ids=["all weights", "adapters"])
def test_activations_are_those_that_a_pass_keeps(lora: LoraSpec) -> None:
    copies = 0 if lora.rank else 2 * (4 * 64 * 64 + 3 * 64 * 176) / 256  # of weights in bf16, which are kept, too
    measured = (kept_per_token(3, lora) - kept_per_token(1, lora)) / 2 - copies
    told = 24 * 64 + 10 * 64 + 8 * 176
    assert 0.6 * told < measured < 1.1 * told


def test_what_fits_is_said_for_each_way_to_keep_the_weights() -> None:
    first, *ways = Sizes.of_config(LLAMA_8B).lines(SPEC)
    assert first == (
        "GPUs of 8, 12, 16 and 24 GB that hold a sequence of 2,048 tokens, without and with --activation-checkpointing:"
    )
    assert ways == [
        "  all weights: 152.8 GiB (more than 24 GB) and 138.8 GiB (more than 24 GB)",
        "  adapters of rank 16, base_dtype fp32: 61.8 GiB (more than 24 GB) and 47.8 GiB (more than 24 GB)",
        "  adapters of rank 16, base_dtype bf16: 32.8 GiB (more than 24 GB) and 18.8 GiB (from 24 GB)",
        "  adapters of rank 16, base_dtype nf4: 23.3 GiB (from 24 GB) and 9.3 GiB (from 12 GB)",
    ]


def test_moments_of_8_bits_and_long_sequences_count() -> None:
    sizes, long = Sizes.of_config(LLAMA_8B), SPEC.with_changes({"data.sequence_length": 4096})
    small = SPEC.with_changes({"train.inner_optimizer": "adamw8bit"})
    plain = sizes.gpu_bytes(SPEC, "", saves_activations=True)
    assert plain - sizes.gpu_bytes(small, "", saves_activations=True) == pytest.approx(8.03e9 * (8 - 2.03), rel=0.01)
    more = sizes.gpu_bytes(long, "nf4", saves_activations=True) - sizes.gpu_bytes(SPEC, "nf4", saves_activations=True)
    assert more == 2048 * (32 * 4 * 4096 + 24 * 4096 + 10 * 4096 + 8 * 14_336), "and no more logits"
