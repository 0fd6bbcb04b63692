"""Data sets from a hub and pushes to it, with the real commands and libraries, over HTTP on loopback."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
from harness.processes import noloco, small_spec, write_spec
from harness.small_hub import TOKEN, SmallHub

from noloco_p2p.outer.checkpoint import Checkpoints
from noloco_p2p.spec import DataSpec

pytestmark = pytest.mark.slow
NUM_SHARDS = 4
ROWS = 50


def lines(shard: int) -> bytes:
    rows = [json.dumps({"text": f"shard {shard} row {row} " + "of a text " * 20}) for row in range(ROWS)]
    return gzip.compress("\n".join(rows).encode())


def texts() -> dict[str, bytes]:
    files = {f"data/train-{shard:05}.jsonl.gz": lines(shard) for shard in range(NUM_SHARDS)}
    return {**files, "data/validation-00000.jsonl.gz": lines(99)}


def test_checkpoints_and_exports_are_pushed_to_a_private_repository(tmp_path: Path) -> None:
    spec = write_spec(small_spec("pushed", evaluate__num_sequences=4), tmp_path)
    with SmallHub() as hub:
        environment = {**hub.environment(tmp_path / "home"), "HF_TOKEN": TOKEN}
        flags = ("--max-steps", "3", "--push-to-hub", "lab/model", "--listen", "127.0.0.1:0")
        left = noloco("join", spec, *flags, "--state-dir", tmp_path / "state", **environment)
        assert left.returncode == 0, left.stderr
        [run] = tmp_path.glob("state/runs/*")
        newest = Checkpoints(run / "checkpoints").newest()
        assert newest is not None
        assert hub.private == ["lab/model"]
        assert hub.files["lab/model"] == contents(newest.path)

        # The repository exists now. Its files are replaced.
        export = ("export", run, tmp_path / "model", "--push-to-hub", "lab/model")
        done = noloco(*export, **environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"pushed to {environment['HF_ENDPOINT']}/lab/model"
        assert hub.files["lab/model"].items() >= contents(tmp_path / "model").items()
        assert {"config.json", "model.safetensors"} <= contents(tmp_path / "model").keys()

        # A hub that refuses is noticed before the work.
        shutil.rmtree(tmp_path / "model")
        refused = noloco(*export[:-1], "lab/other", **{**environment, "HF_TOKEN": "hf_of_somebody_else"})
        assert refused.returncode == 1
        assert refused.stderr.startswith("noloco: --push-to-hub lab/other: ")
        assert "HF_TOKEN" in refused.stderr
        assert not (tmp_path / "model").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_streamed_also_one_that_is_busy_at_first(tmp_path: Path) -> None:
    small = small_spec("hub", evaluate__num_sequences=4)
    data = DataSpec(source="hub:lab/texts", sequence_length=64)
    spec = write_spec(small.model_copy(update={"data": data}), tmp_path)
    with SmallHub({"lab/texts": texts()}, failures={"data/train-00001.jsonl.gz": 2}) as hub:
        environment = hub.environment(tmp_path / "home")
        done = noloco("data", "check", spec, "--json", "--full", **environment)
        missing = write_spec(small.with_changes({"data.source": "hub:lab/nothing"}, origin="test"), tmp_path)
        failed = noloco("data", "check", missing, **environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (source,) = report["sources"]
    assert (source["num_files"], source["num_documents"]) == (NUM_SHARDS, NUM_SHARDS * ROWS)
    assert report["num_held_out"] == 4
    assert hub.failures["data/train-00001.jsonl.gz"] == 0
    kept = [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert not kept, "nothing is copied into a cache"
    assert failed.returncode == 1
    assert "hub data set 'lab/nothing'" in failed.stderr
    assert "Traceback" not in failed.stderr
