"""The vocabulary of `round_state.py`: phases, the opening of a round, and the actions that the driver performs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor

from noloco_p2p.errors import PeerError, Refused
from noloco_p2p.gossip.active_swap import SwapHandle
from noloco_p2p.gossip.frames import Boundary, Offer, Refuse, SectionName
from noloco_p2p.gossip.seams import Candidate


class RoundPhase(Enum):
    SEEKING = auto()  # no partner, and no offer made
    OFFERING = auto()  # this peer has made an offer
    SWAPPING = auto()  # a partner is found, and the early part travels
    EARLY = auto()  # the early part is committed
    DONE = auto()  # all parts are committed
    HALF = auto()  # the early part is committed, and the late part will never be
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Opening:
    """The state of a peer when it opens a round. The tensors must not change until the round ends.

    patience_s: for a closing round, in which nobody trains. For this long, peers in the middle of a round are
    waited for,
    and the last partner is asked only when no other peer is alive.
    """

    round: int
    progress: float
    total_steps: int  # of the run, which progress is a share of
    longest_round: int  # inner steps of the longest round of this run
    early_state: dict[SectionName, Tensor]  # flat, fp32, on the CPU
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Make this peer an offer, and report the answer with `offer_answered`."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Wait:
    """Call `seek` again when something changes, or after this time."""

    at_most_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """An offer of another peer. Each is answered by one `Bind` or `Reply`, possibly after it was held for a while.

    is_listed: whether a live record of its caller is known.
    """

    offer: Offer
    is_listed: bool


@dataclass(frozen=True, slots=True)
class Bind:
    """The round has its partner: start the swap over the stream of that offer, and report `swap_began`."""

    via: Ask | Incoming
    partner: str
    mine: Boundary
    theirs: Boundary


@dataclass(frozen=True, slots=True)
class Reply:
    to: Incoming
    refuse: Refuse


@dataclass(frozen=True, slots=True)
class Abandon:
    swap: SwapHandle
    reason: PeerError


@dataclass(frozen=True, slots=True)
class Report:
    """Report a fault of another peer to people."""

    text: str
    error: PeerError
    level: int = logging.WARNING


@dataclass(frozen=True, slots=True)
class Strike:
    """This peer sent what no honest peer sends."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CompareModels:
    """This peer trains another model: find out how it differs."""

    candidate: Candidate
    error: Refused


Action = Bind | Reply | Abandon | Report | Strike | CompareModels
