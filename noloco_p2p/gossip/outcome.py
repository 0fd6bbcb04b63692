"""What a round got from the network: values for the training loop, never exceptions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS, Codec, Scratch, get_codec
from noloco_p2p.gossip.frames import Part, Payload, SectionName
from noloco_p2p.optim.halves import half_difference_
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

    def half_difference(self, index: int, *, scratch: Scratch | None = None) -> Tensor:
        """h of chunk `index`: (Q(partner) - Q(own)) / 2, fp32 on the CPU.

        In memory of its own; with `scratch` only until the next half-difference that is made with it.
        """
        scratch = scratch or Scratch()
        size = min(CHUNK_ELEMENTS, self.plan.num_elements - index * CHUNK_ELEMENTS)
        own, partner = (
            self.plan.codec.decode(
                payloads[index],
                num_elements=size,
                out=scratch.take(side, size, dtype=torch.float32),
                scratch=scratch,
            )
            for side, payloads in (("own", self.own), ("partner", self.partner))
        )
        return half_difference_(own, partner)


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


@dataclass(frozen=True, slots=True)
class Alone:
    """No partner in this round; `reason` is a sentence for people."""

    reason: str


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
