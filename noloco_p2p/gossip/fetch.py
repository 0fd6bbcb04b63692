"""The first fetch: run spec and newest saved state of a live peer, chunk by chunk, from as many donors as it takes.

Every chunk has a digest in the donor's manifest. When a donor dies, or this program does, the verified chunks are kept
and the rest comes from another donor: the result is then a point between two replicas.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from blake3 import blake3

from noloco_p2p.errors import CorruptPayload, PeerError, Refused, Unreachable
from noloco_p2p.gossip.frames import (
    STATE_CHUNK_BYTES,
    FetchItem,
    LayoutJson,
    QueuePlace,
    RefuseCode,
    SpecJson,
    StateChunk,
    StateManifest,
    WantChunks,
    WantLayout,
    WantManifest,
    WantSpec,
)
from noloco_p2p.gossip.kept_chunks import KeptChunks
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import Candidate, Directory, Transport
from noloco_p2p.spec import RunSpec
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.progress import Report, ignore

log = logging.getLogger(__name__)

GIVING = ("training", "paused", "done")  # states of peers that may have a state to give
FETCH_TIMEOUT_S = 15.0  # for one chunk, one manifest, or the next word from the line


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
            reasons.append(f"{named(donor.peer_id)}: {error}")
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


def nobody_waits(donor: Candidate, place: QueuePlace | None) -> None:
    """An `on_place` that nobody reads."""


async def fetch_state(
    transport: Transport,
    donors: Sequence[Candidate],
    *,
    layout: str,
    num_elements: int,
    num_bytes: int,
    target: Path,
    on_progress: Report = ignore,
    on_place: Callable[[Candidate, QueuePlace | None], None] = nobody_waits,
) -> StateManifest | None:
    """Write the state of a live peer to `target`; None when no donor has one that fits.

    Each donor is asked in turn; those with a line of newcomers come last, and are waited for, the shortest first.
    Verified chunks are kept when their donor dies, and in `target` for an hour when this program does.

    `num_bytes` is the size of our own state file: any other is refused before a byte is read. The manifest that is
    returned is of the donor that gave the last chunk. `on_progress` is told the verified bytes, those kept of a dead
    donor too; `on_place` the place in a donor's line, and None when the turn has come. Raises OSError.
    """
    with KeptChunks(target, num_bytes=num_bytes) as kept:
        on_progress(kept.done_bytes, num_bytes)
        fetching = _Fetching(transport, kept, layout, num_elements, num_bytes, on_progress, on_place)
        lines: dict[str, float] = {}  # seconds to wait, by peer id
        for donor in donors:
            manifest = await fetching.try_donor(donor, lines, may_wait=False)
            if manifest:
                return manifest
        for donor in sorted((donor for donor in donors if donor.peer_id in lines), key=lambda d: lines[d.peer_id]):
            manifest = await fetching.try_donor(donor, lines, may_wait=True)
            if manifest:
                return manifest
    return None


async def fetch_from_swarm(
    transport: Transport,
    directory: Directory,
    donors: Sequence[Candidate],
    *,
    layout: str,
    num_elements: int,
    num_bytes: int,
    target: Path,
    on_progress: Report = ignore,
    on_place: Callable[[Candidate, QueuePlace | None], None] = nobody_waits,
) -> StateManifest | None:
    """As `fetch_state`; when none of `donors` has given all, those that came to the swarm meanwhile are asked, too."""
    asked: set[str] = set()
    while donors:
        manifest = await fetch_state(
            transport,
            donors,
            layout=layout,
            num_elements=num_elements,
            num_bytes=num_bytes,
            target=target,
            on_progress=on_progress,
            on_place=on_place,
        )
        if manifest:
            return manifest
        asked |= {donor.peer_id for donor in donors}
        donors = [donor for donor in directory.live() if donor.peer_id not in asked and can_give(donor)]
    return None


def can_give(peer: Candidate) -> bool:
    """May have a state to give, and can be asked for it."""
    return peer.can_be_called and peer.state in GIVING


class _Fetching:
    """One fetch over its donors."""

    def __init__(
        self,
        transport: Transport,
        kept: KeptChunks,
        layout: str,
        num_elements: int,
        num_bytes: int,
        on_progress: Report,
        on_place: Callable[[Candidate, QueuePlace | None], None],
    ) -> None:
        self._transport = transport
        self._kept = kept
        self._shape = (layout, num_elements, num_bytes, -(-num_bytes // STATE_CHUNK_BYTES))
        self._num_bytes = num_bytes
        self._on_progress = on_progress
        self._on_place = on_place

    async def try_donor(self, donor: Candidate, lines: dict[str, float], *, may_wait: bool) -> StateManifest | None:
        """Its manifest when all chunks are here now. Notes in `lines` how long a donor that is not waited for takes."""
        try:
            manifest = await self._manifest(donor)
            await self._chunks(donor, manifest, may_wait=may_wait)
        except _InLine as error:
            lines[donor.peer_id] = math.inf if error.place.left_s is None else error.place.left_s
        except PeerError as error:
            if isinstance(error, Refused) and error.code == RefuseCode.BUSY.name:
                lines[donor.peer_id] = error.retry_after_s
            num_missing = len(self._kept.missing)
            log.info("no state from %s: %s; %d chunks are still missing", donor.address, error, num_missing)
        else:
            if not self._kept.missing:
                self._kept.finish()
                return manifest
        return None

    async def _manifest(self, donor: Candidate) -> StateManifest:
        async with aclosing(self._transport.fetch(donor, WantManifest(), timeout_s=FETCH_TIMEOUT_S)) as items:
            async for item in items:
                if isinstance(item, StateManifest):
                    shape = (item.layout, item.num_elements, item.num_bytes, len(item.chunk_digests))
                    if shape != self._shape:
                        raise CorruptPayload("its state is of another model or size", peer=donor.peer_id)
                    return item
        raise CorruptPayload("it gave no manifest", peer=donor.peer_id)

    async def _chunks(self, donor: Candidate, manifest: StateManifest, *, may_wait: bool) -> None:
        want = WantChunks(manifest.digest(), tuple(self._kept.missing))
        waits = False
        async with aclosing(self._transport.fetch(donor, want, timeout_s=FETCH_TIMEOUT_S)) as items:
            async for item in items:
                if isinstance(item, QueuePlace):
                    if not may_wait:
                        raise _InLine(item)
                    waits = True
                    self._on_place(donor, item)
                    continue
                if waits:
                    waits = False
                    self._on_place(donor, None)
                self._keep(item, manifest)
                self._on_progress(self._kept.done_bytes, self._num_bytes)

    def _keep(self, item: FetchItem, manifest: StateManifest) -> None:
        """Raises CorruptPayload for what was not asked for next, or is damaged."""
        kept = self._kept
        if not isinstance(item, StateChunk) or not kept.missing or item.index != kept.missing[0]:
            raise CorruptPayload("a chunk came that was not asked for")
        digest = manifest.chunk_digests[item.index]
        if len(item.payload) != kept.size(item.index) or blake3(item.payload).digest() != digest:
            raise CorruptPayload(f"chunk {item.index} of the state is damaged")
        kept.put(item.index, item.payload, digest)


class _InLine(Exception):
    """The donor is busy; `place` is that of this newcomer in its line."""

    def __init__(self, place: QueuePlace) -> None:
        super().__init__(f"place {place.position}")
        self.place = place
