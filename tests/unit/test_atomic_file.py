"""A small file is written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from noloco_p2p.atomic_file import write_atomically


def test_it_is_written_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"one", b"another one", b""):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def test_a_secret_is_nobody_elses_from_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"open to all")
    path.chmod(0o644)
    write_atomically(path, b"secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{os.fstat(descriptor).st_size} bytes")
        sync(descriptor)

    def renamed(draft: Path, path: Path) -> None:
        done.append("name")
        rename(draft, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_atomically(tmp_path / "file", b"data")
    assert done == ["4 bytes", "name", "folder"]


def test_what_cannot_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", b"over a folder")
    assert sorted(os.listdir(tmp_path)) == ["folder"]
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "file", b"")
