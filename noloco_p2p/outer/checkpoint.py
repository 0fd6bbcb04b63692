"""Write checkpoints to disk, and verify and read them.

    FOLDER/00000007-step-41/           number of the checkpoint, and the inner step after which it was taken
        manifest.json                  size and blake3 digest of every other file; written last
        meta.json
        STEM.safetensors ...

A checkpoint is written to a `.partial-*` folder. Every file in it is synced, the folder is renamed, and its parent is
synced. A checkpoint is therefore either complete or absent, even after a crash. Nothing is pickled. What cannot be read
is not taken for damaged, and nothing is deleted unless it was verified.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from noloco_p2p.devices import free_memory
from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.plain_values import packed, unpacked

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
META = "meta.json"
VERSION = 1
_NAME = re.compile(r"^(\d{8,})-step-(\d+)$")
_OS_ERROR = re.compile(r"os error (\d+)")  # in a SafetensorError, which has no errno
_PARTIAL = ".partial-"
_LOCK = ".writer.lock"
USED_SHARE = 0.5  # share of free memory for the copy of a state; if it needs more, training waits for the disk

REMEDIES = {
    errno.ENOSPC: "free up disk space, or choose another folder",
    errno.EDQUOT: "free up disk space, or choose another folder",
    errno.EFBIG: "free up disk space, or choose another folder",
    errno.EACCES: "check who owns the folder and who may write to it",
    errno.EPERM: "check who owns the folder and who may write to it",
    errno.EROFS: "it is on a read-only file system: choose another folder",
}

Files = Mapping[str, Mapping[str, Tensor]]


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint may be intact, but this process cannot read it. Training must not start without it."""


