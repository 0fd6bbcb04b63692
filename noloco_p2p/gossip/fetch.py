"""The first fetch: run spec and newest saved state of a live peer, chunk by chunk, from as many donors as it takes.

Every chunk has a digest in the donor's manifest. When a donor dies, or this program does, the verified chunks are kept
and the rest comes from another donor: the result is then a point between two replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from blake3 import blake3

from noloco_p2p.errors import CheckpointError, CorruptPayload, PeerError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.frames import (
    MAX_CHUNKS_PER_REQUEST,
    STATE_CHUNK_BYTES,
    FetchItem,
    FetchWant,
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
from noloco_p2p.gossip.patience import Patience
from noloco_p2p.gossip.seams import Candidate, Directory, Transport
from noloco_p2p.spec import Spec
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.progress import Report, ignore

log = logging.getLogger(__name__)

T = TypeVar("T", bound=FetchItem)

GIVING = ("training", "paused", "done")  # states of peers that may have a state to give
FETCH_TIMEOUT_S = 15.0  # for one chunk, one part of a manifest, or the next word from the line
BUSY_FOR_S = 600.0  # a donor whose line is full, or whose state is a newer one by now, is asked again for so long
BUSY_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0  # after at least and at most so long, whatever it says
ANSWER_S = 60.0  # for all of a spec, a layout or a manifest; that of 64 GiB has 2 MiB


class Admission(Protocol):
    """What a state must pass before it is taken: a digest only says that it came as it was sent.

    The checks raise CheckpointError, which says what is wrong; the next donor is asked then.
    """

    async def check_place(self, donor: Candidate, manifest: StateManifest) -> None:
        """Before anything of the state is fetched: where the donor says that it stood in the run."""
        ...

    async def check_state(self, donor: Candidate, manifest: StateManifest, path: Path) -> None:
        """The whole file. `donor` gave the last chunk of it."""
        ...

    def refuse(self, donor: Candidate, why: str) -> None:
        """What the donor gave, or said of it, is not what an honest peer of the run has."""
        ...


async def fetch_spec(transport: Transport, donors: Sequence[Candidate], *, expected_digest: str) -> Spec:
    """The run spec from the first donor that has it. Raises Unreachable when none has."""
    reasons = []
    for donor in donors:
        try:
            spec = await _answer(transport, donor, WantSpec(), SpecJson)
            return Spec.from_json(spec.data, expected_digest=expected_digest, origin=donor.address)
        except (PeerError, ValueError) as error:
            reasons.append(f"{named(donor.peer_id)}: {error}")
    raise Unreachable("no live peer gave the run spec: " + ("; ".join(reasons) or "nobody is there"))


async def find_difference(transport: Transport, peer: Candidate, ours: ModelLayout) -> str:
    """The first tensor that is another one in the model of `peer`, for people; "" when it has the same or is silent."""
    try:
        layout = await _answer(transport, peer, WantLayout(), LayoutJson)
        return ours.first_difference(ModelLayout.from_json(layout.data))
    except (PeerError, ValueError) as error:
        log.debug("%s does not tell its tensors: %s", peer.address, error)
        return ""


async def fetch_manifest(transport: Transport, donor: Candidate) -> StateManifest:
    """What a peer says of the state that it can give. Raises PeerError."""
    return await _answer(transport, donor, WantManifest(), StateManifest)


async def _answer(transport: Transport, donor: Candidate, want: FetchWant, kind: type[T]) -> T:
    """The one item that answers a question. Raises PeerError."""
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            aclosing(transport.fetch(donor, want, timeout_s=FETCH_TIMEOUT_S)) as items,
        ):
            item = await anext(items, None)
    except TimeoutError:
        raise TimedOut(f"its answer did not come whole within {ANSWER_S:.0f} s", peer=donor.peer_id) from None
    if not isinstance(item, kind):
        raise CorruptPayload(f"it gave no {kind.__name__}", peer=donor.peer_id)
    return item


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
    admission: Admission,
    on_progress: Report = ignore,
    on_place: Callable[[Candidate, QueuePlace | None], None] = nobody_waits,
    clock: Callable[[], float] = time.monotonic,
) -> StateManifest | None:
    """Write the state of a live peer to `target`; None when no donor has one that fits.

    Each donor is asked in turn; those with a line of newcomers come next, and are waited for, the shortest first; those
    that were left as they are slow come last, the fastest first. Verified chunks are kept when their donor dies, and in
    `target` for an hour when this program does. A state that does not pass `admission` is thrown away whole.

    `num_bytes` is the size of our own state file: any other is refused before a byte is read. The manifest that is
    returned is of the donor that gave the last chunk. `on_progress` is told the verified bytes, those kept of a dead
    donor too; `on_place` the place in a donor's line, and None when the turn has come. Raises OSError.
    """
    async with KeptChunks(target, num_bytes=num_bytes) as kept:
        fetching = _Fetching(
            transport,
            kept,
            layout=layout,
            num_elements=num_elements,
            num_bytes=num_bytes,
            target=target,
            admission=admission,
            on_progress=on_progress,
            on_place=on_place,
            clock=clock,
        )
        return await fetching.from_one_of(donors)


async def fetch_from_swarm(
    transport: Transport,
    directory: Directory,
    donors: Sequence[Candidate],
    *,
    layout: str,
    num_elements: int,
    num_bytes: int,
    target: Path,
    admission: Admission,
    newer_than: float = -math.inf,
    on_progress: Report = ignore,
    on_place: Callable[[Candidate, QueuePlace | None], None] = nobody_waits,
) -> StateManifest | None:
    """As `fetch_state`; when none of `donors` has given all, those that came to the swarm meanwhile are asked, too, and
    again those that were too busy: None when nobody is left who may have a state.

    newer_than: the progress that a state must be beyond. A donor gives what it saved last, and one that has come back
    or caught up a moment ago stands far beyond that."""
    asked: set[str] = set()
    async with KeptChunks(target, num_bytes=num_bytes) as kept:
        fetching = _Fetching(
            transport,
            kept,
            layout=layout,
            num_elements=num_elements,
            num_bytes=num_bytes,
            target=target,
            admission=admission,
            newer_than=newer_than,
            on_progress=on_progress,
            on_place=on_place,
            clock=time.monotonic,
        )
        while donors:
            if manifest := await fetching.from_one_of(donors):
                return manifest
            asked |= {donor.peer_id for donor in donors}
            new = [donor for donor in directory.live() if donor.peer_id not in asked and can_give(donor)]
            donors = [*new, *fetching.slow]
    return None


def can_give(peer: Candidate) -> bool:
    """May have a state to give, and can be asked for it."""
    return peer.can_be_called and peer.state in GIVING


@dataclass
class _Fetching:
    """One fetch over its donors.

    Those that were passed over: `lines`, the seconds to wait there; `slow`, those that the whole state would take,
    infinite where a turn never came.
    """

    transport: Transport
    kept: KeptChunks
    _: KW_ONLY
    layout: str
    num_elements: int
    num_bytes: int
    target: Path
    admission: Admission
    newer_than: float = -math.inf
    on_progress: Report
    on_place: Callable[[Candidate, QueuePlace | None], None]
    clock: Callable[[], float]
    lines: dict[Candidate, float] = field(default_factory=dict[Candidate, float], init=False)
    slow: dict[Candidate, float] = field(default_factory=dict[Candidate, float], init=False)

    def __post_init__(self) -> None:
        self.on_progress(self.kept.done_bytes, self.num_bytes)

    @property
    def num_missing(self) -> int:
        return len(self.kept.missing)

    async def from_one_of(self, donors: Sequence[Candidate]) -> StateManifest | None:
        """The manifest of the donor with which all chunks are here; None when there is none: who might give a state
        another time is in `slow`."""
        self.lines, self.slow = {}, {}
        if manifest := await self._try_all(donors) or await self._try_all(_in_order(self.lines), may_wait=True):
            return manifest
        slow, self.slow = self.slow, {}
        return await self._try_all(_in_order(slow), may_wait=True, may_be_slow=True)

    async def _try_all(
        self, donors: Iterable[Candidate], *, may_wait: bool = False, may_be_slow: bool = False
    ) -> StateManifest | None:
        for donor in donors:
            if manifest := await self._try(donor, may_wait=may_wait, may_be_slow=may_be_slow):
                return manifest
        return None

    async def _try(self, donor: Candidate, *, may_wait: bool, may_be_slow: bool) -> StateManifest | None:
        patience, num_missing, until_s = Patience(self.num_bytes), -1, 0.0
        while True:
            is_whole = not self.kept.done_bytes  # nothing is here of another donor
            try:
                manifest = await self._manifest(donor)
                await self._chunks(donor, manifest, patience, may_wait=may_wait, may_be_slow=may_be_slow)
            except _PassedOver as why:
                log.info("no state from %s yet: %s", donor.address, why)
                return None
            except (CheckpointError, CorruptPayload) as error:
                self._refuse(donor, error)
                return None
            except PeerError as error:
                log.info("no state from %s: %s; %d chunks are still missing", donor.address, error, self.num_missing)
                if not isinstance(error, Refused) or error.code != RefuseCode.BUSY.name:
                    return None
                self.lines[donor] = error.retry_after_s
                if num_missing != self.num_missing:
                    num_missing, until_s = self.num_missing, self.clock() + BUSY_FOR_S
                if not may_wait:
                    return None
                if self.clock() > until_s:
                    self.slow[donor] = math.inf
                    return None
                await asyncio.sleep(min(max(error.retry_after_s, BUSY_RETRY_S), LONGEST_RETRY_S))
            else:
                if self.kept.missing:
                    return None
                if await self._is_admitted(donor, manifest):
                    await self.kept.finish()
                    return manifest
                if is_whole:
                    return None

    async def _is_admitted(self, donor: Candidate, manifest: StateManifest) -> bool:
        """Otherwise nothing is kept: one of several donors may have spoiled the state, and this one is not to blame."""
        try:
            await self.admission.check_state(donor, manifest, self.target)
        except CheckpointError as error:
            self._refuse(donor, error)
            self.kept.start_over()
            return False
        return True

    def _refuse(self, donor: Candidate, error: Exception) -> None:
        log.warning("no state from %s: %s; %d chunks are still missing", donor.address, error, self.num_missing)
        self.admission.refuse(donor, str(error))

    async def _manifest(self, donor: Candidate) -> StateManifest:
        manifest = await fetch_manifest(self.transport, donor)
        shape = (manifest.layout, manifest.num_elements, manifest.num_bytes)
        num_chunks = -(-self.num_bytes // STATE_CHUNK_BYTES)
        if shape != (self.layout, self.num_elements, self.num_bytes) or len(manifest.chunk_digests) != num_chunks:
            raise CorruptPayload("its state is of another model or size", peer=donor.peer_id)
        if manifest.progress <= self.newer_than:
            sentence = f"what it saved last is of round {manifest.round}, no further than this peer is"
            raise PeerError(sentence, peer=donor.peer_id)
        await self.admission.check_place(donor, manifest)
        return manifest

    async def _chunks(
        self, donor: Candidate, manifest: StateManifest, patience: Patience, *, may_wait: bool, may_be_slow: bool
    ) -> None:
        """What is missing, in as many calls as that takes; all of it unless the donor leaves something out."""
        while wanted := tuple(self.kept.missing[:MAX_CHUNKS_PER_REQUEST]):
            patience.asks_again()
            want, waits = WantChunks(manifest.digest(), wanted), False
            async with aclosing(self.transport.fetch(donor, want, timeout_s=FETCH_TIMEOUT_S)) as items:
                async for item in items:
                    if isinstance(item, QueuePlace):
                        waits = True
                        self._wait(donor, item, patience, may_wait=may_wait)
                        continue
                    if waits:
                        waits = False
                        self.on_place(donor, None)
                    self._keep(item, manifest)
                    self.on_progress(self.kept.done_bytes, self.num_bytes)
                    slow_s = patience.slow_s(STATE_CHUNK_BYTES, self.clock())
                    if slow_s and not may_be_slow and self.kept.missing:
                        self.slow[donor] = slow_s
                        raise _PassedOver("it is slow")
            if wanted[-1] in self.kept.missing:
                return

    def _wait(self, donor: Candidate, place: QueuePlace, patience: Patience, *, may_wait: bool) -> None:
        """Raises _PassedOver when it is not waited for, or the turn should have come long ago."""
        if not may_wait:
            self.lines[donor] = math.inf if place.left_s is None else place.left_s
            raise _PassedOver(f"place {place.position} in its line")
        if not patience.waits(place, self.clock()):
            self.on_place(donor, None)
            self.slow[donor] = math.inf
            raise _PassedOver("its line takes much longer than it said")
        self.on_place(donor, place)

    def _keep(self, item: FetchItem, manifest: StateManifest) -> None:
        """Raises CorruptPayload for what was not asked for next, or is damaged."""
        kept = self.kept
        if not isinstance(item, StateChunk) or not kept.missing or item.index != kept.missing[0]:
            raise CorruptPayload("a chunk came that was not asked for")
        digest = manifest.chunk_digests[item.index]
        if len(item.payload) != kept.size(item.index) or blake3(item.payload).digest() != digest:
            raise CorruptPayload(f"chunk {item.index} of the state is damaged")
        kept.put(item.index, item.payload, digest)


def _in_order(seconds: dict[Candidate, float]) -> Sequence[Candidate]:
    return sorted(seconds, key=seconds.__getitem__)


class _PassedOver(Exception):
    """This donor is asked again after the others."""
