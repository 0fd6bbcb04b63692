"""Data sets from a hub and pushes to it, with the real commands and libraries, over HTTP on loopback."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from harness.processes import noloco, small_spec, write_spec
from harness.small_hub import TOKEN, SmallHub

from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.weights import Weights
from noloco_p2p.spec import DataSpec, TrainerSpec
from noloco_p2p.trainer.model import build_model

pytestmark = pytest.mark.slow
NUM_SHARDS = 4
ROWS = 50


def lines(shard: int) -> bytes:
    rows = [json.dumps({"text": f"shard {shard} row {row} " + "of a text " * 20}) for row in range(ROWS)]
    return gzip.compress("\n".join(rows).encode())


def texts() -> dict[str, bytes]:
    files = {f"data/train-{shard:05}.jsonl.gz": lines(shard) for shard in range(NUM_SHARDS)}
    return {**files, "data/validation-00000.jsonl.gz": lines(99)}


def hub_spec(folder: Path, name: str) -> Path:
    spec = small_spec("hub", evaluate__num_sequences=4)
    data = DataSpec(source=f"hub:{name}", sequence_length=64)
    return write_spec(spec.model_copy(update={"data": data}), folder)


def a_checkpoint(folder: Path) -> tuple[Path, TrainerSpec]:
    spec = small_spec("pushed")
    model = build_model(spec.model, sequence_length=spec.data.sequence_length)
    weights = Weights(FlatParameters(model), spec.outer)
    layout = weights.parameters.model_layout
    meta = {
        "spec": spec.model_dump(mode="json"),
        "outer": {"layout": layout.digest(), "tensors": layout.as_json().decode()},
    }
    return Checkpoints(folder).save(1, files={"weights": weights.tensors()}, meta=meta), spec


def test_an_export_is_pushed_to_a_private_repository_and_read_back_from_it(tmp_path: Path) -> None:
    checkpoint, _ = a_checkpoint(tmp_path / "run")
    with SmallHub() as hub:
        environment = hub.environment(tmp_path / "home")
        done = noloco(
            *("export", checkpoint, tmp_path / "model", "--push-to-hub", "lab/model"), **environment, HF_TOKEN=TOKEN
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"pushed to {environment['HF_ENDPOINT']}/lab/model"
        assert hub.private == ["lab/model"]
        assert hub.files["lab/model"] == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
        assert {"config.json", "model.safetensors"} <= hub.files["lab/model"].keys()
        again = noloco(
            *("export", checkpoint, tmp_path / "again", "--push-to-hub", "lab/model"), **environment, HF_TOKEN=TOKEN
        )
        assert again.returncode == 0, again.stderr


def test_a_hub_that_takes_nothing_is_found_out_before_the_work(tmp_path: Path) -> None:
    checkpoint, _ = a_checkpoint(tmp_path / "run")
    with SmallHub() as hub:
        done = noloco(
            *("export", checkpoint, tmp_path / "model", "--push-to-hub", "lab/model"),
            **hub.environment(tmp_path / "home"),
            HF_TOKEN="hf_of_somebody_else",
        )
    assert done.returncode == 1
    assert done.stderr.startswith("noloco: --push-to-hub lab/model: ")
    assert "HF_TOKEN" in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_peer_that_leaves_pushes_its_last_checkpoint(tmp_path: Path) -> None:
    spec = write_spec(small_spec("pushed", evaluate__num_sequences=4), tmp_path)
    with SmallHub() as hub:
        done = noloco(
            *("join", spec, "--max-steps", "3", "--push-to-hub", "lab/checkpoint"),
            *("--listen", "127.0.0.1:0", "--state-dir", tmp_path / "state"),
            **hub.environment(tmp_path / "home"),
            HF_TOKEN=TOKEN,
        )
    assert done.returncode == 0, done.stderr
    newest = Checkpoints(next(tmp_path.glob("state/runs/*/checkpoints"))).newest()
    assert newest is not None
    assert hub.files["lab/checkpoint"] == {path.name: path.read_bytes() for path in newest.path.iterdir()}


def test_shards_are_streamed_also_one_that_is_busy_at_first(tmp_path: Path) -> None:
    with SmallHub({"lab/texts": texts()}, failures={"data/train-00001.jsonl.gz": 2}) as hub:
        spec = hub_spec(tmp_path, "lab/texts")
        done = noloco("data", "check", spec, "--json", "--full", **hub.environment(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (source,) = report["sources"]
    assert (source["num_files"], source["num_documents"]) == (NUM_SHARDS, NUM_SHARDS * ROWS)
    assert report["num_held_out"] == 4
    assert hub.failures["data/train-00001.jsonl.gz"] == 0
    kept = [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert not kept, "nothing is copied into a cache"


def test_a_data_set_that_is_not_there_is_told_in_words(tmp_path: Path) -> None:
    with SmallHub({"lab/texts": texts()}) as hub:
        spec = hub_spec(tmp_path, "lab/nothing")
        done = noloco("data", "check", spec, **hub.environment(tmp_path / "home"))
    assert done.returncode == 1
    assert "hub data set 'lab/nothing'" in done.stderr
    assert "Traceback" not in done.stderr
