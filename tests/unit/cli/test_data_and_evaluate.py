"""The commands `noloco data check`, `noloco evaluate` and `noloco export --adapters`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.small_chats import write_tokenizer

from noloco_p2p.cli.app import run
from noloco_p2p.data.stream import Corpus, validation_batches
from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.presets import render
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.merge import from_checkpoint
from noloco_p2p.trainer.model import build_model, build_tokenizer, samples_loss

SPEC = TrainerSpec.from_dict(
    {
        "name": "cli",
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "mlp_size": 48, "lora": {"rank": 2}},
        "data": {"source": "mine", "sequence_length": 32, "holdout": 0.2},
        "evaluate": {"num_sequences": 4},
    },
    origin="test",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(render(SPEC))
    lines = [json.dumps({"text": f"document {number} " * 5}) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return tmp_path


def write_checkpoint(folder: Path, *, amount: float, spec: TrainerSpec = SPEC) -> Path:
    parameters = FlatParameters(build_model(spec.model, sequence_length=32))
    weights = parameters.read(0, parameters.num_elements) + amount
    meta = {
        "spec": spec.model_dump(mode="json"),
        "outer": {"layout": parameters.layout(), "tensors": parameters.model_layout.as_json().decode()},
    }
    return Checkpoints(folder).save(1, files={"weights": {"weights": weights}}, meta=meta)


def test_data_check_shows_samples_speed_and_no_fault(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(folder / "run.toml"), "--data", f"mine={folder}/*.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "mine: 1 file, 200 documents in the 200 rows that were read" in out
    assert "document" in next(line for line in out.splitlines() if line.startswith("sample 1: "))
    assert "tokens/s" in out
    assert "held out: 4 sequences" in out
    assert "faults: none" in out


def test_data_check_names_what_is_wrong_and_says_so_in_its_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "b.jsonl").write_text('{"text": "a"}\n{"txt": 5}\n')
    flags = ["data", "check", str(folder / "run.toml"), "--data", f"mine={folder}/*.jsonl"]
    assert run([*flags, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["num_faults"], report["faults"][0]["line"]) == (1, 2)
    assert report["faults"][0]["file"] == f"{folder}/b.jsonl"
    assert "include neither 'text' nor" in report["faults"][0]["reason"]


CHATS = SPEC.with_changes({"data.format": "chat", "data.tokenizer": "own", "data.sequence_length": 64})


@pytest.fixture
def chats(folder: Path) -> list[str]:
    """Return the flags that bind chats and a tokenizer with a template."""
    write_tokenizer(folder / "own")
    (folder / "chats.toml").write_text(render(CHATS))
    turns = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!" * 3}] for n in range(200)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    return ["--data", f"mine={folder}/chats.jsonl", "--model", f"own={folder}/own"]


def test_data_check_shows_which_part_of_a_chat_counts(
    folder: Path, chats: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 100}]}
    with (folder / "chats.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    assert run(["data", "check", str(folder / "chats.toml"), *chats]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("a chat; the loss counts only what follows +:")
    asked, said = lines[at + 1 : at + 3]
    assert asked.startswith("  - '<|im_start|>user\\n")
    assert asked.endswith("<|im_end|>\\n<|im_start|>assistant\\n'")
    assert said.startswith("  + '")
    assert "!<|im_end|>" in said or "bbb" in said
    assert lines[at + 3].startswith("the loss counts ")
    assert lines[at + 4] == "chats longer than data.sequence_length, which are truncated: 1"
    assert run(["data", "check", str(folder / "chats.toml"), *chats, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [counts for counts, _ in report["marked"]] == [False, True]
    assert (report["num_truncated"], report["samples"]) == (1, [])


def test_evaluate_measures_the_assistant_tokens_of_chats(
    folder: Path, chats: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_checkpoint(folder / "one", amount=0.02, spec=CHATS)
    assert run(["evaluate", str(path), *chats, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    tokenizer = build_tokenizer(CHATS.data, folders={"own": str(folder / "own")})
    corpus = Corpus(CHATS.data, tokenizer, {"mine": str(folder / "chats.jsonl")})
    held_out = torch.cat(validation_batches(corpus, num_sequences=4, batch_size=4))
    expected = float(samples_loss(from_checkpoint(path).fill_model().eval(), held_out).detach())
    assert report["merged"]["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_evaluate_tells_each_peer_and_the_merged_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write_checkpoint(folder / name, amount=amount) for name, amount in (("one", 0.02), ("two", -0.01))]
    flags = ["--data", f"mine={folder}/*.jsonl", "--json"]
    assert run(["evaluate", *map(str, paths), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [peer["checkpoint"] for peer in report["peers"]] == [str(path) for path in paths]
    assert report["num_sequences"] == 4
    assert report["spread"] > 0
    assert report["merged"]["perplexity"] == pytest.approx(2.718281828 ** report["merged"]["validation_loss"])
    assert run(["evaluate", str(paths[0]), *flags]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["merged"]["validation_loss"] == alone["peers"][0]["validation_loss"]
    assert alone["peers"][0]["validation_loss"] == report["peers"][0]["validation_loss"]


def test_checkpoints_of_two_runs_and_of_another_model_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_checkpoint(folder / "one", amount=0)
    two = write_checkpoint(folder / "two", amount=0, spec=SPEC.with_changes({"train.learning_rate": 0.5}))
    assert run(["evaluate", str(one), str(two), "--data", f"mine={folder}/*.jsonl"]) == 1
    assert "but the first folder belongs to" in capsys.readouterr().err
    meta = json.loads((one / "meta.json").read_text())
    meta["spec"]["model"]["lora"]["rank"] = 3
    (one / "meta.json").write_text(json.dumps(meta))
    assert run(["evaluate", str(one), "--data", f"mine={folder}/*.jsonl"]) == 1
    err = capsys.readouterr().err
    assert "belongs to another model: the trainable tensors differ" in err
    assert "lora_A.default.weight [3, 32], the other has" in err


def test_export_writes_the_whole_model_or_the_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(folder / "one", amount=0.01)
    assert run(["export", str(path), str(folder / "whole")]) == 0
    assert run(["export", str(path), str(folder / "adapters"), "--adapters"]) == 0
    assert (folder / "adapters" / "adapter_config.json").is_file()
    whole = (folder / "whole" / "model.safetensors").stat().st_size
    assert whole > 4 * sum(
        p.numel() for p in build_model(SPEC.model, sequence_length=32).parameters() if not p.requires_grad
    )
    plain = SPEC.with_changes({"model.lora.rank": 0})
    assert (
        run(["export", str(write_checkpoint(folder / "two", amount=0, spec=plain)), str(folder / "no"), "--adapters"])
        == 3
    )
    assert "trains all weights" in capsys.readouterr().err
