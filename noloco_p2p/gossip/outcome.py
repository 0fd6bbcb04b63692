"""What a round got from the network: values for the training loop, never exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from noloco_p2p.codec import Codec, chunk_bounds, get_codec
from noloco_p2p.gossip.frames import Part, Payload, SectionName
from noloco_p2p.optim.halves import half_difference
from noloco_p2p.spec import CodecSpec


@dataclass(frozen=True, slots=True)
class SectionPlan:
    """One named vector of a swap, as both sides must see it."""

    name: SectionName
    part: Part
    codec: Codec
    num_elements: int


def section_plans(codecs: CodecSpec, *, swap_momentum: bool, num_elements: int) -> tuple[SectionPlan, ...]:
    """The sections of every swap of a run, in the order in which they travel."""
    momentum = [(SectionName.OUTER_MOMENTUM, Part.EARLY, codecs.outer_momentum)] if swap_momentum else []
    rows = [
        (SectionName.SLOW_WEIGHTS, Part.EARLY, codecs.slow_weights),
        *momentum,
        (SectionName.OUTER_GRADIENT, Part.LATE, codecs.outer_gradient),
    ]
    return tuple(SectionPlan(name, part, get_codec(codec), num_elements) for name, part, codec in rows)


@dataclass(frozen=True, slots=True)
class SectionPair:
    """The coded vectors of both sides of a committed section, chunk by chunk."""

    plan: SectionPlan
    own: list[Payload]
    partner: list[Payload]

    def half_difference(self, index: int) -> Tensor:
        """h of chunk `index`: (Q(partner) - Q(own)) / 2, fp32 on the CPU."""
        start, stop = chunk_bounds(self.plan.num_elements)[index]
        own = self.plan.codec.decode(self.own[index], num_elements=stop - start)
        partner = self.plan.codec.decode(self.partner[index], num_elements=stop - start)
        return half_difference(own, partner)


@dataclass(frozen=True, slots=True)
class Received:
    """What a swap brought: one pair of coded vectors per section (until they are applied), and what it cost."""

    partner: str
    partner_round: int
    partner_progress: float
    sections: dict[SectionName, SectionPair]
    bytes_sent: int
    bytes_received: int
    seconds: float


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


@dataclass(frozen=True, slots=True)
class Alone:
    """No partner in this round; `reason` is a sentence for people."""

    reason: str
    cause: LonelyCause = field(default=LonelyCause.NO_ANSWER, compare=False)


Outcome = Swapped | Half | Alone


@dataclass(frozen=True, slots=True)
class Correction:
    """A late part that arrived after its boundary: `beta h` is still to be added to weights and momentum."""

    gradient: SectionPair
    partner: str


@dataclass(slots=True)
class Traffic:
    """Payload bytes of all swaps of this peer, failed ones too."""

    sent_bytes: int = 0
    received_bytes: int = 0
