"""`noloco simulate` from its arguments to table, JSON and picture; and its complaints, before anything trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noloco_p2p.cli.app import run
from noloco_p2p.presets import render
from noloco_p2p.spec import DataSpec, EvaluateSpec, ModelSpec, OuterSpec, RunSpec

SPEC = RunSpec(
    name="command",
    model=ModelSpec(hidden_size=32, num_layers=1, num_heads=2, mlp_size=48),
    data=DataSpec(sequence_length=32),
    outer=OuterSpec(inner_steps=2),
    evaluate=EvaluateSpec(num_sequences=4),
)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(render(SPEC), encoding="utf-8")
    return path


def test_rules_side_by_side(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, pictures = tmp_path / "report.json", tmp_path / "pictures"
    arguments = ["--replicas", "2", "--steps", "4", "--rules", "noloco,ddp", "--link", "cable"]
    assert run(["simulate", str(spec), *arguments, "--json", str(report), "--plot", str(pictures)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["rule", "noloco", "ddp"]
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["spec"]["train"]["total_steps"] == 4
    noloco, ddp = written["results"]
    assert noloco["swapped"] + noloco["half"] + noloco["alone"] == 4
    assert ddp["sent_per_parameter_step"] == 4  # 2 (N - 1) / N of fp32
    assert ddp["virtual_s"] > 4
    assert (pictures / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rules", "fsdp"], "--rules fsdp: must be one of"),
        (["--link", "modem"], "--link modem: must be one of"),
        (["--speeds", "0"], "--speeds 0: must be numbers above 0"),
        (["--churn", "crash:9@1"], "--churn crash:9@1: replicas are 0 to 7"),
        (["--rules", "ddp", "--churn", "leave:1@1"], "replicas of ddp cannot join"),
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
