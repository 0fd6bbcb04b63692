"""The frames that two peers exchange during a swap. `net` puts them on the wire; `testing` passes them in memory.

initiator                     acceptor
Offer(hello, ...)    ->
                     <-     Accept(hello, ...) | Refuse(code, sentence, retry_after_s)
Grid                  <->   Grid                     for each section that is coded modulo
Header, Chunk.., End  <->   Header, Chunk.., End     for each section of the early part
Header, Chunk.., End  <->   Header, Chunk.., End     again, for chunks that modulo coding could not carry, if any
Ready(EARLY)         <->    Ready(EARLY)
Header, Chunk.., End  <->   Header, Chunk.., End     for each section of the late part
Ready(LATE)          <->    Ready(LATE)
Abort(code, sentence) may end it from either side at any time
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import xxhash
from blake3 import blake3

PROTOCOL_VERSION = "1.0"  # peers with the same major number can talk
STATE_CHUNK_BYTES = 1 << 20
MAX_CHUNKS_PER_REQUEST = 16_384  # 16 GiB, named in 48 KiB; more chunks of a larger state take further calls

Payload = bytes | memoryview  # a payload from the network is a view of the message


def chunk_digest(payload: Payload) -> bytes:
    """A 16-byte digest that detects damage: XXH3-128, big-endian, seed 0.

    It is needed because the checksums of Ethernet and TCP miss some errors. Against a lying sender no digest of its own
    would help, so a cryptographic one (a tenth of the speed) would gain nothing.
    """
    return xxhash.xxh3_128_digest(payload)


class Part(IntEnum):
    """The early part: slow weights and outer momentum. The late part: the outer gradient. Each commits separately."""

    EARLY = 1
    LATE = 2


class SectionName(IntEnum):
    SLOW_WEIGHTS = 1
    OUTER_MOMENTUM = 2
    OUTER_GRADIENT = 3


class RefuseCode(IntEnum):
    """Why an offer is refused. The three groups pass soon, last for this round, and are permanent."""

    BUSY = 1  # I have made an offer, or am answering another one
    BETWEEN_ROUNDS = 2  # my round is not open
    CROSSED = 3  # we offered to each other; the stream of the higher peer id is used, and that is mine
    TAKEN = 4  # I have a partner for this round
    TOO_FAR = 5  # our boundaries are more than 0.6 of the shorter round apart
    NOT_TRAINING = 6  # paused, leaving or done
    OTHER_RUN = 7
    OTHER_SPEC = 8
    OTHER_VERSION = 9
    OTHER_MODEL = 10
    MALFORMED = 11
    NOT_PROVEN = 12  # the caller has not authenticated itself as its peer id
    NOT_INVITED = 13  # not invited to a private run
    BANNED = 14  # banned here, for a time
    STALE = 15  # our positions in the run are too far apart
    OVER_SHARE = 16  # you have had your share of my swaps; I prefer another peer
    UNLISTED = 17  # I know no live record of you yet


PASSED_ON = frozenset({RefuseCode.OVER_SHARE, RefuseCode.UNLISTED})  # another peer is drawn instead
PASSING = frozenset({RefuseCode.BUSY, RefuseCode.BETWEEN_ROUNDS, RefuseCode.CROSSED, RefuseCode.UNLISTED})
FINAL = frozenset(
    {
        RefuseCode.OTHER_RUN,
        RefuseCode.OTHER_SPEC,
        RefuseCode.OTHER_VERSION,
        RefuseCode.OTHER_MODEL,
        RefuseCode.MALFORMED,
        RefuseCode.NOT_INVITED,
    }
)


class AbortCode(IntEnum):
    CORRUPT = 1  # length, digest or value of a payload is wrong
    TIMED_OUT = 2
    ABANDONED = 3  # the round went on without the rest
    LEAVING = 4
    INTERNAL = 5


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of a peer and of its run.

    `layout` digests the parameters of the model, see `gossip.layout` ("" = not known yet).
    """

    peer_id: str
    run_name: str
    spec_digest: str
    protocol_version: str = PROTOCOL_VERSION
    layout: str = ""
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Boundary:
    """The position of a peer in its round, which decides whether two peers fit."""

    round: int
    seconds_to_boundary: float | None  # None = not measured yet (first round)
    seconds_per_round: float | None
    progress: float  # fraction of the run's schedule at the opening of the round
    # length of this round; progress and age are counted in the mean of both lengths (0 = same as yours)
    inner_steps: int = 0
    # the shortest that the peer can keep up with; None = not measured, or of fixed length
    shortest_round_s: float | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    hello: Hello
    swap_id: bytes  # 16 random bytes
    boundary: Boundary


