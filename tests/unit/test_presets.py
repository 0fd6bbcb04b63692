"""Presets are valid, state their true size, and survive a round trip through TOML."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.presets import PRESETS, describe_tokens, is_section, render, sections
from noloco_p2p.spec import DataSpec, MixSpec, ModelSpec, OuterSpec, RunSpec, TrainerSpec, TrainSpec

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    pretrained=st.sampled_from(["", "mine", "lab/model-1.0"]),
    field=plain_text,
    rate=st.floats(min_value=1e-12, max_value=1e12),
    kv_heads=st.sampled_from([None, 1, 2]),
    gamma=st.sampled_from([None, 0.5]),
)
def test_any_spec_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    pretrained: str,
    field: str,
    rate: float,
    kv_heads: int | None,
    gamma: float | None,
) -> None:
    spec = TrainerSpec(
        name="any",
        model=ModelSpec(pretrained=pretrained, num_kv_heads=kv_heads),
        data=DataSpec(
            source="mix", mix=(MixSpec(source="a", text_field=field), MixSpec(source="hub:a/b", weight=rate))
        ),
        train=TrainSpec(learning_rate=rate),
        outer=OuterSpec(wait=gamma is not None, gamma=gamma),
    )
    path = tmp_path_factory.mktemp("spec") / "run.toml"
    path.write_text(render(spec), encoding="utf-8", newline="")
    assert TrainerSpec.load(path) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_loads_back_equal_and_every_key_stands_at_column_0_with_a_comment(name: str, tmp_path: Path) -> None:
    text = render(PRESETS[name])
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert TrainerSpec.load(tmp_path / "run.toml") == PRESETS[name]
    model = PRESETS[name].model
    size = f"the model {model.pretrained!r}" if model.pretrained else f"{model.num_parameters():,} parameters"
    assert size in text
    for line in text.splitlines():
        assert line == line.lstrip()
        assert "=" not in line or line.startswith("#") or "  # " in line, f"no comment: {line}"


def test_the_tokens_of_a_run_are_compared_with_twenty_per_parameter() -> None:
    tiny = PRESETS["tiny"]
    assert describe_tokens(tiny) == (
        "each peer reads 61.4M in its schedule, 62 per parameter; 1 peer reaches 20, the usual number for training "
        "from scratch"
    )
    short = tiny.with_changes({"train.total_steps": 6000, "pipeline.stages": 2, "model.parameter_seeds": True})
    assert describe_tokens(short).startswith(
        "each head reads 6.14M in its schedule, 6.2 per parameter; 4 heads together reach 20, "
    )
    assert describe_tokens(tiny.with_changes({"model.lora.rank": 4})) == "each peer reads 61.4M in its schedule"
    assert "per parameter" not in describe_tokens(PRESETS["finetune"])


def test_every_field_and_every_section_has_a_description() -> None:
    told = {name: about for name, about, _ in sections()}
    for model in [*(section for _, _, section in sections()), TrainerSpec, RunSpec, MixSpec]:
        told |= {name: field.description for name, field in model.model_fields.items() if not is_section(field)}
    assert all(told.values())


@pytest.mark.parametrize(
    ("name", "tokens_a_step", "num_peers"), [("small", 2**19, 8), ("medium", 2**20, 16), ("large", 2**21, 16)]
)
def test_the_papers_sizes_have_the_papers_tokens_a_step(name: str, tokens_a_step: int, num_peers: int) -> None:
    spec = PRESETS[name]
    assert spec.train.batch_size * spec.data.sequence_length * num_peers == tokens_a_step
    assert (spec.outer.has_outer_step, spec.train.inner_optimizer) == (False, "muon")
    assert (spec.train.total_steps, spec.train.warmup_steps, spec.train.weight_decay) == (25_000, 1_000, 0.0)
    assert not spec.outer.warnings()


def test_the_paper_is_the_papers_rule() -> None:
    outer, train, codec = PRESETS["paper"].outer, PRESETS["paper"].train, PRESETS["paper"].codec
    assert (outer.alpha, outer.beta, outer.pull, outer.inner_steps, outer.wait) == (0.5, 0.7, 0.7, 50, True)
    assert (outer.swap_momentum, outer.closing_mixings, train.inner_optimizer) == (False, 0, "adamw")
    assert codec.weights == "fp32"
    assert PRESETS["small"].model.num_parameters() == 211_766_016


def test_adapters_are_for_chats_and_a_card_of_8_gb() -> None:
    spec = PRESETS["finetune"].with_changes({"model.pretrained": "mine", "data.tokenizer": "mine"})
    assert (spec.model.lora.rank, spec.model.lora.base_dtype) == (16, "bf16")
    assert (spec.data.format, spec.data.source) == ("chat", "chats")
    assert not spec.warnings()
