"""`noloco init --stages` writes the cut and prints what a peer of each stage needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen3Config

from noloco_p2p.cli.app import run
from noloco_p2p.spec import TrainerSpec

TINY = """\
wrote run.toml: 991,840 parameters (tied embeddings, vocabulary 384); start the run with: noloco join run.toml --stage 0
tokens: each head reads 61.4M in its schedule, 62 per parameter; 1 head reaches 20, the usual number for training from \
scratch
stage     blocks  parameters   memory
0 (head)       0        372k  4.5 MiB
1              1        310k  3.5 MiB
2              2        310k  3.5 MiB
the memory includes weights, gradients and moments, but not activations and swaps
for each token, a stage sends 164 bytes (int8) to the next stage and 164 bytes (int8) to the previous one
link, each way  tokens/s    smallest batch
20 Mbit/s          7,622     79,315 tokens
100 Mbit/s        38,110    371,998 tokens
1,000 Mbit/s     381,098  3,664,681 tokens
with the smallest batch (per replica and step), a link is busy 54 to 72 % of the time; the batch of this spec has \
1,024 tokens
use links with at least 1 Gbit/s and a delay of at most 5 ms; at 100 Mbit/s, stages were slower, and swaps were not \
measured to scale (docs/results.md)
a head needs the data ('stdlib') and enough memory for stage 0; every other peer can hold stage 1 or higher. Training \
begins when each of the 3 stages has a peer. One machine can run all stages, each in a process with its own --state-dir
"""


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def test_the_cut_is_in_the_spec_and_the_needs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "run.toml", "--stages", "3"]) == 0
    spec = TrainerSpec.load("run.toml")
    assert (spec.pipeline.stages, spec.pipeline.cut, spec.model.parameter_seeds) == (3, (1, 1, 1), True)
    assert capsys.readouterr().out == TINY
    assert run(["join", "run.toml", "--gpus", "2"]) == 3
    assert capsys.readouterr().err.strip().endswith("--gpus is not yet supported in a run with stages")


def test_what_fits_which_gpu_is_said_of_a_model_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Qwen3Config(hidden_size=64, num_hidden_layers=2).save_pretrained(tmp_path / "qwen")
    assert run(["init", "run.toml", "--pretrained", "mine", "--model", "mine=qwen"]) == 0
    _, tokens, first, *ways, last = capsys.readouterr().out.splitlines()
    assert tokens.startswith("tokens: each peer reads ")
    assert first.startswith("GPUs of 8, 12, 16 and 24 GB that hold a sequence of ")
    assert [way.split(":")[0].split()[-1] for way in ways] == ["weights", "fp32", "bf16", "nf4"]
    assert last == "to see what it costs a peer, run: noloco doctor run.toml"
    assert run(["init", "other.toml", "--pretrained", "owner/name"]) == 0, "the hub is not asked"
    assert "GPUs" not in capsys.readouterr().out


def test_a_model_by_name_is_cut_from_its_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Qwen3Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    ).save_pretrained(tmp_path / "qwen")  # fmt: skip
    assert run(["init", "run.toml", "--stages", "2", "--pretrained", "mine", "--model", "mine=qwen"]) == 0
    spec = TrainerSpec.load("run.toml")
    assert (spec.model.pretrained, spec.data.tokenizer) == ("mine", "mine")
    assert spec.pipeline.cut == (2, 4)
    out = capsys.readouterr().out
    assert "wrote run.toml: the model 'mine'; start the run with: noloco join run.toml --stage 0\n" in out
    assert "0 (head)     0-1" in out
    assert "1            2-5" in out


def test_too_many_stages_are_refused_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "run.toml", "--stages", "4"]) == 3
    assert "pipeline.stages is 4, but the model has only 3 blocks" in capsys.readouterr().err
    assert not Path("run.toml").exists()
