"""Write small files that other processes may read at any moment.

A reader finds either all of the old content or all of the new content, even after a power failure.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `data` to a temporary file next to `path`, then rename it to `path`.

    `mode` sets the permissions of the file, subject to the umask.

    Raises OSError if the file cannot be written. In that case, `path` is unchanged and the temporary file is removed.
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
    """Sync the folder, if the file system supports it, so that the new name is on disk."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
