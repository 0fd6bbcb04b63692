"""The first fetch: the newest saved state of a live peer, chunk by chunk, from as many donors as it takes.

The donor serves a file (never live tensors). Every chunk has a digest in the donor's manifest. When a donor dies the
verified chunks are kept and the rest comes from another one: the result is then a point between two replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, Unreachable
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
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.spec import RunSpec
from noloco_p2p.telemetry.progress import Report, ignore

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 15.0  # for one chunk or one manifest
MAX_UPLOADS = 2  # at once; a third newcomer is told to come back, or asks another donor


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state file that can be served, and where its owner stood when it was written."""

    path: Path
    manifest: StateManifest


def describe_state(path: Path, *, layout: str, num_elements: int, round_index: int, progress: float) -> SavedState:
    """Digest a state file chunk by chunk (4 GB/s). Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        digests = tuple(blake3(chunk).digest() for chunk in iter(lambda: file.read(STATE_CHUNK_BYTES), b""))
    num_bytes = path.stat().st_size
    return SavedState(path, StateManifest(layout, num_elements, round_index, progress, num_bytes, digests))


class StateServer:
    """Serves the newest saved state and the spec. `saved` is replaced whenever a newer one was written."""

    def __init__(self, spec: RunSpec) -> None:
        self.saved: SavedState | None = None
        self.layout: ModelLayout | None = None  # of the model that trains here
        self._spec_json = spec.canonical_json()
        self._uploads = 0

    async def serve(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        """Close it when the caller goes away: only then its upload ends. Raises PeerError."""
        match want:
            case WantSpec():
                yield SpecJson(self._spec_json)
            case WantManifest():
                yield self._saved().manifest
            case WantLayout():
                yield self._layout_json()
            case WantChunks(manifest_digest, indices):
                saved = self._saved()
                if saved.manifest.digest() != manifest_digest:
                    raise Refused("I have a newer state by now: ask for its manifest", code=RefuseCode.BUSY.name)
                async with aclosing(self._chunks(saved, indices)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    def _layout_json(self) -> LayoutJson:
        data = self.layout.as_json() if self.layout else b""
        if not 0 < len(data) <= MAX_LAYOUT_BYTES:
            why = "my list of tensors is too long" if data else "I have no model yet"
            raise Refused(why, code=RefuseCode.BETWEEN_ROUNDS.name)
        return LayoutJson(data)

    def _saved(self) -> SavedState:
        if self.saved is None:
            raise Refused("I have no saved state yet", code=RefuseCode.BETWEEN_ROUNDS.name, retry_after_s=10.0)
        return self.saved

    async def _chunks(self, saved: SavedState, indices: Sequence[int]) -> AsyncGenerator[FetchItem]:
        if self._uploads >= MAX_UPLOADS:
            raise Refused(f"{MAX_UPLOADS} uploads are running here", code=RefuseCode.BUSY.name, retry_after_s=5.0)
        self._uploads += 1
        try:
            with saved.path.open("rb") as file:  # stays readable when a newer checkpoint removes the file
                for index in indices:
                    if index >= len(saved.manifest.chunk_digests):
                        raise CorruptPayload(f"chunk {index} does not exist")
                    start, stop = saved.manifest.chunk_range(index)
                    payload = await asyncio.to_thread(os.pread, file.fileno(), stop - start, start)
                    yield StateChunk(index, payload)
        except OSError as error:
            raise Unreachable(f"the state file cannot be read: {error}") from None
        finally:
            self._uploads -= 1


def state_file_bytes(num_elements: int) -> int:
    """Size of a state file: two fp32 vectors and the header that safetensors gives them (a test holds that)."""
    names = ("outer_momentum", "slow_weights")
    header = {
        name: {
            "dtype": "F32",
            "shape": [num_elements],
            "data_offsets": [index * 4 * num_elements, (index + 1) * 4 * num_elements],
        }
        for index, name in enumerate(names)
    }
    text = json.dumps(header, separators=(",", ":"))
    return 8 + -(-len(text) // 8) * 8 + 8 * num_elements


async def fetch_spec(transport: Transport, donors: Sequence[Candidate], *, expected_digest: str) -> RunSpec:
    """The run spec from the first donor that has it. Raises Unreachable when none has."""
    reasons = []
    for donor in donors:
        try:
            async with aclosing(transport.fetch(donor, WantSpec(), timeout_s=FETCH_TIMEOUT_S)) as items:
                async for item in items:
                    if isinstance(item, SpecJson):
                        return RunSpec.from_json(item.data, expected_digest=expected_digest, origin=donor.address)
            raise CorruptPayload("it gave no spec", peer=donor.peer_id)
        except (PeerError, ValueError) as error:
            reasons.append(f"{donor.address}: {error}")
    raise Unreachable("no live peer gave the run spec: " + ("; ".join(reasons) or "nobody is there"))


async def find_difference(transport: Transport, peer: Candidate, ours: ModelLayout) -> str:
    """The first tensor that is another one in the model of `peer`, for people; "" when it has the same or is silent."""
    try:
        async with aclosing(transport.fetch(peer, WantLayout(), timeout_s=FETCH_TIMEOUT_S)) as items:
            async for item in items:
                if isinstance(item, LayoutJson):
                    return ours.first_difference(ModelLayout.from_json(item.data))
    except (PeerError, ValueError) as error:
        log.debug("%s does not tell its tensors: %s", peer.address, error)
    return ""


async def fetch_state(
    transport: Transport,
    donors: Sequence[Candidate],
    *,
    layout: str,
    num_elements: int,
    num_bytes: int,
    target: Path,
    on_progress: Report = ignore,
) -> StateManifest | None:
    """Write the state of a live peer to `target`; None when no donor has one that fits.

    Chunks that were verified are kept when their donor dies.

    `num_bytes` is the size of our own state file: any other is refused before a byte is read. The manifest that is
    returned is of the donor that gave the last chunk. `on_progress` is told the verified bytes, those kept of a dead
    donor too.
    """
    done_bytes = 0
    on_progress(done_bytes, num_bytes)
    missing = list(range(-(-num_bytes // STATE_CHUNK_BYTES)))
    with target.open("wb") as file:
        file.truncate(num_bytes)
        for donor in donors:
            try:
                manifest = await _manifest(transport, donor)
                if (manifest.layout, manifest.num_elements, manifest.num_bytes, len(manifest.chunk_digests)) != (
                    *(layout, num_elements, num_bytes),
                    -(-num_bytes // STATE_CHUNK_BYTES),
                ):
                    raise CorruptPayload("its state is of another model or size", peer=donor.peer_id)
                want = WantChunks(manifest.digest(), tuple(missing))
                async with aclosing(transport.fetch(donor, want, timeout_s=FETCH_TIMEOUT_S)) as items:
                    async for item in items:
                        done_bytes += _keep(item, manifest, missing, file.fileno())
                        on_progress(done_bytes, num_bytes)
                if not missing:
                    os.fsync(file.fileno())
                    return manifest
            except PeerError as error:
                log.info("no state from %s: %s; %d chunks are still missing", donor.address, error, len(missing))
    return None


async def _manifest(transport: Transport, donor: Candidate) -> StateManifest:
    async with aclosing(transport.fetch(donor, WantManifest(), timeout_s=FETCH_TIMEOUT_S)) as items:
        async for item in items:
            if isinstance(item, StateManifest):
                return item
    raise CorruptPayload("it gave no manifest", peer=donor.peer_id)


def _keep(item: FetchItem, manifest: StateManifest, missing: list[int], file: int) -> int:
    """Write a chunk to its place; gives its bytes. Raises CorruptPayload."""
    if not isinstance(item, StateChunk) or not missing or item.index != missing[0]:
        raise CorruptPayload("a chunk came that was not asked for")
    start, stop = manifest.chunk_range(item.index)
    if len(item.payload) != stop - start or blake3(item.payload).digest() != manifest.chunk_digests[item.index]:
        raise CorruptPayload(f"chunk {item.index} of the state is damaged")
    os.pwrite(file, item.payload, start)
    missing.pop(0)
    return stop - start
