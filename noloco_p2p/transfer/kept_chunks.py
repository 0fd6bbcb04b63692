"""This module keeps a file that arrives in chunks, and a record of its verified chunks, across program restarts.

FILE.digests, next to the file, has 32 bytes per chunk: the digest of a verified chunk, or zeros for a missing chunk.
When the file is opened again, all chunks are hashed to find the chunks that a crash has damaged, so writes can reach
the disk in any order.
"""

from __future__ import annotations

import asyncio
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
    """The verified chunks of an incomplete file.

    Use it as an async context manager, which does slow work off the event loop. Methods raise OSError if a file cannot
    be read or written. `missing` lists the indices of the missing chunks, and `done_bytes` is the size of all others.
    """

    def __init__(self, path: Path, *, num_bytes: int) -> None:
        self._path = path
        self._digests_path = _digests_path(path)
        self._num_bytes = num_bytes
        self._num_chunks = -(-num_bytes // STATE_CHUNK_BYTES)
        self.missing = list(range(self._num_chunks))
        self.done_bytes = 0
        self._is_given_up = False

    async def __aenter__(self) -> KeptChunks:
        opening = asyncio.get_running_loop().run_in_executor(None, self._open)  # hashes all chunks that were kept
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._is_given_up = True
            opening.add_done_callback(self._close_opened)
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._close()

    def _close_opened(self, opening: asyncio.Future[None]) -> None:
        if not opening.exception():
            self._close()

    def _close(self) -> None:
        os.close(self._file)
        os.close(self._digests)

    def _open(self) -> None:
        is_fresh = self._is_fresh()
        flags = os.O_RDWR | os.O_CREAT | (0 if is_fresh else os.O_TRUNC)
        self._file = os.open(self._path, flags, 0o600)
        self._digests = os.open(self._digests_path, flags, 0o600)
        os.ftruncate(self._file, self._num_bytes)
        os.ftruncate(self._digests, DIGEST_BYTES * self._num_chunks)
        if is_fresh:
            self.missing = [index for index in self.missing if not self._is_here(index)]
        self.done_bytes = self._num_bytes - sum(self.size(index) for index in self.missing)

    def size(self, index: int) -> int:
        """Return the number of bytes in a chunk, which is STATE_CHUNK_BYTES except for the last chunk."""
        return min(STATE_CHUNK_BYTES, self._num_bytes - index * STATE_CHUNK_BYTES)

    def put(self, index: int, payload: bytes, digest: bytes) -> None:
        """Write a verified chunk and its digest."""
        os.pwrite(self._file, payload, index * STATE_CHUNK_BYTES)
        os.pwrite(self._digests, digest, index * DIGEST_BYTES)
        self.missing.remove(index)
        self.done_bytes += len(payload)

    def start_over(self) -> None:
        """Discard everything that has arrived, so that all chunks are missing again."""
        os.ftruncate(self._digests, 0)
        os.ftruncate(self._digests, DIGEST_BYTES * self._num_chunks)
        self.missing, self.done_bytes = list(range(self._num_chunks)), 0

    async def finish(self) -> None:
        """Sync the complete file to disk and remove its digests."""
        assert not self.missing
        await asyncio.to_thread(os.fsync, self._file)
        self._digests_path.unlink()

    def _is_fresh(self) -> bool:
        try:
            begun = (self._path.stat(), self._digests_path.stat())
        except FileNotFoundError:
            return False
        sizes = [stat.st_size for stat in begun]
        is_same = sizes == [self._num_bytes, DIGEST_BYTES * self._num_chunks]
        return is_same and time.time() - begun[1].st_mtime < KEPT_FOR_S

    def _is_here(self, index: int) -> bool:
        digest = os.pread(self._digests, DIGEST_BYTES, index * DIGEST_BYTES)
        if not any(digest) or self._is_given_up:
            return False
        return blake3(os.pread(self._file, self.size(index), index * STATE_CHUNK_BYTES)).digest() == digest
