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

from dataclasses import dataclass

from noloco_p2p.gossip.frames import Abort, AbortCode, Hello, Payload, Refuse, RefuseCode, chunk_digest, other_kind
from noloco_p2p.mix.units import Slice

__all__ = [
    "Abort",
    "AbortCode",
    "Accept",
    "Alive",
    "Chunk",
    "Frame",
    "Grid",
    "Header",
    "Hello",
    "Offer",
    "Payload",
    "Ready",
    "Received",
    "Refuse",
    "RefuseCode",
    "Standing",
    "chunk_digest",
    "other_kind",
]


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
class Grid:
    exponents: bytes  # from `Coder.propose`


@dataclass(frozen=True, slots=True)
class Header:
    """The announcement of a pass, and a commitment to its content: nobody can answer what it has read.

    `digest` is the BLAKE3 digest of the digests of all chunks. The other fields follow from the grid and from the
    chunks that failed, so the receiver knows them and ends the swap if they differ.
    """

    number: int  # of the pass, from 0
    num_chunks: int
    num_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int  # in the slice
    payload: Payload
    digest: bytes  # from `chunk_digest`


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Received:
    pass


@dataclass(frozen=True, slots=True)
class Alive:
    pass


Frame = Offer | Accept | Refuse | Grid | Header | Chunk | Received | Ready | Alive | Abort