class Checkpoint:
    """One checkpoint on disk. Raises CheckpointError if `path` is not a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = self._read_json(MANIFEST)
        version, step, files = manifest.get("version"), manifest.get("step"), manifest.get("files")
        if isinstance(version, int) and version > VERSION:
            raise UnreadableCheckpoint(
                f"{path} was written by a newer version of noloco_p2p (checkpoint version {version}): install it, or "
                "choose another --state-dir"
            )
        if version != VERSION or not isinstance(step, int) or not isinstance(files, dict):
            raise CheckpointError(
                f"{path / MANIFEST} is not a manifest of checkpoint version {VERSION}, the only supported version"
            )
        self.step = step
        self.meta: dict[str, Any] = unpacked(self._read_json(META))
        self._files: dict[str, dict[str, Any]] = files

    def has(self, stem: str) -> bool:
        """Return whether the checkpoint has a file STEM.safetensors."""
        return f"{stem}.safetensors" in self._files

    def file(self, stem: str) -> Path:
        """Return the path of STEM.safetensors. Raises CheckpointError if the checkpoint has no such file."""
        name = f"{stem}.safetensors"
        if name not in self._files:
            raise CheckpointError(
                f"{self.path}: this checkpoint does not contain {name}; it contains {', '.join(sorted(self._files))}"
            )
        return self.path / name

    def load(self, stem: str) -> dict[str, Tensor]:
        """Load the tensors of STEM.safetensors on the CPU.

        The file is mapped copy-on-write, so changes to the tensors do not reach the disk. Raises CheckpointError if the
        file cannot be read.
        """
        path = self.file(stem)
        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        except OSError as error:
            raise _unreadable(path, error) from None

    def verify(self) -> None:
        """Verify every file. This runs at about 4 GB/s if the files are in the page cache.

        Raises CheckpointError for the first damaged file.
        """
        for name, expected in self._files.items():
            path = self.path / name
            try:
                found = _describe(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing") from None
            except OSError as error:
                raise _unreadable(path, error) from None
            if found != expected:
                raise CheckpointError(f"{path} is damaged: found {found}, but the manifest says {expected}")

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a checkpoint: it does not contain {name}") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None
        except OSError as error:
            raise _unreadable(path, error) from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} is damaged: it is not a JSON object")
        return values


class Checkpoints:
    """The last `keep` checkpoints in `folder`. Only one process at a time may write, but any number may read.

    The constructor removes files that a killed writer has left behind, unless another process is writing.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        assert keep >= 1, f"keep must be at least 1, but it is {keep}"
        self.folder = folder
        self._keep = keep
        self._is_whole: dict[Path, bool] = {}  # the checkpoints that this object has written or verified
        if any(folder.glob(f"{_PARTIAL}*")):
            self._remove_leftovers()

    def save(self, step: int, *, files: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> Path:
        """Write a checkpoint with a file STEM.safetensors for every stem of `files`, and return its folder.

        `meta` is written as JSON. Tensors may be on any device. Raises SettingsError for other values in `meta`, and
        CheckpointError if writing fails, for example because the disk is full. The older checkpoints are then kept.
        """
        content = json.dumps(packed(meta, "meta"), indent=1).encode()
        try:
            with self._writing():
                path = self._write(step, files=files, meta=content)
                self._prune()
        except (OSError, SafetensorError) as error:
            number = error.errno if isinstance(error, OSError) else _OS_ERROR.search(str(error))
            remedy = REMEDIES.get(int(number[1]) if isinstance(number, re.Match) else number or 0)
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {self.folder}: {error} (earlier checkpoints are intact)"
                + (f"; {remedy}" if remedy else "")
            ) from None
        return path

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that passes verification, or None if there is no checkpoint.

        A damaged checkpoint is skipped with a warning. Raises CheckpointError if all are damaged, and
        UnreadableCheckpoint if one that is newer than the newest good one cannot be read.
        """
        damages: list[CheckpointError] = []
        for path in reversed(self._list()):
            try:
                checkpoint = Checkpoint(path)
                checkpoint.verify()
            except UnreadableCheckpoint:
                raise
            except CheckpointError as error:
                log.warning("skipped a damaged checkpoint: %s", error)
                self._is_whole[path] = False
                damages.append(error)
            else:
                self._is_whole[path] = True
                return checkpoint
        if damages:
            raise CheckpointError(
                f"{self.folder} holds only damaged checkpoints ({damages[0]}): restore a copy of them, or move the "
                "folder away to start again from the state of the swarm"
            )
        return None

    def _write(self, step: int, *, files: Files, meta: bytes) -> Path:
        paths = self._list()
        number = _number(paths[-1]) + 1 if paths else 0
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.folder))
        try:
            (partial / META).write_bytes(meta)
            for stem, tensors in files.items():
                save_file(_apart(tensors), partial / f"{stem}.safetensors")
            described = {path.name: _describe(path) for path in sorted(partial.iterdir())}
            manifest = {"version": VERSION, "step": step, "files": described}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            for path in partial.iterdir():
                path.chmod(0o644)
                _sync(path)
            partial.chmod(0o755)
            _sync(partial)
            final = self.folder / f"{number:08d}-step-{step}"
            partial.rename(final)
            self._is_whole[final] = True
        except BaseException:  # even after Ctrl-C, a partial checkpoint must not be left behind to fill the disk
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(self.folder)
        return final

    def _prune(self) -> None:
        for path in [path for path in self._list() if self._has_verified(path)][: -self._keep]:
            # The checkpoint is renamed first, so that it does not look damaged when it is only half removed.
            doomed = path.with_name(f"{_PARTIAL}{path.name}")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _has_verified(self, path: Path) -> bool:
        """Return whether a checkpoint is whole. Each is read at most once."""
        if path not in self._is_whole:
            try:
                Checkpoint(path).verify()
                self._is_whole[path] = True
            except CheckpointError as error:
                log.warning("keeping a checkpoint that cannot be verified: %s", error)
                self._is_whole[path] = False
        return self._is_whole[path]

    def _list(self) -> list[Path]:
        try:
            found = [path for path in self.folder.iterdir() if _NAME.match(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self.folder, error) from None
        return sorted(found, key=_number)

    def _remove_leftovers(self) -> None:
        try:
            with self._writing():
                for path in self.folder.glob(f"{_PARTIAL}*"):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:  # the folder is read-only, or another process is writing
            log.debug("could not remove partial checkpoints in %s: %s", self.folder, error)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the writer lock. Raises OSError if another process holds it.

        The kernel releases the lock when the process dies.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the weights of a private run are private
        with (self.folder / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError("another process is writing a checkpoint to this folder") from None
            yield


class Saver:
    """Writes checkpoints in the background, one at a time. What it writes is copied first, so training continues."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, write: Callable[[Files], object], live: Files) -> None:
        """Call `write` with a copy of the tensors `live` on another thread, unless the saver is busy.

        If the program exits during a write, the process ends only after the write. If there is too little memory for a
        copy, this call blocks until the checkpoint is written.
        """
        num_bytes = sum(tensor.nbytes for tensors in live.values() for tensor in tensors.values())
        has_room = num_bytes < USED_SHARE * free_memory()
        if has_room:
            live = {
                stem: {name: value.to("cpu", copy=True) for name, value in tensors.items()}
                for stem, tensors in live.items()
            }
        else:
            log.info("training is waiting for a checkpoint: not enough memory for a copy")
        self._thread = threading.Thread(target=write, args=(live,), name="noloco-checkpoint")
        self._thread.start()
        if not has_room:
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous and apart in memory, as safetensors needs them. Few need a copy."""
    found, end = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            found[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return found


def _unreadable(path: Path, error: OSError) -> UnreadableCheckpoint:
    return UnreadableCheckpoint(
        f"{path} cannot be read: {error.strerror or error}; repair the access to it, or choose another --state-dir"
    )


def _number(path: Path) -> int:
    match = _NAME.match(path.name)
    assert match is not None
    return int(match[1])


def _describe(path: Path) -> dict[str, Any]:
    hasher = blake3()
    hasher.update_mmap(path)
    return {"bytes": path.stat().st_size, "blake3": hasher.hexdigest()}


def _sync(path: Path) -> None:
    """Flush a file to the disk. For a folder, this flushes its directory entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
