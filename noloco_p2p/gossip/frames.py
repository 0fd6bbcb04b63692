"""Two peers exchange these frames during a swap. `net` sends them over gRPC, and `testing` passes them in memory.

initiator                     acceptor
Offer(hello, ...)    ->
                     <-     Accept(hello, ...) | Refuse(code, sentence, retry_after_s)
Grid                  <->   Grid                     for each section with modulo coding
Header, Chunk.., End  <->   Header, Chunk.., End     for each section of the early part
Header, Chunk.., End  <->   Header, Chunk.., End     again, for chunks in which modulo coding failed
Ready(EARLY)         <->    Ready(EARLY)
Header, Chunk.., End  <->   Header, Chunk.., End     for each section of the late part
Ready(LATE)          <->    Ready(LATE)

Either peer can end the swap at any time by sending Abort(code, sentence).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import xxhash
from blake3 import blake3

PROTOCOL_VERSION = "1.0"  # peers with the same major version are compatible
STATE_CHUNK_BYTES = 1 << 20
MAX_CHUNKS_PER_REQUEST = 16_384  # covers 16 GiB of state with a list of 48 KiB; a larger state needs several requests

Payload = bytes | memoryview  # a payload from the network is a view of the message


def chunk_digest(payload: Payload) -> bytes:
    """Return a 16-byte digest that detects transmission errors: XXH3-128 with seed 0, big-endian.

    The digest is needed because the checksums of Ethernet and TCP miss some errors. A cryptographic digest would be ten
    times slower and would not help against malicious senders, who can compute a matching digest of any kind.
    """
    return xxhash.xxh3_128_digest(payload)


class Part(IntEnum):
    """A part of a swap. Each part is committed separately.

    The early part holds the slow weights and the outer momentum, and the late part holds the outer gradient.
    """

    EARLY = 1
    LATE = 2


class SectionName(IntEnum):
    SLOW_WEIGHTS = 1
    OUTER_MOMENTUM = 2
    OUTER_GRADIENT = 3


class RefuseCode(IntEnum):
    """The reason for refusing an offer.

    The reasons in PASSING are short-lived, the reasons in FINAL are permanent, and all others apply until the current
    round ends. In the comments, "this peer" is the peer that refuses the offer, and "the caller" is the peer that made
    it.
    """

    BUSY = 1  # this peer is occupied for the moment, for example because its own offer is unanswered
    BETWEEN_ROUNDS = 2  # this peer has no open round
    CROSSED = 3  # the peers made offers to each other, and this peer's offer is used because its peer id is higher
    TAKEN = 4  # this peer has a partner for this round
    TOO_FAR = 5  # the boundaries are further apart than 0.6 times the duration of the shorter round
    NOT_TRAINING = 6  # this peer is paused, leaving or done
    OTHER_RUN = 7
    OTHER_SPEC = 8
    OTHER_VERSION = 9
    OTHER_MODEL = 10
    MALFORMED = 11
    NOT_PROVEN = 12  # the caller has not proven that it owns its peer id
    NOT_INVITED = 13  # the caller is not invited to this private run
    BANNED = 14  # this peer has banned the caller temporarily
    STALE = 15  # the positions of the two peers in the run are too far apart
    OVER_SHARE = 16  # the caller has had its share of this peer's swaps, so other peers are preferred
    UNLISTED = 17  # this peer has not read a live record of the caller yet


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
    CORRUPT = 1  # a payload has a wrong length, digest or value
    TIMED_OUT = 2
    ABANDONED = 3  # the round ended before the swap was complete
    LEAVING = 4
    INTERNAL = 5


@dataclass(frozen=True, slots=True)
class Hello:
    """The identity of a peer and of its run.

    `layout` is the digest of the model's layout (see `gossip.layout`), or "" while that is unknown.
    """

    peer_id: str
    run_name: str
    spec_digest: str
    protocol_version: str = PROTOCOL_VERSION
    layout: str = ""
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Boundary:
    """A peer's position in its round. The positions of two peers determine whether they can swap."""

    round: int
    seconds_to_boundary: float | None  # None until it is measured in the first round
    seconds_per_round: float | None
    progress: float  # completed fraction of the run's schedule when the round opened
    # the length of this round, or 0 if it equals the partner's
    inner_steps: int = 0
    # the shortest round that the peer can keep up with; None if it is not measured or the length is fixed
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
    """Return a refusal if two peers can never swap because their protocol versions, runs, specs or models differ."""
    versions = [hello.protocol_version.split(".")[0] for hello in (ours, theirs)]
    if versions[0] != versions[1]:
        what = f"the protocol versions differ ({PROTOCOL_VERSION} and {theirs.protocol_version or 'none'})"
        return Refuse(RefuseCode.OTHER_VERSION, what)
    if ours.run_name != theirs.run_name:
        return Refuse(RefuseCode.OTHER_RUN, f"the run names differ ({ours.run_name!r} and {theirs.run_name!r})")
    if ours.spec_digest != theirs.spec_digest:
        what = f"the spec digests differ ({ours.spec_digest[:16]}.. and {theirs.spec_digest[:16] or 'none'}..)"
        return Refuse(RefuseCode.OTHER_SPEC, what)
    if ours.layout and theirs.layout and ours.layout != theirs.layout:
        return Refuse(
            RefuseCode.OTHER_MODEL, f"the model layouts differ ({ours.layout[:16]}.. and {theirs.layout[:16]}..)"
        )
    return None


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that a peer proposes for a section. `codec.modulo.Bounds.propose` returns one exponent per block."""

    section: SectionName
    exponents: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The announcement of a section, or of chunks that are sent again.

    The receiver computes the expected header from the spec and the grid, and aborts the swap if this header differs.
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
    """The parts of a swap that a peer has verified and committed, as reported in its status."""

    known: bool = False
    verified: tuple[Part, ...] = ()
    committed: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The response to a status request."""

    hello: Hello
    state: str
    round: int
    progress: float
    swap: SwapState = field(default_factory=SwapState)


@dataclass(frozen=True, slots=True)
class StateManifest:
    """The manifest of a donor's newest saved state, which is a file split into chunks, each with its own digest.

    The file contains the slow weights and, if the run uses it, the outer momentum. `layout` must be that of the
    newcomer's model. The newcomer adopts `round` and `progress`. Each chunk except the last has STATE_CHUNK_BYTES
    bytes. The number of chunks and the size of the file follow from the spec.
    """

    layout: str
    num_elements: int
    round: int
    progress: float
    num_bytes: int
    chunk_digests: tuple[bytes, ...]

    def digest(self) -> bytes:
        """Return the BLAKE3 digest of all chunk digests, which identifies this state."""
        return blake3(b"".join(self.chunk_digests)).digest()

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return the byte range (start, stop) of a chunk in the file; `stop` is exclusive."""
        return index * STATE_CHUNK_BYTES, min((index + 1) * STATE_CHUNK_BYTES, self.num_bytes)


@dataclass(frozen=True, slots=True)
class WantSpec:
    """A request for the run spec."""


@dataclass(frozen=True, slots=True)
class WantManifest:
    """A request for the manifest of the newest saved state."""


@dataclass(frozen=True, slots=True)
class WantLayout:
    """A request for the layout of the peer's model, sent when the digests of two layouts differ."""


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
