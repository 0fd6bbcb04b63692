"""Two peers exchange these frames in a swap.

caller                       called
Offer(hello, ...)      ->
                      <-     Accept(hello, slice, ...) | Refuse(code, sentence, retry_after_s)
Grid                  <->    Grid                  the steps that each peer proposes, in a run with `modulo`
Header, Chunk..       <->    Header, Chunk..       one pass; nobody sends a chunk before it has the partner's header
Header, Chunk..       <->    Header, Chunk..       further passes with the chunks that failed in the last one
Received              <->    Received              after the last chunk of a pass, to measure the link
Ready                 <->    Ready                 each peer has verified everything, and both commit

Alive means that the sender still waits for its next inner step or for its link. Either peer can end the swap with
Abort(code, sentence).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from blake3 import blake3

PROTOCOL_VERSION = "1.0"  # peers with the same major version are compatible
STATE_CHUNK_BYTES = 1 << 20
MAX_CHUNKS_PER_REQUEST = 16_384  # covers 16 GiB of state with a list of 48 KiB; a larger state needs several requests

Payload = bytes | memoryview  # a payload from the network is a view of the message


def pass_digest(payloads: Iterable[Payload]) -> bytes:
    """Return the BLAKE3 digest of all payloads of a pass, one after another."""
    digest = blake3()
    for payload in payloads:
        digest.update(payload)
    return digest.digest()


class RefuseCode(IntEnum):
    """The reason for refusing an offer or a request.

    The reasons in FINAL are permanent. In the comments, "this peer" is the peer that refuses, and "the caller" is the
    peer that asked.
    """

    BUSY = 1  # this peer is occupied for the moment
    CROSSED = 2  # the peers made offers to each other, and this peer's offer is used because its peer id is higher
    NOT_TRAINING = 3  # this peer is paused, leaving or done, or has no model yet
    NO_STATE = 4  # this peer has no saved state to serve
    STALE = 5  # the positions of the two peers in the run are too far apart
    OVER_SHARE = 6  # the caller has had its share of this peer's swaps, so other peers are preferred
    UNLISTED = 7  # this peer has not read a live record of the caller yet
    BANNED = 8  # this peer has banned the caller temporarily
    NOT_INVITED = 9  # the caller is not invited to this private run
    OTHER_RUN = 10
    OTHER_SPEC = 11
    OTHER_VERSION = 12
    OTHER_MODEL = 13
    MALFORMED = 14


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
    ABANDONED = 3  # the sender gave up the swap
    LEAVING = 4
    INTERNAL = 5


@dataclass(frozen=True, slots=True)
class Slice:
    """The units [first, first + count)."""

    first: int
    count: int

    @property
    def units(self) -> range:
        return range(self.first, self.first + self.count)


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


@dataclass(frozen=True, slots=True)
class Standing:
    """What a peer tells about itself: its position in the schedule, and the seconds that an inner step takes."""

    progress: float
    step_s: float
    free_in_s: float  # expected time until its current swap ends


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer of a swap. `ages` has one byte per unit (see `Ages.tell`). The caller swaps at most `at_most` units."""

    hello: Hello
    swap_id: bytes  # 16 random bytes
    standing: Standing
    ages: bytes
    at_most: int


@dataclass(frozen=True, slots=True)
class Accept:
    hello: Hello
    standing: Standing
    part: Slice


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
    exponents: bytes  # from `Coder.propose`


@dataclass(frozen=True, slots=True)
class Header:
    """A commitment to the chunks of a pass, so that nobody can answer what it has read.

    Which chunks follow, and how long they are, is known from the grid and from the chunks that failed.
    """

    digest: bytes  # from `pass_digest`


@dataclass(frozen=True, slots=True)
class Chunk:
    payload: Payload


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Received:
    pass


@dataclass(frozen=True, slots=True)
class Alive:
    pass


@dataclass(frozen=True, slots=True)
class Abort:
    code: AbortCode
    sentence: str


Frame = Offer | Accept | Refuse | Grid | Header | Chunk | Received | Ready | Alive | Abort


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """The response to a status request."""

    hello: Hello
    state: str
    progress: float
    has_verified: bool = False  # whether this peer has verified the swap that the request names, and not abandoned it


@dataclass(frozen=True, slots=True)
class StateManifest:
    """The manifest of a donor's newest saved state, which is a file split into chunks, each with its own digest.

    The file contains the weights and, if the run uses it, the outer momentum. `layout` must be that of the newcomer's
    model. The newcomer adopts `progress`. Each chunk except the last has STATE_CHUNK_BYTES
    bytes. The number of chunks and the size of the file follow from the spec.
    """

    layout: str
    num_elements: int
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
