"""Write checkpoints to disk, and verify and read them.

    FOLDER/00000007-step-41/           number of the checkpoint, and the inner step after which it was taken
        manifest.json                  size and blake3 digest of every other file; written last
        meta.json
        STEM.safetensors ...

A checkpoint is written to a `.partial-*` folder. Every file in it is synced, the folder is renamed, and its parent is
synced. A checkpoint is therefore either complete or absent, even after a crash. Nothing is pickled. What cannot be read
is not taken for damaged, and nothing is deleted unless it was verified.

Tensors are written one after another, straight from where they are, so a checkpoint needs no memory for a second copy
of the state. Training waits only until the system has them in its page cache. Hashing and syncing come later.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.devices import free_memory
from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.plain_values import packed, unpacked

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
META = "meta.json"
VERSION = 1
_NAME = re.compile(r"^(\d{8,})-step-(\d+)$")
_PARTIAL = ".partial-"
_LOCK = ".writer.lock"
READ_BYTES = 1 << 20  # at a time; the pages of a mapped file would count as memory of this process
DTYPES = {  # their names in safetensors
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}

REMEDIES = {
    errno.ENOSPC: "free up disk space, or choose another folder",
    errno.EDQUOT: "free up disk space, or choose another folder",
    errno.EFBIG: "free up disk space, or choose another folder",
    errno.EACCES: "check who owns the folder and who may write to it",
    errno.EPERM: "check who owns the folder and who may write to it",
    errno.EROFS: "it is on a read-only file system: choose another folder",
}


@dataclass(frozen=True, slots=True)
class Vector:
    """A flat fp32 vector that does not exist as a tensor. `read(start, stop)` returns a part of it."""

    num_elements: int
    read: Callable[[int, int], Tensor]

    @property
    def nbytes(self) -> int:
        return 4 * self.num_elements


Files = Mapping[str, Mapping[str, Tensor | Vector]]


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

    def save(self, step: int, *, files: Files, meta: Mapping[str, Any]) -> Path:
        """Write a checkpoint with a file STEM.safetensors for every stem of `files`, and return its folder.

        `meta` is written as JSON. Tensors may be on any device. Raises SettingsError for other values in `meta`, and
        CheckpointError if writing fails, for example because the disk is full. The older checkpoints are then kept.
        """
        return self.begin(step, files=files, meta=meta)()

    def begin(self, step: int, *, files: Files, meta: Mapping[str, Any]) -> Callable[[], Path]:
        """Write the files of a checkpoint as `save` does, and return a function that completes it.

        The tensors may change as soon as this returns. Call the function, on any thread, because nothing else can be
        saved before. Until it has returned, there is no checkpoint.
        """
        content = json.dumps(packed(meta, "meta"), indent=1).encode()
        with self._explained(step):
            lock = self._lock()
            try:
                partial = self._write(files, content)
            except BaseException:
                lock.close()
                raise

        def complete() -> Path:
            with self._explained(step), lock:
                path = self._complete(step, partial)
                self._prune()
                return path

        return complete

    @property
    def is_empty(self) -> bool:
        """Return whether there is no checkpoint, not even a damaged one."""
        return not self._list()

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

    def _write(self, files: Files, meta: bytes) -> Path:
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.folder))
        with _removed_on_failure(partial):
            (partial / META).write_bytes(meta)
            for stem, tensors in files.items():
                write_tensors(partial / f"{stem}.safetensors", tensors)
        return partial

    def _complete(self, step: int, partial: Path) -> Path:
        paths = self._list()
        number = _number(paths[-1]) + 1 if paths else 0
        with _removed_on_failure(partial):
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
            with self._lock():
                for path in self.folder.glob(f"{_PARTIAL}*"):
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:  # the folder is read-only, or another process is writing
            log.debug("could not remove partial checkpoints in %s: %s", self.folder, error)

    def _lock(self) -> IO[str]:
        """Take the writer lock, and return the file that holds it until it is closed. Raises OSError if it is taken.

        The kernel releases the lock when the process dies.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the weights of a private run are private
        lock = (self.folder / _LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise OSError("another process is writing a checkpoint to this folder") from None
        return lock

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = REMEDIES.get(error.errno or 0)
            raise CheckpointError(
                f"cannot write the checkpoint of step {step} to {self.folder}: {error} (earlier checkpoints are intact)"
                + (f"; {remedy}" if remedy else "")
            ) from None


class Saver:
    """Completes checkpoints in the background, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, complete: Callable[[], object]) -> None:
        """Call `complete` on another thread. If the program exits meanwhile, the process ends only after the call."""
        self._thread = threading.Thread(target=complete, name="noloco-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread:
            self._thread.join()
            self._thread = None


def copied(files: Files) -> Files | None:
    """Return copies in main memory, or None if they would take more than half of what is free there."""
    if sum(value.nbytes for tensors in files.values() for value in tensors.values()) > free_memory() / 2:
        return None
    return {stem: {name: _copy(value) for name, value in tensors.items()} for stem, tensors in files.items()}


def _copy(value: Tensor | Vector) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    whole = torch.empty(value.num_elements, dtype=torch.float32, device="cpu")
    for start, stop in chunk_bounds(value.num_elements):
        whole[start:stop] = value.read(start, stop)
    return whole


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Vector]) -> None:
    """Write a safetensors file without copying more than one tensor that is not contiguous or not on the CPU.

    Raises OSError if the file cannot be written, and CheckpointError for a dtype that safetensors does not have.
    """
    dtypes = {name: torch.float32 if isinstance(value, Vector) else value.dtype for name, value in tensors.items()}
    if unknown := next((name for name, dtype in dtypes.items() if dtype not in DTYPES), None):
        raise CheckpointError(f"{unknown} is {dtypes[unknown]}, which a checkpoint cannot hold")
    names = sorted(tensors, key=lambda name: (-dtypes[name].itemsize, name))  # so that all are aligned
    header, end = dict[str, Any](), 0
    for name in names:
        shape = [value.num_elements] if isinstance(value := tensors[name], Vector) else [*value.shape]
        start, end = end, end + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": DTYPES[dtypes[name]], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for part in _parts(tensors[name]):
                file.write(bytes_of(part))  # pyright: ignore[reportArgumentType] - it has the buffer protocol


def bytes_of(values: Tensor) -> np.ndarray:
    """Return the bytes of a tensor of any layout, without a copy of a contiguous one on the CPU."""
    plain = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()  # the stride of one element is arbitrary


def _parts(value: Tensor | Vector) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for start, stop in chunk_bounds(value.num_elements):
            yield value.read(start, stop)


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Even after Ctrl-C, a partial checkpoint must not be left behind to fill the disk."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _unreadable(path: Path, error: OSError) -> UnreadableCheckpoint:
    return UnreadableCheckpoint(
        f"{path} cannot be read: {error.strerror or error}; repair the access to it, or choose another --state-dir"
    )


def _number(path: Path) -> int:
    match = _NAME.match(path.name)
    assert match is not None
    return int(match[1])


def _describe(path: Path) -> dict[str, Any]:
    hasher, buffer = blake3(), memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            hasher.update(buffer[:length])
    return {"bytes": path.stat().st_size, "blake3": hasher.hexdigest()}


def _sync(path: Path) -> None:
    """Flush a file to the disk. For a folder, this flushes its directory entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