@dataclass(frozen=True, slots=True)
class Accept:
    hello: Hello
    boundary: Boundary


@dataclass(frozen=True, slots=True)
class Refuse:
    code: RefuseCode
    sentence: str
    retry_after_s: float = 0.0


def other_kind(ours: Hello, theirs: Hello) -> Refuse | None:
    """Return why these two peers can never swap: another protocol version, run, spec or model; None when they can."""
    versions = [hello.protocol_version.split(".")[0] for hello in (ours, theirs)]
    if versions[0] != versions[1]:
        what = f"protocol version {PROTOCOL_VERSION} here, {theirs.protocol_version or 'none'} there"
        return Refuse(RefuseCode.OTHER_VERSION, what)
    if ours.run_name != theirs.run_name:
        return Refuse(RefuseCode.OTHER_RUN, f"run {ours.run_name} here, {theirs.run_name!r} there")
    if ours.spec_digest != theirs.spec_digest:
        what = f"spec digest {ours.spec_digest[:16]}.. here, {theirs.spec_digest[:16] or 'none'}.. there"
        return Refuse(RefuseCode.OTHER_SPEC, what)
    if ours.layout and theirs.layout and ours.layout != theirs.layout:
        return Refuse(RefuseCode.OTHER_MODEL, f"model layout {ours.layout[:16]}.. here, {theirs.layout[:16]}.. there")
    return None


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that this side proposes for a section: `codec.modulo.Bounds.propose()`, one exponent per block."""

    section: SectionName
    exponents: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """Announces a section, or those of its chunks that are sent again.

    It must equal what the receiver computed from the spec and the grid, or the part is aborted.
    """

    section: SectionName
    codec: str
    num_elements: int
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    section: SectionName
    index: int
    payload: Payload
    digest: bytes  # from `chunk_digest`


@dataclass(frozen=True, slots=True)
class End:
    section: SectionName
    digest: bytes  # blake3 over the digests of all chunks in order, 32 bytes


@dataclass(frozen=True, slots=True)
class Ready:
    part: Part


@dataclass(frozen=True, slots=True)
class Abort:
    code: AbortCode
    sentence: str


Frame = Offer | Accept | Refuse | Grid | Header | Chunk | End | Ready | Abort


@dataclass(frozen=True, slots=True)
class SwapState:
    """The answer to a question about a swap: which parts the peer has verified, and which it has committed."""

    known: bool = False
    verified: tuple[Part, ...] = ()
    committed: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The answer to a status question."""

    hello: Hello
    state: str
    round: int
    progress: float
    swap: SwapState = field(default_factory=SwapState)


@dataclass(frozen=True, slots=True)
class StateManifest:
    """The newest saved state of a donor: slow weights and outer momentum as one file, in chunks with a digest each.

    A newcomer takes `round` and `progress` from it. `layout` must equal its own. Chunks have STATE_CHUNK_BYTES except
    for the last; their number and the size of the file follow from the spec.
    """

    layout: str
    num_elements: int
    round: int
    progress: float
    num_bytes: int
    chunk_digests: tuple[bytes, ...]

    def digest(self) -> bytes:
        """Identifies this state: blake3 over the digests of its chunks."""
        return blake3(b"".join(self.chunk_digests)).digest()

    def chunk_range(self, index: int) -> tuple[int, int]:
        """The first byte of a chunk in the file, and the one after its last."""
        return index * STATE_CHUNK_BYTES, min((index + 1) * STATE_CHUNK_BYTES, self.num_bytes)


@dataclass(frozen=True, slots=True)
class WantSpec:
    """A request for the run spec."""


@dataclass(frozen=True, slots=True)
class WantManifest:
    """A request for the manifest of the newest saved state."""


@dataclass(frozen=True, slots=True)
class WantLayout:
    """A request for the tensors of the peer's model, sent when the digests of two layouts differ."""


@dataclass(frozen=True, slots=True)
class WantChunks:
    """A request for chunks of the state that `manifest_digest` identifies."""

    manifest_digest: bytes
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpecJson:
    data: bytes


@dataclass(frozen=True, slots=True)
class LayoutJson:
    data: bytes


@dataclass(frozen=True, slots=True)
class StateChunk:
    index: int
    payload: bytes


FetchWant = WantSpec | WantManifest | WantChunks | WantLayout
FetchItem = SpecJson | StateManifest | StateChunk | LayoutJson
