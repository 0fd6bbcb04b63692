"""A checkpoint is whole or absent, whatever happens to the disk or to the writer."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.patience import PATIENCE_S
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.outer.checkpoint import DTYPES, Checkpoint, Checkpoints, Vector

NUM_KILLS = 20

# One process imports torch once and forks writers, each of which is killed at another moment of a save. All tensors of
# checkpoint n hold n, so that a mixture of two checkpoints would show.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints, Vector
folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
moments = random.Random(7)

def write_for_ever(done):
    checkpoints = Checkpoints(folder)
    newest = checkpoints.newest()
    number = newest.step + 1 if newest else 0
    while True:
        files = {stem: {"x": torch.full((50_000,), float(number))} for stem in ("outer", "optimizer")}
        checkpoints.save(number, files=files, meta={"number": number})
        os.write(done, number.to_bytes(8, "little"))
        number += 1

partial = 0
for _ in range(num_kills):
    read, write = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            write_for_ever(write)
        finally:
            os._exit(1)
    os.close(write)
    done = [int.from_bytes(os.read(read, 8), "little")]
    time.sleep(moments.uniform(0, 0.03))
    os.kill(writer, signal.SIGKILL)
    assert os.waitpid(writer, 0)[1] == signal.SIGKILL, "the writer failed by itself"
    while word := os.read(read, 8):
        done.append(int.from_bytes(word, "little"))
    os.close(read)
    partial += any(folder.glob(".partial-*"))
    for path in folder.glob("0*"):
        Checkpoint(path).verify()
    newest = Checkpoints(folder).newest()
    assert newest.step >= done[-1], (newest.step, done)
    for stem in ("outer", "optimizer"):
        assert newest.load(stem)["x"].unique().tolist() == [newest.meta["number"]]
    assert not any(folder.glob(".partial-*"))
print(partial, newest.step)
"""


def tensors(value: float = 1.0, size: int = 1000) -> dict[str, dict[str, Tensor]]:
    return {"outer": {"slow_weights": torch.full((size,), value), "outer_momentum": torch.zeros(size)}}


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    files = {
        "outer": {"slow_weights": torch.randn(7), "outer_momentum": torch.randn(7)},
        "model": {"a.b": torch.randn(3, 4).bfloat16(), "scalar": torch.tensor(3.0), "none": torch.zeros(0)},
    }
    path = checkpoints.save(41, files=files, meta={"progress": 0.25, "ports": [1, 2]})
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.path, newest.step, newest.meta) == (path, 41, {"progress": 0.25, "ports": [1, 2]})
    assert newest.file("outer") == path / "outer.safetensors"
    for stem, saved in files.items():
        loaded = newest.load(stem)
        assert loaded.keys() == saved.keys()
        assert all(
            torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in saved.items()
        )


def test_an_empty_or_missing_folder_has_no_newest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).newest() is None
    assert Checkpoints(tmp_path / "missing").newest() is None
    assert not (tmp_path / "missing").exists()


def test_the_last_ones_are_kept_even_when_steps_repeat_or_go_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for round_number in (10, 20, 20, 5):
        checkpoints.save(round_number, files=tensors(round_number), meta={})
    assert folders(tmp_path) == ["00000002-step-20", "00000003-step-5"]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.load("outer")["slow_weights"][0] == 5


def test_loaded_tensors_outlive_the_checkpoint_and_do_not_write_to_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(0, files=tensors(3.0), meta={})
    loaded = Checkpoint(path).load("outer")
    loaded["slow_weights"].add_(1)
    Checkpoint(path).verify()
    checkpoints.save(1, files=tensors(), meta={})
    assert not path.exists()
    assert loaded["slow_weights"].sum() == 4000


def test_the_header_depends_on_names_and_shapes_only(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    headers = []
    for value in (1.0, 2.0):
        path = Checkpoint(checkpoints.save(int(value), files=tensors(value), meta={"v": value})).file("outer")
        content = path.read_bytes()
        headers.append(content[: 8 + int.from_bytes(content[:8], "little")])
    assert headers[0] == headers[1]
    assert "__metadata__" not in json.loads(headers[0][8:])


def test_disjoint_views_of_one_vector_may_be_saved(tmp_path: Path) -> None:
    vector = torch.arange(10.0)
    path = Checkpoints(tmp_path).save(0, files={"x": {"a": vector[:4], "b": vector[4:]}}, meta={})
    assert Checkpoint(path).load("x")["b"].tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "saved",
    [
        {"a": torch.arange(16.0).view(4, 4).T[1:]},
        {"a": torch.arange(4.0).expand(3, 4)},
        {"a": (shared := torch.arange(10.0)), "b": shared},
        {"b": shared[:6], "a": shared[5:]},
        {"a": torch.tensor([1 + 2j, 3 - 1j]).conj(), "b": torch.tensor([1 + 2j]).conj().imag},
    ],
    ids=["transposed", "expanded", "the same", "overlapping", "conjugated and negated"],
)
def test_buffers_of_any_layout_may_be_saved(tmp_path: Path, saved: dict[str, Tensor]) -> None:
    loaded = Checkpoint(Checkpoints(tmp_path).save(0, files={"x": saved}, meta={})).load("x")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], values) for name, values in saved.items())


