"""What a round got from the network: values for the training loop, never exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from noloco_p2p.gossip.frames import RefuseCode, SectionName
from noloco_p2p.gossip.round_length import LinkMeasure
from noloco_p2p.gossip.sections import SectionPair
from noloco_p2p.optim.mixing import Agreement


@dataclass(frozen=True, slots=True)
class Received:
    """What a swap brought: one pair of coded vectors per section (until they are applied), and what it cost.

    lateness_s: how long after this peer the partner reached its boundary; 0 when it was first. transfer_s: from
    when both
    had reached it until the late part was committed, or the round ended without it.
    """

    partner: str
    partner_round: int
    partner_progress: float
    agreed: Agreement  # what both sides mix by, computed from what they announced
    sections: dict[SectionName, SectionPair]
    link: LinkMeasure
    bytes_sent: int
    bytes_received: int
    seconds: float
    lateness_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Swapped:
    """Both parts were committed."""

    received: Received


@dataclass(frozen=True, slots=True)
class Half:
    """Slow weights and momentum were committed; the partner's outer gradient was not (yet)."""

    received: Received
    reason: str


class LonelyCause(StrEnum):
    """Why a round had no partner, for counting. Append new causes, since records list the counts in this order."""

    NOBODY = "nobody"  # no other live peer was known
    REFUSED = "refused"  # the peer asked was busy, paused, or too far from its boundary
    NO_ANSWER = "no_answer"  # the peer asked could not be reached, or had not answered at the boundary
    FAILED = "failed"  # a swap began and broke before its early part was committed
    SLOW = "slow"  # a swap was running, but its early part was not here at the boundary
    REFUSED_STATE = "refused_state"  # what a partner sent arrived, but the update filter refused it


@dataclass(frozen=True, slots=True)
class Alone:
    """No partner in this round; `reason` is a sentence for people.

    `link` is set when a swap was running and a boundary, here or there, came before its early part was committed.
    """

    reason: str
    cause: LonelyCause = field(default=LonelyCause.NO_ANSWER, compare=False)
    link: LinkMeasure | None = field(default=None, compare=False)


Outcome = Swapped | Half | Alone


@dataclass(frozen=True, slots=True)
class Correction:
    """A late part that arrived after its boundary: `beta h` has yet to be added to weights and momentum."""

    gradient: SectionPair
    partner: str
    round: int  # which it belongs to
    agreed: Agreement  # by both partners of its swap


@dataclass(slots=True)
class Traffic:
    """What all swaps of this peer moved, including failed ones; names and meanings are those of `telemetry.metrics`."""

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
        """Count a refused offer of another peer."""
        self.refused_over_share += code is RefuseCode.OVER_SHARE
        self.refused_unlisted += code is RefuseCode.UNLISTED
