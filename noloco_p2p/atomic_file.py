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
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
