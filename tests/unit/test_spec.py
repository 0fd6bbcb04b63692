"""The run spec: each run has one digest, and errors name the dotted field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from noloco_p2p.errors import SpecError
from noloco_p2p.spec import MAX_SPEC_BYTES, OuterSpec, RunSpec, Spec, TrainerSpec

SPEC = TrainerSpec(name="mine")


def refuse(**values: object) -> str:
    with pytest.raises(SpecError) as error:
        TrainerSpec.from_dict({"name": "mine", **values}, origin="run.toml")
    return str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"outer": {"beta": 2.0}}, "outer.gamma must be < 2 (1 - alpha^2) = 2 for alpha 0"),
        ({"outer": {"alpha": 0.5, "beta": 1.6}}, "outer.gamma must be < 2 (1 - alpha^2) = 1.5"),
        ({"outer": {"alpha": 0.9, "beta": 0.7}}, "diverges"),
        (
            {"outer": {"gamma": 1.9, "alpha": 0.5, "wait": True, "swap_momentum": True}},
            "outer.gamma must be < 2 (2 - alpha^2) / (2 + alpha) = 1.4",
        ),
        ({"outer": {"gamma": 0.7}}, "outer.gamma can differ from beta only if `wait` is set"),
        ({"outer": {"alpha": 0.5, "swap_momentum": True}}, "outer.swap_momentum needs `wait`"),
        ({"outer": {"inner_step": 5}}, "outer.inner_step is not a known field"),
        ({"outer": {"inner_steps": "auto"}}, "outer.inner_steps must be "),
        *(
            (
                {"outer": {"min_inner_steps": value}},
                f"outer.min_inner_steps '{value}' must be a positive number of inner",
            )
            for value in (0, "fast", True)
        ),
        ({"outer": {"beta": float("nan")}}, "outer.beta must be "),
        ({"train": {"warmup_steps": 9, "total_steps": 9}}, "train.warmup_steps (9) must be less than total_steps (9)"),
        ({"model": {"hidden_size": 15, "num_heads": 5}}, "model.hidden_size / num_heads (15 / 5) must be even"),
        (
            {"model": {"hidden_size": 100, "num_heads": 3}},
            "model.hidden_size (100) must be a multiple of num_heads (3)",
        ),
        (
            {"model": {"start": "../../etc/passwd"}},
            "model.start '../../etc/passwd' is not a valid digest of the initial state of a forked run",
        ),
        ({"data": {"source": "/etc/passwd"}}, "data.source '/etc/passwd' must be 'stdlib'"),
        ({"data": {"source": "../x"}}, "a spec cannot contain a path"),
        ({"codec": {"weights": "zip"}}, "codec.weights must be "),
        ({"version": 2}, "version must be "),
        ({"name": "a b"}, "name 'a b' is not a valid name of the run: letters, digits"),
    ],
)
def test_wrong_values_are_refused_by_their_dotted_name(values: dict[str, object], message: str) -> None:
    text = refuse(**{"train": {"clip_norm": -1}, **values})
    assert message in text
    assert "train.clip_norm must be " in text or "train" in values, "all wrong fields are told at once"
    assert text.startswith("run.toml: ")


def test_the_digest_is_of_the_meaning_and_does_not_change_by_accident(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "mine"\n[outer]\nbeta = 1.0\nalpha = 0\n[codec]\nweights = "modulo"\n')
    assert TrainerSpec.load(path).digest() == SPEC.digest()
    for dotted, value in (("outer.alpha", 0.4), ("model.seed", 1), ("pipeline.microbatch", 8), ("name", "other")):
        assert SPEC.with_changes({dotted: value}).digest() != SPEC.digest()
    # The digest identifies live runs, so after a release a new field needs a new version of the spec format.
    assert SPEC.digest() == "fe8cf84ca9419607088da24c6dddbb4d1f72224656f32f42c7293ec48d76005f"


def test_a_spec_from_the_network_must_be_the_one_that_was_asked_for() -> None:
    data = SPEC.canonical_json()
    assert TrainerSpec.from_json(data, expected_digest=SPEC.digest(), origin="peer") == SPEC
    with pytest.raises(SpecError, match=r"but the digest in the ticket is 0000000000000000\.\."):
        TrainerSpec.from_json(data, expected_digest="0" * 64, origin="peer")
    with pytest.raises(SpecError, match="not JSON"):
        TrainerSpec.from_json(b"\xff", expected_digest=blake3(b"\xff").hexdigest(), origin="peer")
    with pytest.raises(SpecError, match="not in the canonical form"):
        TrainerSpec.from_json(data + b" ", expected_digest=blake3(data + b" ").hexdigest(), origin="peer")
    with pytest.raises(SpecError, match="exceeds the limit"):
        TrainerSpec.from_json(b" " * (MAX_SPEC_BYTES + 1), expected_digest=SPEC.digest(), origin="peer")


def test_changes_name_only_fields_that_exist() -> None:
    assert SPEC.with_changes({"outer.alpha": 0.25}).outer.alpha == 0.25
    for dotted in ("outer.alfa", "outter.alpha", "name.x", "outer"):
        with pytest.raises(SpecError):
            SPEC.with_changes({dotted: 1})


def test_what_has_no_effect_is_warned_of() -> None:
    assert OuterSpec(alpha=0.3, inner_steps=9).warnings() == OuterSpec(wait=True, max_wait_s=9.0).warnings() == []
    assert "outer.alpha 0.6 is above 0.5" in OuterSpec(alpha=0.6).warnings()[0]
    assert "outer.inner_steps is ignored" in OuterSpec(inner_steps=9).warnings()[0]
    assert "outer.max_wait_s is ignored" in OuterSpec(alpha=0.3, max_wait_s=9.0).warnings()[0]


@pytest.mark.parametrize(
    ("field", "name", "last"),
    [
        ("codec.weights", "int4", "modulo"),
        ("codec.weights", "modulo8", "modulo"),
        ("pipeline.activations", "int4", "int8"),
        ("pipeline.gradients", "int4", "int8"),
    ],
)
def test_a_codec_that_does_not_exist_is_refused_with_those_that_do(field: str, name: str, last: str) -> None:
    with pytest.raises(SpecError, match=f"{field} must be 'fp32', 'bf16'.* or '{last}'; it is '{name}'"):
        SPEC.with_changes({field: name})


@pytest.mark.parametrize(
    ("outer", "has_outer_step", "sends_slow_weights", "keeps_momentum", "sends_momentum"),
    [
        ({}, False, False, False, False),
        ({"alpha": 0.3}, True, False, True, False),
        ({"beta": 0.7}, True, False, False, False),
        ({"wait": True, "gamma": 0.9}, True, True, False, False),
        ({"wait": True, "alpha": 0.5, "swap_momentum": True}, True, False, True, True),
        ({"wait": True, "alpha": 0.5}, True, False, True, False),
        ({"wait": True, "swap_momentum": True}, True, False, False, False),
    ],
)
def test_what_a_rule_keeps_and_sends(
    outer: dict[str, Any], has_outer_step: bool, sends_slow_weights: bool, keeps_momentum: bool, sends_momentum: bool
) -> None:
    rule = OuterSpec(**outer)
    assert (rule.has_outer_step, rule.sends_slow_weights) == (has_outer_step, sends_slow_weights)
    assert (rule.keeps_momentum, rule.sends_momentum) == (keeps_momentum, sends_momentum)


def test_the_spec_of_a_script_names_no_model() -> None:
    spec = RunSpec(name="mine", total_steps=100)
    assert set(json.loads(spec.canonical_json())) == {"version", "name", "run_key", "outer", "codec", "total_steps"}
    assert spec.schedule_steps == 100
    again = Spec.from_json(spec.canonical_json(), expected_digest=spec.digest(), origin="a peer")
    assert again == spec
    assert isinstance(again, RunSpec)


def test_a_spec_file_is_read_as_what_it_is(tmp_path: Path) -> None:
    script, trainer = tmp_path / "script.toml", tmp_path / "trainer.toml"
    script.write_text('name = "mine"\ntotal_steps = 100\n')
    trainer.write_text('name = "mine"\n[train]\ntotal_steps = 100\nwarmup_steps = 1\n')
    assert isinstance(Spec.load(script), RunSpec)
    assert isinstance(Spec.load(trainer), TrainerSpec)
    assert Spec.load(script).schedule_steps == Spec.load(trainer).schedule_steps == 100
    with pytest.raises(SpecError, match="trained by a script"):
        TrainerSpec.load(script)
    with pytest.raises(SpecError, match="trained by `noloco join`"):
        RunSpec.load(trainer)
    with pytest.raises(SpecError, match="mine: this run is trained by a script"):
        TrainerSpec.of(Spec.load(script))
