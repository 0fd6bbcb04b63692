"""A newcomer fetches the run spec, and then the newest saved state chunk by chunk from one or more live donors.

A donor's manifest contains a digest of each chunk. If a donor or this program dies, the verified chunks are kept, and
another donor sends the rest. The result then combines chunks of different replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

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
from noloco_p2p.peer_name import named
from noloco_p2p.spec import Spec
from noloco_p2p.telemetry.progress import Report, ignore
from noloco_p2p.transfer.donor import state_file_bytes

log = logging.getLogger(__name__)

T = TypeVar("T", bound=FetchItem)

MESSAGE_TIMEOUT_S = 15.0  # for one chunk, or one part of a manifest
ANSWER_S = 60.0  # for a whole spec, layout or manifest; the manifest of a 64 GiB state takes 2 MiB
GIVING = ("training", "paused", "done")  # peers in these states may have a saved state to serve
RETRY_S = (1.0, 30.0)  # the bounds of the pause before a busy donor is asked again
WINDOW_S = 60.0  # over which a rate is measured
ASSUMED_BYTES_PER_S = 1e6  # the rate of a donor that has not been measured
SLOW = 0.25  # a donor is left if its rate is less than this share of the rate of another donor
FAILED_RETRY_S = 30.0  # before a donor that gave nothing is asked again while others are busy
PATIENCE_S = 600.0  # without a chunk, while all donors are busy
CHUNKS_PER_CALL = MAX_CHUNKS_PER_REQUEST
POSITIONS_ASKED = 5  # peers that are asked for their position
MIN_POSITIONS = 3  # with fewer positions, it is unclear which one is wrong
POSITION_S = 5.0  # the time that each peer has to answer
DIGEST_BYTES = 32
# A donor's state is older than the losses that peers announce, and a newcomer has other data. Random weights are worse.
MOST_ABOVE = 0.5  # nats
NUM_ALIKE = 3  # states that are refused for their loss before another one like the best of them is accepted
KEPT_FOR_S = 3600.0  # after that, the chunks would be too old to be combined with new ones


class Admission:
    """The checks that a state must pass before it is used. Digests only prove that a state arrived intact.

    `layout` is that of this peer's own model. `live` returns the live peers in the directory. `check_file` checks a
    whole file, and raises CheckpointError with the reason. `loss_of` returns the loss of the state in a file on this
    peer's own data, or for None that of its own weights, which it has trained if `has_own`. `losses` holds those of the
    states that have been refused for it since the last state was accepted, also from earlier fetches.
    `refused` holds, by peer id, why a state was not fetched.
    """

    def __init__(
        self,
        spec: Spec,
        transport: Transport,
        layout: ModelLayout,
        *,
        live: Callable[[], Sequence[Candidate]],
        check_file: Callable[[Path], object],
        loss_of: Callable[[Path | None], float] | None = None,
        has_own: bool = False,
        losses: list[float] | None = None,
    ) -> None:
        self.layout, self.num_elements = layout.digest(), layout.num_elements
        self.num_bytes = state_file_bytes(layout.num_elements, spec.outer)
        self._check_file = check_file
        self._loss_of = loss_of
        self._has_own = has_own
        self._losses = [] if losses is None else losses
        self.refused: dict[str, str] = {}
        self._furthest = 2 * spec.furthest
        self._transport = transport
        self._live = live

    def check_manifest(self, manifest: StateManifest) -> None:
        """Raise CorruptPayload if a state belongs to another model."""
        num_chunks = -(-self.num_bytes // STATE_CHUNK_BYTES)
        found = (manifest.layout, manifest.num_elements, manifest.num_bytes, len(manifest.chunk_digests))
        if found != (self.layout, self.num_elements, self.num_bytes, num_chunks):
            raise CorruptPayload("its state belongs to another model or has the wrong size")

    async def check_state(self, path: Path) -> None:
        """Raise CheckpointError if the state in a file is not valid, or much worse than those of the other peers.

        The loss of a state may be 0.5 nats above the median of the losses that live peers announce. If this peer's data
        is harder than that of the others, all states seem worse. So it may also be 0.5 nats above that of the weights
        that this peer has trained, and, once three states have been refused, above the lowest of their losses: liars
        can answer before all honest peers, which may be saving. A newcomer does not wait for three if fewer other peers
        could give one.
        """
        await asyncio.to_thread(self._check_file, path)
        live = self._live()
        usual = [each.loss for each in live if each.loss is not None and math.isfinite(each.loss)]
        if not self._loss_of or not usual:
            return
        loss = await asyncio.to_thread(self._loss_of, path)
        enough = NUM_ALIKE if self._has_own else min(NUM_ALIKE, sum(map(can_give, live)) - 1)
        most = max(float(median(usual)), min(self._losses, default=loss) if len(self._losses) >= enough else -math.inf)
        if not loss <= most + MOST_ABOVE and self._has_own:
            most = max(most, await asyncio.to_thread(self._loss_of, None))
        if not loss <= most + MOST_ABOVE or loss == math.inf:
            if math.isfinite(loss):
                self._losses.append(loss)
            raise CheckpointError(
                f"its loss on this peer's data is {loss:.3g}, but the median of the swarm is {median(usual):.3g}"
            )
        self._losses.clear()

    async def check_position(self, progress: float) -> None:
        """Check the position that a donor claims against the records of live peers. Raises CheckpointError.

        If the difference is too large, ask some of these peers for their current positions, because a record can be as
        old as one heartbeat, and a short run moves far in that time.
        """
        live = self._live()
        if not self._is_far(progress, positions(live)):
            return
        fresh = positions(await ask_for_positions(self._transport, live))
        others = fresh if len(fresh) >= MIN_POSITIONS else positions(live)
        if self._is_far(progress, others):
            swarm = f"the swarm is at {100 * median(others):.1f} %"
            raise CheckpointError(f"the state is at {100 * progress:.1f} % of the schedule, but {swarm}")

    def _is_far(self, progress: float, others: Sequence[float]) -> bool:
        # NaN is far, too.
        return len(others) >= MIN_POSITIONS and not abs(progress - median(others)) <= self._furthest


def positions(live: Sequence[Candidate]) -> list[float]:
    """Return the progress of each peer that is training or done."""
    return [each.progress for each in live if each.state in ("training", "done")]


async def ask_for_positions(transport: Transport, live: Sequence[Candidate]) -> Sequence[Candidate]:
    """Ask a few live peers for their current position. Peers that do not answer are left out."""

    async def ask(peer: Candidate) -> Candidate | None:
        try:
            status = await transport.status(peer, timeout_s=POSITION_S)
        except PeerError:
            return None
        return replace(peer, state=status.state, progress=status.progress)

    callable_ = [peer for peer in live if peer.can_be_called]
    asked = random.sample(callable_, min(len(callable_), POSITIONS_ASKED))
    return [peer for peer in await asyncio.gather(*map(ask, asked)) if peer]


async def fetch_spec(transport: Transport, donors: Sequence[Candidate], *, expected_digest: str) -> Spec:
    """Fetch the run spec from the first donor that serves it. Raises Unreachable if none does."""
    reasons = []
    for donor in donors:
        try:
            spec = await ask(transport, donor, WantSpec(), SpecJson)
            return Spec.from_json(spec.data, expected_digest=expected_digest, origin=donor.address)
        except (PeerError, ValueError) as error:
            reasons.append(f"{named(donor.peer_id, donor.name)}: {error}")
    raise Unreachable(
        "could not get the run spec from any live peer: " + ("; ".join(reasons) or "no live peer was found")
    )


def can_give(peer: Candidate) -> bool:
    """Return whether a peer can be called and may have a saved state that it can serve."""
    return peer.can_be_called and peer.state in GIVING


class _TooSlow(PeerError):
    """Another donor may be much faster."""


@dataclass(eq=False, slots=True)
class _Donor:
    peer: Candidate
    bytes_per_s: float = ASSUMED_BYTES_PER_S  # 0 if it could not be asked or gave nothing
    ask_at_s: float = 0.0  # a busy donor is not asked before


async def fetch_state(
    transport: Transport,
    peers: Sequence[Candidate],
    admission: Admission,
    *,
    target: Path,
    newer_than: float = -math.inf,
    live: Callable[[], Sequence[Candidate]] = tuple,
    patience_s: float = PATIENCE_S,
    on_progress: Report = ignore,
    clock: Callable[[], float] = time.monotonic,
) -> StateManifest | None:
    """Fetch the state of a live peer and write it to `target`.

    One donor is asked at a time, the fastest first. Donors that have not been measured are asked in the order of
    `peers`, followed by the peers that `live` lists at that time. Busy donors are asked again until one has a free
    slot, or until no chunk has arrived for `patience_s`. Meanwhile, donors that gave nothing are asked again. A donor
    that turns out to be slow is left if another may be much faster. If a connection breaks or a donor dies, the
    verified chunks are kept. If this program dies, they are kept in `target` for an hour. A state that fails
    `admission` is discarded.

    A donor serves the last state that it saved, whose progress must exceed `newer_than`. `on_progress` is called with
    the number of verified bytes and the total.

    Returns the manifest of the donor that sent the last chunk, or None if no donor has a matching state. Raises OSError
    if `target` cannot be written.
    """
    num_bytes = admission.num_bytes
    kept = await asyncio.to_thread(KeptChunks, target, num_bytes=num_bytes)
    on_progress(kept.done_bytes, num_bytes)
    donors = [_Donor(peer) for peer in peers]
    known = {peer.peer_id for peer in peers}
    moved_s, num_waits = clock(), 0

    def free_donors() -> list[_Donor]:
        """Return the donors that can be asked now, including the peers that have just entered the swarm."""
        new = [peer for peer in live() if can_give(peer) and peer.peer_id not in known]
        known.update(peer.peer_id for peer in new)
        donors.extend(map(_Donor, new))
        # Those that gave nothing are asked again, because one that is always busy could keep this peer from the others.
        may_give = any(donor.bytes_per_s for donor in donors)
        return [donor for donor in donors if may_give and donor.ask_at_s <= clock()]

    def is_slow(donor: _Donor) -> bool:
        return donor.bytes_per_s < SLOW * max((other.bytes_per_s for other in free_donors()), default=0.0)

    def told(num_done: int) -> None:
        nonlocal moved_s, num_waits
        moved_s, num_waits = clock(), 0
        on_progress(num_done, num_bytes)

    while True:
        free = free_donors()
        if not free:
            if not any(donor.bytes_per_s for donor in donors) or clock() - moved_s > patience_s:
                return None
            if not num_waits:
                log.info("all peers that can give their state are busy; waiting until one has a free slot")
            num_waits += 1
            pause_s = min(donor.ask_at_s for donor in donors) - clock()
            await asyncio.sleep(pause_s * random.uniform(1.0, 1.2))  # so that newcomers do not all ask at the same time
            continue
        donor = max(free, key=lambda each: each.bytes_per_s)
        donors.remove(donor)
        began_bytes = kept.done_bytes
        try:
            manifest = await ask(transport, donor.peer, WantManifest(), StateManifest)
            admission.check_manifest(manifest)
            if manifest.progress <= newer_than:
                raise PeerError("its last saved state is no newer than this peer's state")
            await admission.check_position(manifest.progress)
            await _fetch_chunks(transport, donor, manifest, kept, is_slow=is_slow, on_chunk=told, clock=clock)
            await admission.check_state(target)
        except (CheckpointError, CorruptPayload) as error:
            log.warning("could not fetch the state from %s: %s", donor.peer.address, error)
            admission.refused[donor.peer.peer_id] = str(error)
            if not kept.missing:
                kept.start_over()
                if began_bytes:  # the fault may be in a chunk of another donor
                    donors.insert(0, donor)
        except PeerError as error:
            admission.refused[donor.peer.peer_id] = str(error)
            log.info(
                "could not fetch the state from %s: %s; chunks still missing: %d",
                donor.peer.address,
                error,
                len(kept.missing),
            )
            if isinstance(error, Refused) and error.code == RefuseCode.BUSY.name:
                least, most = RETRY_S
                donor.ask_at_s = clock() + max(least, min(error.retry_after_s, most))
                donor.bytes_per_s = donor.bytes_per_s or ASSUMED_BYTES_PER_S
                donors.append(donor)
            elif isinstance(error, _TooSlow):
                donors.append(donor)
            elif kept.done_bytes > began_bytes:  # the connection broke; another donor is asked first
                donor.bytes_per_s = 1.0
                donors.append(donor)
            else:
                donor.bytes_per_s, donor.ask_at_s = 0.0, clock() + FAILED_RETRY_S
                donors.append(donor)
        else:
            kept.finish()
            return manifest


async def _fetch_chunks(
    transport: Transport,
    donor: _Donor,
    manifest: StateManifest,
    kept: KeptChunks,
    *,
    is_slow: Callable[[_Donor], bool],
    on_chunk: Callable[[int], None],
    clock: Callable[[], float],
) -> None:
    """Fetch the missing chunks from one donor, in as many calls as needed, and measure its rate.

    Raises PeerError if the donor does not send all of them, and CorruptPayload if one is damaged.
    """
    window: tuple[float, int] | None = None  # its start, and the missing chunks at that time
    while wanted := tuple(kept.missing[:CHUNKS_PER_CALL]):
        want = WantChunks(manifest.digest(), wanted)
        async with aclosing(transport.fetch(donor.peer, want, timeout_s=MESSAGE_TIMEOUT_S)) as items:
            async for item in items:
                if not isinstance(item, StateChunk) or item.index != kept.missing[0]:
                    raise CorruptPayload("it sent a chunk that was not requested")
                digest = manifest.chunk_digests[item.index]
                if len(item.payload) != kept.size(item.index) or blake3(item.payload).digest() != digest:
                    raise CorruptPayload(f"chunk {item.index} of the state is damaged")
                kept.put(item.index, item.payload, digest)
                on_chunk(kept.done_bytes)
                if not kept.missing:
                    return
                now_s = clock()
                began_s, num_missing = window = window or (now_s, len(kept.missing))
                if now_s - began_s >= WINDOW_S:
                    donor.bytes_per_s = STATE_CHUNK_BYTES * (num_missing - len(kept.missing)) / (now_s - began_s)
                    window = None
                    if is_slow(donor):
                        raise _TooSlow(f"it sends only {donor.bytes_per_s / 1e3:.0f} kB/s")
        if wanted[-1] in kept.missing:
            raise PeerError("it did not send all chunks that were requested")


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


def forget(path: Path) -> None:
    """Remove an incomplete file and its digests."""
    for each in (path, _digests_path(path)):
        each.unlink(missing_ok=True)


def _digests_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.digests")


class KeptChunks:
    """The verified chunks of an incomplete file. `missing` lists the indices of all others.

    FILE.digests, next to the file, has 32 bytes per chunk: the digest of a verified chunk, or zeros for a missing one.
    When the file is opened again, all chunks are hashed to find those that a crash has damaged, so writes can reach the
    disk in any order.

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
        """Remove the digests of a complete file, which is loaded at once and then removed."""
        assert not self.missing
        self._digests_path.unlink()

    def _is_fresh(self) -> bool:
        try:
            begun = (self._path.stat(), self._digests_path.stat())
        except FileNotFoundError:
            return False
        is_same = [stat.st_size for stat in begun] == [self._num_bytes, DIGEST_BYTES * self._num_chunks]
        age_s = time.time() - begun[1].st_mtime  # negative if the clock was ahead
        return is_same and abs(age_s) < KEPT_FOR_S
