"""A donor serves newcomers the run spec, the layout of its model and, in chunks, its newest saved state.

The state is read from a file, never from live tensors. `slots.py` limits the number of newcomers served at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
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
from noloco_p2p.transfer.slots import UploadSlots


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
    """Serves the spec, the layout of this peer's model and its newest saved state, as soon as they are set."""

    def __init__(self, spec: Spec | None = None) -> None:
        self.spec = spec
        self.layout: ModelLayout | None = None
        self.saved: SavedState | None = None
        self._slots = UploadSlots()

    async def serve(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        """Yield the response to a request. Raises PeerError if the request cannot be served.

        Close the generator when the caller disconnects, so that its upload ends.
        """
        match want:
            case WantSpec():
                yield self._spec_json()
            case WantManifest():
                yield self._saved().manifest
            case WantLayout():
                yield self._layout_json()
            case WantChunks(manifest_digest, indices):
                saved = self._saved()
                if saved.manifest.digest() != manifest_digest:
                    raise Refused("this donor now has a newer state; request its manifest", code=RefuseCode.BUSY.name)
                async with aclosing(self._chunks(saved, indices)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    def _spec_json(self) -> SpecJson:
        if self.spec is None:
            raise Refused("I have no spec yet", code=RefuseCode.NO_STATE.name)
        return SpecJson(self.spec.canonical_json())

    def _layout_json(self) -> LayoutJson:
        data = self.layout.as_json() if self.layout else b""
        if not 0 < len(data) <= MAX_LAYOUT_BYTES:
            why = "my list of tensors is too long" if data else "I have no model yet"
            raise Refused(why, code=RefuseCode.NO_STATE.name)
        return LayoutJson(data)

    def _saved(self) -> SavedState:
        if self.saved is None:
            raise Refused("I have no saved state yet", code=RefuseCode.NO_STATE.name, retry_after_s=10.0)
        return self.saved

    async def _chunks(self, saved: SavedState, indices: Sequence[int]) -> AsyncGenerator[FetchItem]:
        if any(later <= earlier for earlier, later in pairwise(indices)):
            raise CorruptPayload("chunks must be requested in ascending order and without duplicates")
        if indices and indices[-1] >= len(saved.manifest.chunk_digests):
            raise CorruptPayload(f"chunk {indices[-1]} does not exist")
        try:
            with self._slots.take(len(indices)) as upload, saved.path.open("rb") as file:
                for index in indices:  # a newer checkpoint may remove the file, but the open file stays readable
                    start, stop = saved.manifest.chunk_range(index)
                    yield StateChunk(index, await asyncio.to_thread(os.pread, file.fileno(), stop - start, start))
                    self._slots.took(upload)
        except OSError as error:
            raise Unreachable(f"the state file cannot be read: {error}") from None


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
