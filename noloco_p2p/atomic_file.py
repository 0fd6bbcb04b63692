"""A small file that somebody may read at any moment, or after a power cut: written whole, or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a draft beside `path`, and rename it over `path`. `mode`: its permissions, less the umask.

    Raises OSError; `path` is then as it was, and no draft stays.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk, too, where the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
