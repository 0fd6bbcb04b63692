"""Data sets of the hub, over HTTP from a hub on loopback: real commands, the real `datasets` library."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from harness.processes import noloco, small_spec, write_spec
from harness.small_hub import SmallHub

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


def hub_spec(folder: Path, name: str) -> Path:
    spec = small_spec("hub", evaluate__num_sequences=4)
    data = DataSpec(source=f"hub:{name}", sequence_length=64)
    return write_spec(spec.model_copy(update={"data": data}), folder)


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
