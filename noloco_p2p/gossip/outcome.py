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

    lateness_s: the partner came to its boundary so long after this peer; 0 when it was first. transfer_s: from when
    both were there until the late part was committed, or the round was ended without it.
    """

    partner: str
    partner_round: int
    partner_progress: float
    agreed: Agreement  # what both sides mix by, from what they told each other
    sections: dict[SectionName, SectionPair]
    link: LinkMeasure
    bytes_sent: int
    bytes_received: int
    seconds: float
    lateness_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Swapped:
    """Both parts are here."""

    received: Received


@dataclass(frozen=True, slots=True)
class Half:
    """Slow weights and momentum are here, the partner's outer gradient is not (yet)."""

    received: Received
    reason: str


class LonelyCause(StrEnum):
    """Why a round had no partner, for counting. New ones go to the end: records list the counts in this order."""

    NOBODY = "nobody"  # no other live peer was known
    REFUSED = "refused"  # who was asked said no: busy, paused, too far from its boundary
    NO_ANSWER = "no_answer"  # who was asked could not be reached, or had not answered at the boundary
    FAILED = "failed"  # a swap began and broke before its early part was committed
    SLOW = "slow"  # a swap was running, its early part not here at the boundary
    REFUSED_STATE = "refused_state"  # what a partner sent came whole, and a gate refused to apply it


@dataclass(frozen=True, slots=True)
class Alone:
    """No partner in this round; `reason` is a sentence for people.

    `link` is there when a swap was on its way and a boundary, here or there, came before its early part was committed.
    """

    reason: str
    cause: LonelyCause = field(default=LonelyCause.NO_ANSWER, compare=False)
    link: LinkMeasure | None = field(default=None, compare=False)


Outcome = Swapped | Half | Alone


@dataclass(frozen=True, slots=True)
class Correction:
    """A late part that arrived after its boundary: `beta h` is still to be added to weights and momentum."""

    gradient: SectionPair
    partner: str
    round: int  # which it belongs to
    agreed: Agreement  # of its swap


@dataclass(slots=True)
class Traffic:
    """What all swaps of this peer moved, failed ones too; names and meanings are those of `telemetry.metrics`."""

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
        """An offer of another peer was refused."""
        self.refused_over_share += code is RefuseCode.OVER_SHARE
        self.refused_unlisted += code is RefuseCode.UNLISTED
