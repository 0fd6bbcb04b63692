"""`noloco simulate` from its arguments to table, JSON and picture; it reports mistakes before anything trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noloco_p2p.cli.app import run
from noloco_p2p.presets import render
from noloco_p2p.simulate.plot import POINTS
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


def test_a_table_a_report_and_a_picture(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, pictures = tmp_path / "report.json", tmp_path / "pictures"
    arguments = ["--replicas", "2", "--steps", "24", "--link", "cable", "--json", str(report), "--plot", str(pictures)]
    assert run(["simulate", str(spec), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:-1]] == ["rule", "noloco"]
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["spec"]["train"]["total_steps"] == 24
    assert written["result"]["swaps"]["committed"] > 24
    curve = [point["step"] for point in written["result"]["curve"] if point["replica"] == 1]
    assert (len(curve), curve[0], curve[-1]) == (POINTS + 1, 0, 24)
    assert (pictures / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "modem"], "--link modem is unknown"),
        (["--speeds", "0"], "--speeds 0 is invalid: give comma-separated numbers above 0"),
        (["--churn", "crash:9@1"], "--churn crash:9@1: no such replica (they are numbered 0 to 7)"),
        (["--churn", "crash:1.2@1"], "--churn crash:1.2@1 must name only a replica"),
        (["--replicas", "4,8"], "--replicas 4,8 has 2 numbers, but the number of stages is 1"),
        (["--window", "2"], "--window requires --stages"),
        ([*STAGES, "--replicas", "4,8,4"], "--replicas 4,8,4 has 3 numbers, but the number of stages is 2"),
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
    assert lines[-6].startswith("loss ")
    assert [line.split()[:2] for line in lines[-3:]] == [["stage", "replicas"], ["0", "2"], ["1", "1"]]
    result = json.loads(report.read_text(encoding="utf-8"))["result"]
    assert result["tokens"] >= 2 * 2 * 16 * 32
    assert [stage["num_replicas"] for stage in result["stages"]] == [2, 1]
