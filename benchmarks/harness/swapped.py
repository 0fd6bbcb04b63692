"""Make the results of swaps from vectors, without a network, for tests that use such results."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.specs import FP32
from noloco_p2p.codec import Scratch, chunk_bounds
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Received
from noloco_p2p.gossip.round_length import LinkMeasure
from noloco_p2p.gossip.sections import Coding, SectionPair, Squares, section_plans
from noloco_p2p.optim.mixing import Agreement
from noloco_p2p.spec import CodecSpec

EVEN = Agreement(50)
NO_LINK = LinkMeasure(early_s=1.0, late_s=0.0, is_whole=True)


def received(
    own: Mapping[SectionName, Tensor],
    partner: Mapping[SectionName, Tensor],
    *,
    codec: CodecSpec = FP32,
    agreed: Agreement = EVEN,
) -> Received:
    """Return the result of a swap of the sections in `own` (flat fp32 vectors of one size) without modulo codecs."""
    num_elements = next(iter(own.values())).numel()
    sections = {}
    for plan in section_plans(codec, swap_momentum=True, num_elements=num_elements):
        if plan.name in own:
            mine, theirs = (
                [plan.codec.encode(side[plan.name][start:stop]) for start, stop in chunk_bounds(num_elements)]
                for side in (own, partner)
            )
            coding, scratch = Coding(plan), Scratch()
            squares = Squares(
                *(
                    sum(coding.square(payload, index, scratch=scratch) for index, payload in enumerate(side))
                    for side in (mine, theirs)
                )
            )
            sections[plan.name] = SectionPair(coding, [*mine], [*theirs], squares)
    return Received(
        partner="partner",
        partner_round=0,
        partner_progress=0.0,
        agreed=agreed,
        sections=sections,
        link=NO_LINK,
        bytes_sent=0,
        bytes_received=0,
        seconds=0.0,
        lateness_s=0.0,
        transfer_s=0.0,
        num_live=2,
    )