@pytest.mark.parametrize("name", ["outer.safetensors", "meta.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    good = checkpoints.save(1, files=tensors(), meta={"a": 1})
    bad = checkpoints.save(2, files=tensors(), meta={"a": 1})
    content = bytearray((bad / name).read_bytes())
    if damage == "gone":
        (bad / name).unlink()
    elif damage == "cut":
        (bad / name).write_bytes(content[:-2])
    else:
        content[len(content) // 2] ^= 16
        (bad / name).write_bytes(content)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.path == good
    assert caplog.records[-1].levelno == logging.WARNING
    assert bad.name in caplog.text


def newer(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))


def unreadable(path: Path) -> None:
    """Cause an error of the system, which root can get, too."""
    (path / "meta.json").unlink()
    (path / "meta.json").mkdir()


@pytest.mark.parametrize(
    ("change", "message"), [(newer, "a newer version of noloco_p2p"), (unreadable, "cannot be read: Is a directory")]
)
def test_what_cannot_be_read_stops_the_start_and_stays(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, files=tensors(), meta={})
    change(checkpoints.save(2, files=tensors(), meta={}))
    before = folders(tmp_path)
    again = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=f"00000001-step-2.* {message}"):
        again.newest()
    for step in (3, 4):
        again.save(step, files=tensors(), meta={})
    assert folders(tmp_path) == [before[1], "00000003-step-4"]  # the good one was verified before it was deleted


def test_if_all_are_damaged_nothing_starts_anew(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, files=tensors(), meta={})
    (path / "manifest.json").write_bytes(b"")  # as after a power failure
    with pytest.raises(CheckpointError, match=r"only damaged checkpoints .*move the folder away"):
        Checkpoints(tmp_path).newest()


def test_values_that_json_changes_come_back(tmp_path: Path) -> None:
    meta = {
        "milestones": Counter({30: 1, 80: 2}),
        "tuples": [(1, 2.5), ()],
        "keys": {0: "a", (1, None): True},
        "marked": {"~tuple": [1]},
        "best": math.inf,
        "rate": torch.tensor(0.1),
        "nested": {"a": {"b": [{"c": -0.0}]}},
    }
    loaded = Checkpoint(Checkpoints(tmp_path).save(0, files={}, meta=meta)).meta
    assert loaded == meta
    assert isinstance(loaded["milestones"], Counter)
    assert isinstance(loaded["tuples"][0], tuple)


@pytest.mark.parametrize(
    ("meta", "place"),
    [
        ({"loss": torch.ones(2)}, r"meta\['loss'\] is a torch.Tensor"),
        ({"history": [1.0, {"x": {1}}]}, r"meta\['history'\]\[1\]\['x'\] is a set"),
    ],
)
def test_other_values_are_refused_by_their_place(tmp_path: Path, meta: dict[str, Any], place: str) -> None:
    with pytest.raises(SettingsError, match=place):
        Checkpoints(tmp_path).save(0, files={}, meta=meta)
    assert not tmp_path.exists() or folders(tmp_path) == []


def test_a_folder_that_is_no_checkpoint_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a checkpoint: it does not contain manifest\.json"):
        Checkpoint(tmp_path)
    path = Checkpoints(tmp_path).save(0, files=tensors(), meta={})
    with pytest.raises(
        CheckpointError, match=r"does not contain model\.safetensors; it contains meta\.json, outer\.safetensors"
    ):
        Checkpoint(path).load("model")


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Make writes beyond the limit fail, as on a full disk (but with EFBIG instead of ENOSPC)."""
    _, hard = soft_and_hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    good = checkpoints.save(1, files=tensors(), meta={})
    with (
        file_size_limit(100_000),
        pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 2 .*free up disk space"),
    ):
        checkpoints.save(2, files=tensors(size=100_000), meta={})
    assert folders(tmp_path) == [good.name]
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 1
    checkpoints.save(2, files=tensors(), meta={})
    assert folders(tmp_path) == ["00000001-step-2"]


def test_a_full_disk_while_writing_the_small_files_is_the_same(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with file_size_limit(1000), pytest.raises(CheckpointError, match="cannot write"):
        checkpoints.save(0, files={}, meta={"long": "x" * 5000})
    assert folders(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*file"):
        Checkpoints(tmp_path / "file").save(0, files={}, meta={})


def test_leftovers_are_removed_unless_their_writer_lives(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    leftover = tmp_path / ".partial-old"
    leftover.mkdir()
    (leftover / "meta.json").touch()
    with checkpoints._lock():
        Checkpoints(tmp_path)
        assert leftover.exists()
        with pytest.raises(CheckpointError, match="another process is writing"):
            Checkpoints(tmp_path).save(0, files={}, meta={})
    Checkpoints(tmp_path)
    assert not leftover.exists()


class ForgetfulDisk:
    """A disk that loses unsynced data in two power failures: at the rename, and after the save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes: dict[int, int] = {}  # inode of a file -> bytes on the disk
        self._names: dict[int, set[str]] = {}  # inode of a folder -> names on the disk
        self._sync, self._rename = os.fsync, Path.rename
        monkeypatch.setattr(os, "fsync", self._synced)
        monkeypatch.setattr(Path, "rename", lambda path, target: self._renamed(path, target))

    def lose_names(self, folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in self._names.get(folder.stat().st_ino, set()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _synced(self, descriptor: int) -> None:
        self._sync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if path.is_dir():
            self._names[path.stat().st_ino] = set(os.listdir(path))
        else:
            self._bytes[path.stat().st_ino] = path.stat().st_size

    def _renamed(self, path: Path, target: Path) -> Path:
        for file in path.iterdir():
            os.truncate(file, self._bytes.get(file.stat().st_ino, 0))
        self.lose_names(path)
        return self._rename(path, target)


def test_a_checkpoint_that_was_saved_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ForgetfulDisk(monkeypatch)
    path = Checkpoints(tmp_path).save(3, files=tensors(7.0), meta={"a": 1})
    disk.lose_names(tmp_path)
    newest = Checkpoints(tmp_path).newest()
    assert newest is not None
    assert (newest.path, newest.meta) == (path, {"a": 1})
    assert newest.load("outer")["slow_weights"][0] == 7


def test_a_writer_killed_at_any_moment_leaves_only_readable_checkpoints(tmp_path: Path) -> None:
    """A checkpoint whose save has returned is among them."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), str(NUM_KILLS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    num_partial, newest_round = map(int, done.stdout.split())
    assert num_partial > 0, "no kill struck in the middle of a write: the test shows nothing"
    assert newest_round >= NUM_KILLS - 1


MEMORY = """
import resource, sys
from pathlib import Path
import torch
from noloco_p2p.outer.checkpoint import Checkpoints, Vector
one = torch.ones(25_000_000)  # 100 MB
files = {"weights": {"weights": Vector(len(one), lambda start, stop: one[start:stop].clone())}, "optimizer": {"x": one}}
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(0, files={}, meta={})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = checkpoints.save(1, files=files, meta={})
assert checkpoints.newest().path == path
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems count in other units")
def test_a_checkpoint_takes_no_memory_for_a_copy_of_the_state(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000, "KiB, of a state of 200 MB"


def test_a_vector_that_is_no_tensor_is_written_in_parts(tmp_path: Path) -> None:
    values = torch.randn(3 * CHUNK_ELEMENTS + 5)
    vector = Vector(len(values), lambda start, stop: values[start:stop])
    path = Checkpoints(tmp_path).save(0, files={"weights": {"weights": vector, "momentum": values[:7]}}, meta={})
    loaded = Checkpoint(path).load("weights")
    assert torch.equal(loaded["weights"], values)
    assert torch.equal(loaded["momentum"], values[:7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_of_the_format_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(32, dtype=torch.uint8).remainder(2).view(dtype)
    path = Checkpoints(tmp_path).save(0, files={"x": {"a": values, "odd": torch.zeros(1, dtype=torch.uint8)}}, meta={})
    loaded = Checkpoint(path).load("x")["a"]
    assert loaded.dtype is dtype
    assert torch.equal(loaded.view(torch.uint8), values.view(torch.uint8))


def test_a_dtype_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"spectrum is torch\.complex128"):
        Checkpoints(tmp_path).save(0, files={"buffers": {"spectrum": torch.zeros(2, dtype=torch.complex128)}}, meta={})
    assert folders(tmp_path) == []
