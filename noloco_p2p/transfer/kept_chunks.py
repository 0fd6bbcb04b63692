"""Keep a file that arrives in chunks, and a record of its verified chunks, across program restarts.

FILE.digests, next to the file, has 32 bytes per chunk: the digest of a verified chunk, or zeros for a missing chunk.
When the file is opened again, all chunks are hashed to find the chunks that a crash has damaged, so writes can reach
the disk in any order.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from blake3 import blake3

from noloco_p2p.gossip.frames import STATE_CHUNK_BYTES

DIGEST_BYTES = 32
KEPT_FOR_S = 3600.0  # after that, the chunks would be too old to be combined with new ones


def forget(path: Path) -> None:
    """Remove an incomplete file and its digests."""
    for each in (path, _digests_path(path)):
        each.unlink(missing_ok=True)


def _digests_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.digests")


class KeptChunks:
    """The verified chunks of an incomplete file. `missing` lists the indices of all others.

    The constructor hashes all chunks that were kept, so call it off the event loop. All methods raise OSError if a file
    cannot be read or written.
    """

    def __init__(self, path: Path, *, num_bytes: int) -> None:
        self._path, self._digests_path = path, _digests_path(path)
        self._num_bytes = num_bytes
        self._num_chunks = -(-num_bytes // STATE_CHUNK_BYTES)
        self.missing = list(range(self._num_chunks))
        if not self._is_fresh():
            self.start_over()
            return
        digests = self._digests_path.read_bytes()
        with path.open("rb") as file:
            for index in range(self._num_chunks):
                digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
                if any(digest):
                    file.seek(index * STATE_CHUNK_BYTES)
                    if blake3(file.read(self.size(index))).digest() == digest:
                        self.missing.remove(index)

    @property
    def done_bytes(self) -> int:
        return self._num_bytes - sum(map(self.size, self.missing))

    def size(self, index: int) -> int:
        """Return the number of bytes in a chunk, which is STATE_CHUNK_BYTES except for the last chunk."""
        return min(STATE_CHUNK_BYTES, self._num_bytes - index * STATE_CHUNK_BYTES)

    def put(self, index: int, payload: bytes, digest: bytes) -> None:
        """Write a verified chunk and its digest."""
        for path, start, data in (
            (self._path, index * STATE_CHUNK_BYTES, payload),
            (self._digests_path, index * DIGEST_BYTES, digest),
        ):
            with path.open("r+b") as file:
                file.seek(start)
                file.write(data)
        self.missing.remove(index)

    def start_over(self) -> None:
        """Discard everything that has arrived, so that all chunks are missing again."""
        for path, size in ((self._path, self._num_bytes), (self._digests_path, DIGEST_BYTES * self._num_chunks)):
            path.touch(0o600)
            os.truncate(path, 0)
            os.truncate(path, size)
        self.missing = list(range(self._num_chunks))

    def finish(self) -> None:
        """Sync the complete file to disk and remove its digests. This is slow."""
        assert not self.missing
        with self._path.open("r+b") as file:
            os.fsync(file)
        self._digests_path.unlink()

    def _is_fresh(self) -> bool:
        try:
            begun = (self._path.stat(), self._digests_path.stat())
        except FileNotFoundError:
            return False
        is_same = [stat.st_size for stat in begun] == [self._num_bytes, DIGEST_BYTES * self._num_chunks]
        return is_same and time.time() - begun[1].st_mtime < KEPT_FOR_S
