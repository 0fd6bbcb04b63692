"""`noloco simulate` from its arguments to table, JSON and picture; it reports mistakes before anything trains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from noloco_p2p.cli.app import run
from noloco_p2p.presets import render
from noloco_p2p.simulate.run import RULE_NAMES
from noloco_p2p.spec import DataSpec, EvaluateSpec, ModelSpec, TrainerSpec

SPEC = TrainerSpec(
    name="command",
    model=ModelSpec(hidden_size=32, num_layers=2, num_heads=2, mlp_size=48),
    data=DataSpec(sequence_length=32),
    evaluate=EvaluateSpec(num_sequences=4),
)
STAGES = ["--stages", "2"]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(render(SPEC), encoding="utf-8")
    return path


def test_help_and_docs_name_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    run(["simulate", "--help"])
    told = capsys.readouterr().out, (ROOT / "docs" / "researchers.md").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{rule}\b", text) for rule in RULE_NAMES for text in told)


def test_rules_side_by_side(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, pictures = tmp_path / "report.json", tmp_path / "pictures"
    arguments = ["--replicas", "2", "--steps", "4", "--rules", "noloco,ddp", "--link", "cable"]
    assert run(["simulate", str(spec), *arguments, "--json", str(report), "--plot", str(pictures)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["rule", "noloco", "ddp"]
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["spec"]["train"]["total_steps"] == 4
    noloco, ddp = written["results"]
    assert noloco["swaps"]["committed"] > 4
    assert ddp["sent_per_parameter_step"] == 2  # 2 (N - 1) / N of bf16
    assert ddp["virtual_s"] > 4
    assert (pictures / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rules", "fsdp"], "--rules fsdp: no such rule; choose from"),
        (["--link", "modem"], "--link modem is unknown"),
        (["--speeds", "0"], "--speeds 0 is invalid: give comma-separated numbers above 0"),
        (["--churn", "crash:9@1"], "--churn crash:9@1: no such replica (they are numbered 0 to 7)"),
        (["--rules", "ddp", "--churn", "leave:1@1"], "with the rule ddp, replicas cannot join"),
        (["--churn", "crash:1.2@1"], "--churn crash:1.2@1 must name only a replica"),
        (["--replicas", "4,8"], "--replicas 4,8 has 2 numbers, but the number of stages is 1"),
        (["--window", "2"], "--window requires --stages"),
        ([*STAGES, "--replicas", "4,8,4"], "--replicas 4,8,4 has 3 numbers, but the number of stages is 2"),
        ([*STAGES, "--rules", "ddp"], "--rules ddp cannot be used with stages; choose from noloco, local"),
        ([*STAGES, "--churn", "crash:1@1"], "--churn crash:1@1 must name a stage and a replica"),
        ([*STAGES, "--churn", "crash:2.1@1"], "--churn crash:2.1@1: no such stage (they are numbered 0 to 1)"),
        ([*STAGES, "--link", "cable/cable/cable"], "has lists for 3 stages, but there are only 2"),
        ([*STAGES, "--set", "pipeline.microbatch=3"], "must be a multiple of pipeline.microbatch"),
        (["--stages", "4"], "pipeline.stages is 4, but the model has only 2 blocks"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    spec: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(spec), *arguments]) == 3
    captured = capsys.readouterr()
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_a_pipeline(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    arguments = ["--stages", "2", "--replicas", "2,1", "--steps", "2", "--link", "cable/100mbit-50ms"]
    assert run(["simulate", str(spec), *arguments, "--speeds", "1,2/4", "--json", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("loss ")
    assert [line.split()[:2] for line in lines[4:]] == [["stage", "replicas"], ["0", "2"], ["1", "1"]]
    (result,) = json.loads(report.read_text(encoding="utf-8"))["results"]
    assert result["tokens"] >= 2 * 2 * 16 * 32
    assert [stage["num_replicas"] for stage in result["stages"]] == [2, 1]
