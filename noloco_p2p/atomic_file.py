"""A small file that another process may read at any moment, also after a power cut: it is complete or absent."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a draft beside `path`, and rename it to `path`. `mode`: its permissions, less the umask.

    Raises OSError; `path` is then unchanged, and the draft is removed.
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
    """Sync the folder, so that the new name is on the disk, where the file system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
