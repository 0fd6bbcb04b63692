"""A newcomer fetches the run spec, and then the newest saved state chunk by chunk from one or more live donors.

A donor's manifest contains a digest of each chunk. If a donor or this program dies, the verified chunks are kept, and
another donor sends the rest. The result then combines chunks of different replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
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
    RefuseCode,
    SpecJson,
    StateChunk,
    StateManifest,
    WantChunks,
    WantLayout,
    WantManifest,
    WantSpec,
)
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import Candidate, Transport
from noloco_p2p.spec import Spec
from noloco_p2p.telemetry.console import named
from noloco_p2p.telemetry.progress import Report, ignore
from noloco_p2p.transfer.kept_chunks import KeptChunks

log = logging.getLogger(__name__)

T = TypeVar("T", bound=FetchItem)

MESSAGE_TIMEOUT_S = 15.0  # for one chunk, or one part of a manifest
ANSWER_S = 60.0  # for a whole spec, layout or manifest; the manifest of a 64 GiB state takes 2 MiB
GIVING = ("training", "paused", "done")  # peers in these states may have a saved state to serve


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """The limits that a newcomer applies to its donors.

    A busy donor asks for a pause before the next request, and `least_retry_s` and `longest_retry_s` bound that pause.
    Rates are measured over `window_s`. A donor is slow if its rate is below `fast_bytes_per_s` and the whole state
    would take longer than `whole_state_s`. If no chunk arrives for `idle_s` because donors are busy, the newcomer
    returns to a slow donor or gives up. It requests at most `chunks_per_call` chunks at once.
    """

    least_retry_s: float = 1.0
    longest_retry_s: float = 30.0
    window_s: float = 60.0
    whole_state_s: float = 3600.0
    fast_bytes_per_s: float = 1e6
    idle_s: float = 600.0
    chunks_per_call: int = MAX_CHUNKS_PER_REQUEST


INTERNET = FetchLimits()


class Admission(Protocol):
    """The checks that a state must pass before it is used. Digests only prove that a state arrived intact.

    A check that fails raises CheckpointError with the reason, and the next donor is asked.
    """

    async def check_position(self, donor: Candidate, manifest: StateManifest) -> None:
        """Before any chunk is fetched, check the position in the run that the manifest states."""
        ...

    async def check_state(self, donor: Candidate, manifest: StateManifest, path: Path) -> None:
        """Check the whole file, of which `donor` sent the last chunk."""
        ...

    def refuse(self, donor: Candidate, why: str) -> None:
        """Record that a donor sent data that no honest peer of the run would send."""
        ...


async def fetch_spec(transport: Transport, donors: Sequence[Candidate], *, expected_digest: str) -> Spec:
    """Fetch the run spec from the first donor that serves it. Raises Unreachable if none does."""
    reasons = []
    for donor in donors:
        try:
            spec = await ask(transport, donor, WantSpec(), SpecJson)
            return Spec.from_json(spec.data, expected_digest=expected_digest, origin=donor.address)
        except (PeerError, ValueError) as error:
            reasons.append(f"{named(donor.peer_id)}: {error}")
    raise Unreachable(
        "could not get the run spec from any live peer: " + ("; ".join(reasons) or "no live peer was found")
    )


async def fetch_manifest(transport: Transport, donor: Candidate) -> StateManifest:
    """Fetch the manifest of the state that a peer serves. Raises PeerError if the peer does not send it."""
    return await ask(transport, donor, WantManifest(), StateManifest)


def can_give(peer: Candidate) -> bool:
    """Return whether a peer can be called and may have a saved state that it can serve."""
    return peer.can_be_called and peer.state in GIVING


async def fetch_state(
    transport: Transport,
    donors: Sequence[Candidate],
    *,
    layout: str,
    num_elements: int,
    num_bytes: int,
    target: Path,
    admission: Admission,
    newer_than: float = -math.inf,
    live: Callable[[], Sequence[Candidate]] = tuple,
    may_end_busy: bool = True,
    on_progress: Report = ignore,
    on_wait: Callable[[bool], None] = lambda waits: None,
    limits: FetchLimits = INTERNET,
    clock: Callable[[], float] = time.monotonic,
) -> StateManifest | None:
    """Fetch the state of a live peer and write it to `target`.

    The donors are asked in the given order, followed by the peers that `live` lists at that time. Busy donors are asked
    again until one has a free slot. Slow donors are abandoned, and the fastest of them is used only if no other donor
    can serve the state. If a donor dies, the verified chunks are kept. If this program dies, they are kept in `target`
    for an hour. A state that fails `admission` is discarded.

    `layout`, `num_elements` and `num_bytes` describe this peer's own state file. A state that differs is refused before
    any chunk is fetched. A donor serves the last state that it saved, whose progress must exceed `newer_than`. If
    `may_end_busy` is false, busy donors are asked again until the caller's deadline. `on_progress` is called with the
    number of verified bytes and the total. `on_wait` is called with True when all donors are busy, and with False when
    a chunk arrives.

    Returns the manifest of the donor that sent the last chunk, or None if no donor has a matching state. Raises OSError
    if `target` cannot be written.
    """
    async with KeptChunks(target, num_bytes=num_bytes) as kept:
        fetch = _Fetch(
            transport,
            kept,
            layout=layout,
            num_elements=num_elements,
            num_bytes=num_bytes,
            target=target,
            admission=admission,
            newer_than=newer_than,
            live=live,
            may_end_busy=may_end_busy,
            on_progress=on_progress,
            on_wait=on_wait,
            limits=limits,
            clock=clock,
        )
        return await fetch.run(donors)


class DonorRate:
    """Measures the rate of one donor over all calls to it. Callers supply the current time as an argument."""

    def __init__(self, num_bytes: int, limits: FetchLimits) -> None:
        self._num_bytes = num_bytes  # the size of the whole state
        self._limits = limits
        self._began_s: float | None = None
        self._received = 0

    def too_slow_s(self, num_bytes: int, now_s: float) -> float | None:
        """Record a chunk. If the donor is too slow, return the seconds that the whole state would take."""
        if self._began_s is None:  # the time at which the first chunk was requested is unknown
            self._began_s = now_s
            return None
        self._received += num_bytes
        elapsed_s = now_s - self._began_s
        if elapsed_s < self._limits.window_s:
            return None
        rate = self._received / elapsed_s
        self._began_s, self._received = now_s, 0
        whole_s = self._num_bytes / rate
        return whole_s if rate < self._limits.fast_bytes_per_s and whole_s > self._limits.whole_state_s else None


class _Slow(Exception):
    """The rate of a donor is below the minimum."""

    def __init__(self, whole_s: float) -> None:
        super().__init__(f"too slow: fetching the whole state would take {whole_s / 3600:.1f} h")
        self.whole_s = whole_s


@dataclass
class _Fetch:
    """One fetch of a state.

    `busy` maps each busy donor to the time at which to ask it again. `slow` maps each slow donor to the seconds that it
    would need for the whole state.
    """

    transport: Transport
    kept: KeptChunks
    _: KW_ONLY
    layout: str
    num_elements: int
    num_bytes: int
    target: Path
    admission: Admission
    newer_than: float
    live: Callable[[], Sequence[Candidate]]
    may_end_busy: bool
    on_progress: Report
    on_wait: Callable[[bool], None]
    limits: FetchLimits
    clock: Callable[[], float]
    to_ask: deque[Candidate] = field(default_factory=deque[Candidate], init=False)
    busy: dict[Candidate, float] = field(default_factory=dict[Candidate, float], init=False)
    slow: dict[Candidate, float] = field(default_factory=dict[Candidate, float], init=False)
    rates: dict[str, DonorRate] = field(default_factory=dict[str, DonorRate], init=False)
    known: set[str] = field(default_factory=set[str], init=False)
    moved_s: float = field(default=0.0, init=False)  # when the last chunk arrived

    async def run(self, donors: Sequence[Candidate]) -> StateManifest | None:
        self.on_progress(self.kept.done_bytes, self.num_bytes)
        self.moved_s = self.clock()
        self._add(donors)
        while True:
            may_be_slow = False
            donor = await self._next()
            if donor is None:
                if not self.slow:
                    return None
                donor, may_be_slow = min(self.slow, key=self.slow.__getitem__), True
                del self.slow[donor]
            if manifest := await self._try(donor, may_be_slow=may_be_slow):
                await self.kept.finish()
                return manifest

    def _add(self, donors: Sequence[Candidate]) -> None:
        self.to_ask.extend(donor for donor in donors if donor.peer_id not in self.known)
        self.known |= {donor.peer_id for donor in donors}

    async def _next(self) -> Candidate | None:
        """Return the next donor, waiting while all are busy, or None if only slow donors are left."""
        while not self.to_ask:
            self._add([peer for peer in self.live() if can_give(peer)])
            if self.to_ask or not self.busy:
                break
            is_idle = self.clock() - self.moved_s > self.limits.idle_s
            if is_idle and (self.slow or self.may_end_busy):
                break
            self.on_wait(True)
            donor = min(self.busy, key=self.busy.__getitem__)
            pause_s = max(self.busy.pop(donor) - self.clock(), 0.0)
            await asyncio.sleep(pause_s * random.uniform(1.0, 1.2))  # so that newcomers do not all ask at the same time
            self.to_ask.append(donor)
        return self.to_ask.popleft() if self.to_ask else None

    async def _try(self, donor: Candidate, *, may_be_slow: bool) -> StateManifest | None:
        """Fetch from `donor`, and return its manifest if the state is then complete and admitted."""
        is_whole = not self.kept.done_bytes  # no chunk is from another donor
        try:
            manifest = await self._manifest(donor)
            await self._chunks(donor, manifest, may_be_slow=may_be_slow)
        except _Slow as slow:
            log.info("switching from %s to another donor: %s", donor.address, slow)
            self.slow[donor] = slow.whole_s
        except (CheckpointError, CorruptPayload) as error:
            self._refuse(donor, error)
        except PeerError as error:
            log.info("could not fetch the state from %s: %s; %s", donor.address, error, self._missing())
            if isinstance(error, Refused) and error.code == RefuseCode.BUSY.name:
                retry_s = max(self.limits.least_retry_s, min(error.retry_after_s, self.limits.longest_retry_s))
                self.busy[donor] = self.clock() + retry_s
        else:
            if not self.kept.missing and await self._is_admitted(donor, manifest, is_whole=is_whole):
                return manifest
        return None

    async def _is_admitted(self, donor: Candidate, manifest: StateManifest, *, is_whole: bool) -> bool:
        """Return whether the state passes the check, and discard it otherwise.

        If other donors sent parts of a discarded state, this donor is asked again.
        """
        try:
            await self.admission.check_state(donor, manifest, self.target)
        except CheckpointError as error:
            self._refuse(donor, error)
            self.kept.start_over()
            if not is_whole:
                self.to_ask.appendleft(donor)
            return False
        return True

    def _refuse(self, donor: Candidate, error: Exception) -> None:
        log.warning("could not fetch the state from %s: %s; %s", donor.address, error, self._missing())
        self.admission.refuse(donor, str(error))

    def _missing(self) -> str:
        return f"chunks still missing: {len(self.kept.missing)}"

    async def _manifest(self, donor: Candidate) -> StateManifest:
        manifest = await fetch_manifest(self.transport, donor)
        shape = (manifest.layout, manifest.num_elements, manifest.num_bytes)
        num_chunks = -(-self.num_bytes // STATE_CHUNK_BYTES)
        if shape != (self.layout, self.num_elements, self.num_bytes) or len(manifest.chunk_digests) != num_chunks:
            raise CorruptPayload("its state belongs to another model or has the wrong size", peer=donor.peer_id)
        if manifest.progress <= self.newer_than:
            raise PeerError("its last saved state is no newer than this peer's state", peer=donor.peer_id)
        await self.admission.check_position(donor, manifest)
        return manifest

    async def _chunks(self, donor: Candidate, manifest: StateManifest, *, may_be_slow: bool) -> None:
        """Fetch the missing chunks, in as many calls as needed. Stop if the donor omits some of them."""
        rate = self.rates.setdefault(donor.peer_id, DonorRate(self.num_bytes, self.limits))
        while wanted := tuple(self.kept.missing[: self.limits.chunks_per_call]):
            want = WantChunks(manifest.digest(), wanted)
            async with aclosing(self.transport.fetch(donor, want, timeout_s=MESSAGE_TIMEOUT_S)) as items:
                async for item in items:
                    self._keep(item, manifest)
                    too_slow_s = rate.too_slow_s(STATE_CHUNK_BYTES, self.clock())
                    if too_slow_s and not may_be_slow and self.kept.missing:
                        raise _Slow(too_slow_s)
            if wanted[-1] in self.kept.missing:
                return

    def _keep(self, item: FetchItem, manifest: StateManifest) -> None:
        """Store a chunk. Raises CorruptPayload if the item is damaged or is not the chunk that was requested next."""
        kept = self.kept
        if not isinstance(item, StateChunk) or not kept.missing or item.index != kept.missing[0]:
            raise CorruptPayload("it sent a chunk that was not requested")
        digest = manifest.chunk_digests[item.index]
        if len(item.payload) != kept.size(item.index) or blake3(item.payload).digest() != digest:
            raise CorruptPayload(f"chunk {item.index} of the state is damaged")
        kept.put(item.index, item.payload, digest)
        self.moved_s = self.clock()
        self.on_wait(False)
        self.on_progress(kept.done_bytes, self.num_bytes)


async def ask(transport: Transport, peer: Candidate, want: FetchWant, kind: type[T]) -> T:
    """Send the request `want` to `peer` and return the response.

    Raises PeerError if no response of type `kind` arrives.
    """
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            aclosing(transport.fetch(peer, want, timeout_s=MESSAGE_TIMEOUT_S)) as items,
        ):
            item = await anext(items, None)
    except TimeoutError:
        raise TimedOut(f"it did not answer within {ANSWER_S:.0f} s", peer=peer.peer_id) from None
    if not isinstance(item, kind):
        raise CorruptPayload(f"it did not send a {kind.__name__}", peer=peer.peer_id)
    return item


async def find_difference(transport: Transport, peer: Candidate, ours: ModelLayout) -> str:
    """Describe the first tensor that differs in the model of `peer`.

    The result is empty if no tensor differs or the peer does not answer.
    """
    try:
        layout = await ask(transport, peer, WantLayout(), LayoutJson)
        return ours.first_difference(ModelLayout.from_json(layout.data))
    except (PeerError, ValueError) as error:
        log.debug("could not get the model layout of %s: %s", peer.address, error)
        return ""
