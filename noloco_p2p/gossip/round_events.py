"""This module defines the types of `round_state.py`: phases, the opening of a round, and actions for the driver."""

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
    SEEKING = auto()  # this peer has no partner and has made no offer
    OFFERING = auto()  # this peer has made an offer
    SWAPPING = auto()  # a partner was found, and the early part is being transferred
    EARLY = auto()  # the early part is committed
    DONE = auto()  # all parts are committed
    HALF = auto()  # the early part is committed, but the late part has failed
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Opening:
    """The state of a peer when it opens a round. The tensors must not change until the round ends.

    `patience_s` is for closing rounds, in which nobody trains. For this many seconds, the peer waits for others that
    are in the middle of a round. It asks its last partner only if no other peer is live.
    """

    round: int
    progress: float
    total_steps: int  # the number of inner steps in the run; `progress` is a fraction of it
    longest_round: int  # the maximum length of a round in this run, in inner steps
    early_state: dict[SectionName, Tensor]  # flat, fp32, on the CPU
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Make an offer to the candidate, and report the answer with `offer_answered`."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Wait:
    """Call `seek` again when the state of the round changes, or after `at_most_s` seconds."""

    at_most_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """An offer from another peer. Each offer is answered by exactly one `Bind` or `Reply`, possibly after a delay.

    `is_listed` says whether a live record of the caller is known.
    """

    offer: Offer
    is_listed: bool


@dataclass(frozen=True, slots=True)
class Bind:
    """Start a swap with the round's new partner over the stream of the offer, and report `swap_began`."""

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
    """Report another peer's fault to the user."""

    text: str
    error: PeerError
    level: int = logging.WARNING


@dataclass(frozen=True, slots=True)
class Strike:
    """Record that a peer sent data that no honest peer would send."""

    peer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class CompareModels:
    """Find out how the candidate's model differs from this peer's."""

    candidate: Candidate
    error: Refused


Action = Bind | Reply | Abandon | Report | Strike | CompareModels
