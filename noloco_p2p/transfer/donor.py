"""A donor serves newcomers the run spec, the layout of its model and, in chunks, its newest saved state.

The state is read from a file, never from live tensors. If training has gone far beyond that state, a newcomer would be
too far behind to swap with anybody, so the donor saves a newer one first. A donor serves two newcomers at a time. It
refuses others, and those that come too early, as BUSY with a retry time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from blake3 import blake3

from noloco_p2p.errors import CorruptPayload, Refused, Unreachable
from noloco_p2p.gossip.frames import (
    STATE_CHUNK_BYTES,
    FetchItem,
    FetchWant,
    LayoutJson,
    RefuseCode,
    SpecJson,
    StateChunk,
    StateManifest,
    WantChunks,
    WantLayout,
    WantManifest,
    WantSpec,
)
from noloco_p2p.gossip.layout import MAX_LAYOUT_BYTES, ModelLayout
from noloco_p2p.spec import OuterSpec, Spec

log = logging.getLogger(__name__)

NUM_SLOTS = 2  # each further upload would slow down the others and the donor's swaps
STALLED_S = 30.0  # an upload that accepts no chunk for this long loses its slot to the next caller
RETRY_S = 10.0  # after which a newcomer that found no free slot asks again
SAVING_S = 60.0  # in which a newer state should be saved; afterwards, newcomers get the old one
SAVING_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state file that can be served, and the position of its owner in the run when it was written."""

    path: Path
    manifest: StateManifest


def describe_state(path: Path, *, layout: str, num_elements: int, progress: float) -> SavedState:
    """Compute the manifest of a state file. Raises OSError if the file cannot be read.

    The file is hashed at about 4 GB/s.
    """
    with path.open("rb") as file:
        digests = tuple(blake3(chunk).digest() for chunk in iter(lambda: file.read(STATE_CHUNK_BYTES), b""))
    num_bytes = path.stat().st_size
    return SavedState(path, StateManifest(layout, num_elements, progress, num_bytes, digests))


class StateServer:
    """Serves the spec, the layout of this peer's model and its newest saved state, as soon as they are set.

    `position` returns the progress of this peer.
    """

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        position: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.layout: ModelLayout | None = None
        self.saved: SavedState | None = None
        self._too_old: object = ...  # the saved state, or None, when a newcomer asked for a newer one
        self._asked_at_s = 0.0
        self._is_wanted = self._has_warned = False
        self._position = position
        self._clock = clock
        self._uploads: dict[object, float] = {}  # the time at which each upload began to send its last chunk

    def take_wanted(self) -> bool:
        """Return once whether a newcomer needs a newer state than the one that is served. The call is thread-safe."""
        is_wanted, self._is_wanted = self._is_wanted and self._too_old is self.saved, False
        return is_wanted

    async def serve(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        """Yield the response to a request. Raises PeerError if the request cannot be served.

        Close the generator when the caller disconnects, so that its upload ends.
        """
        match want:
            case WantSpec():
                if self.spec is None:
                    raise Refused("I have no spec yet", code=RefuseCode.NO_STATE.name)
                yield SpecJson(self.spec.canonical_json())
            case WantManifest():
                yield self._newest().manifest
            case WantLayout():
                data = self.layout.as_json() if self.layout else b""
                if not 0 < len(data) <= MAX_LAYOUT_BYTES:
                    why = "my list of tensors is too long" if data else "I have no model yet"
                    raise Refused(why, code=RefuseCode.NO_STATE.name)
                yield LayoutJson(data)
            case WantChunks(manifest_digest, indices):
                saved = self._any()
                if saved.manifest.digest() != manifest_digest:
                    raise Refused("this donor now has a newer state; request its manifest", code=RefuseCode.BUSY.name)
                async with aclosing(self._chunks(saved, indices)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    def _any(self) -> SavedState:
        if self.saved is None:
            if self._position() > 0:  # at the start, newcomers begin with their own weights
                self._want_newer()
            raise Refused("I have no saved state yet", code=RefuseCode.NO_STATE.name, retry_after_s=10.0)
        return self.saved

    def _newest(self) -> SavedState:
        """Return the saved state if it is recent. Otherwise, ask training to save one."""
        saved, now_s = self._any(), self._clock()
        position, progress = self._position(), saved.manifest.progress
        # Early in a run, a few steps change the loss by more than newcomers accept.
        is_old = self.spec and (position - progress > self.spec.furthest / 2 or progress < position / 2)
        if not is_old:
            return saved
        self._want_newer()
        if now_s - self._asked_at_s > SAVING_S:
            return saved
        raise _busy("I am saving a newer state", retry_s=SAVING_RETRY_S)

    def _want_newer(self) -> None:
        """Ask training to save a state, once for each that is too old, and warn once if it does not."""
        if self._too_old is not self.saved:
            self._too_old, self._asked_at_s, self._is_wanted = self.saved, self._clock(), True
        elif not self._has_warned and self._clock() - self._asked_at_s > SAVING_S:
            self._has_warned = True
            log.warning("newcomers wait for a newer state; a script must take steps, or call `save` if save_every_s=0")

    async def _chunks(self, saved: SavedState, indices: Sequence[int]) -> AsyncGenerator[FetchItem]:
        if any(later <= earlier for earlier, later in pairwise(indices)):
            raise CorruptPayload("chunks must be requested in ascending order and without duplicates")
        if indices and indices[-1] >= len(saved.manifest.chunk_digests):
            raise CorruptPayload(f"chunk {indices[-1]} does not exist")
        if len(self._uploads) >= NUM_SLOTS:
            slowest = min(self._uploads, key=self._uploads.__getitem__)
            if self._clock() - self._uploads[slowest] <= STALLED_S:
                raise _busy(f"I am already serving {NUM_SLOTS} newcomers")
            del self._uploads[slowest]  # it waits for the network, and ends when it moves
        upload = object()
        try:
            with saved.path.open("rb") as file:  # a newer checkpoint may remove the file, but it stays readable
                for index in indices:
                    self._uploads[upload] = self._clock()
                    start, stop = saved.manifest.chunk_range(index)
                    yield StateChunk(index, await asyncio.to_thread(os.pread, file.fileno(), stop - start, start))
                    if upload not in self._uploads:
                        raise _busy(f"you took no chunk for {STALLED_S:.0f} s, so your slot went to another newcomer")
        except OSError as error:
            raise Unreachable(f"the state file cannot be read: {error}") from None
        finally:
            self._uploads.pop(upload, None)


def _busy(sentence: str, *, retry_s: float = RETRY_S) -> Refused:
    return Refused(sentence, code=RefuseCode.BUSY.name, retry_after_s=retry_s)


def state_file_bytes(num_elements: int, outer: OuterSpec) -> int:
    """Return the size of a state file, which consists of the safetensors header and fp32 vectors."""
    names = ("outer_momentum", "weights") if outer.keeps_momentum else ("weights",)
    header = {
        name: {
            "dtype": "F32",
            "shape": [num_elements],
            "data_offsets": [index * 4 * num_elements, (index + 1) * 4 * num_elements],
        }
        for index, name in enumerate(names)
    }
    text = json.dumps(header, separators=(",", ":"))
    return 8 + -(-len(text) // 8) * 8 + len(names) * 4 * num_elements
