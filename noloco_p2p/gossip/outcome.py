"""This module defines the outcomes of a round. The training loop receives them as values, never as exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from noloco_p2p.gossip.frames import RefuseCode, SectionName
from noloco_p2p.gossip.round_length import LinkMeasure
from noloco_p2p.gossip.sections import SectionPair
from noloco_p2p.optim.mixing import Agreement


@dataclass(frozen=True, slots=True)
class Received:
    """The result of a swap: one pair of encoded vectors per section, and the swap's traffic and timing.

    The vectors are kept until they are applied. `lateness_s` is the time that this peer waited for its partner to reach
    the boundary, or 0 if the partner was first. `transfer_s` is the time from the later of the two boundaries until the
    late part was committed or the round ended without it. `num_live` is the number of live peers, including this one.
    """

    partner: str
    partner_round: int
    partner_progress: float
    agreed: Agreement  # mixing parameters, which both partners compute from their announcements
    sections: dict[SectionName, SectionPair]
    link: LinkMeasure
    bytes_sent: int
    bytes_received: int
    seconds: float
    lateness_s: float
    transfer_s: float
    num_live: int


@dataclass(frozen=True, slots=True)
class Swapped:
    """The outcome of a round in which all parts were committed."""

    received: Received


@dataclass(frozen=True, slots=True)
class Half:
    """The outcome of a round in which only the early part was committed. The late part may arrive afterwards."""

    received: Received
    reason: str


class LonelyCause(StrEnum):
    """The reason why a round had no partner.

    Add new causes at the end, because records list the counts in this order.
    """

    NOBODY = "nobody"  # no other live peer was known
    REFUSED = "refused"  # the drawn peer was busy or paused, or its boundary was too far away
    NO_ANSWER = "no_answer"  # the drawn peer could not be reached, or had not answered by the boundary
    FAILED = "failed"  # a swap began, but failed before its early part was committed
    SLOW = "slow"  # a swap was running, but its early part had not arrived by the boundary
    REFUSED_STATE = "refused_state"  # the partner's vectors arrived, but the update filter refused them


@dataclass(frozen=True, slots=True)
class Alone:
    """The outcome of a round without a partner. `reason` is a human-readable sentence.

    `link` is set if a swap was running but one of the partners reached its boundary before the early part was
    committed.
    """

    reason: str
    cause: LonelyCause = field(default=LonelyCause.NO_ANSWER, compare=False)
    link: LinkMeasure | None = field(default=None, compare=False)


Outcome = Swapped | Half | Alone


@dataclass(frozen=True, slots=True)
class Correction:
    """A late part that arrived after the boundary. `beta h` has not yet been added to the weights and the momentum."""

    gradient: SectionPair
    partner: str
    round: int  # the round that it belongs to
    agreed: Agreement  # mixing parameters of its swap


@dataclass(slots=True)
class Traffic:
    """Counters for all swaps of this peer, including failed ones. `telemetry.metrics` describes each of them."""

    bytes_sent: int = 0
    bytes_received: int = 0
    modulo_chunks: int = 0
    plain_chunks: int = 0
    extended_chunks: int = 0
    broken_chunks: int = 0
    refused_not_finite: int = 0
    refused_over_share: int = 0
    refused_unlisted: int = 0

    def note_refusal(self, code: RefuseCode) -> None:
        """Count an offer that this peer refused."""
        self.refused_over_share += code is RefuseCode.OVER_SHARE
        self.refused_unlisted += code is RefuseCode.UNLISTED
