"""alpha, beta and gamma as a function of the round length, for `outer.inner_steps = "auto"`. Pure, and no torch.

Short rounds want little outer momentum: what a swap averages is then nearly the weights themselves. The rows below are
settings that were tried (Llama with 0.2M parameters, 8 replicas, 1000 inner steps); 50 steps is the published setting
of NoLoCo (arXiv 2506.10911), 5 steps and fewer is plain averaging of pairs.

Between the rows all three are linear in 1 / inner steps, the number of swaps an inner step: 20 steps then get alpha
0.39, nearer to 0.5 than to 0.2, as alpha 0.5 was not worse than 0.3 there. gamma is at most 1 - alpha^2, where the
spread of randomly paired replicas shrinks fastest, and with that inside both stability bounds of the run spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from noloco_p2p.spec import OuterSpec


@dataclass(frozen=True, slots=True)
class Mixing:
    """Strengths of one outer step: momentum kept, outer learning rate, pull towards the partner's weights."""

    alpha: float
    beta: float
    gamma: float


ROWS: tuple[tuple[float, Mixing], ...] = (
    (5.0, Mixing(alpha=0.0, beta=1.0, gamma=1.0)),
    (10.0, Mixing(alpha=0.2, beta=1.0, gamma=0.96)),
    (50.0, Mixing(alpha=0.5, beta=0.7, gamma=0.7)),
)


# Of a closing round, in which nobody trains: both partners go to the middle.
CLOSING = Mixing(alpha=0.0, beta=1.0, gamma=1.0)
CLOSING_MORE = 3  # rounds beyond log2 of the peers


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two partners mix by: each computes it from what both told, and gets the same.

    weight: of all half-differences, below 1 between peers that are many rounds apart. partner_share: of the inner steps
    of both rounds; it is one side's own, and the two add up to 1.
    """

    inner_steps: float
    weight: float = 1.0
    partner_share: float = 0.5


def gradient_weight(outer: OuterSpec, agreed: Agreement) -> float:
    """What the half-difference of the outer gradients is multiplied by.

    Own gradient + weight x h. With `outer.weigh_tokens` a gradient counts by the tokens behind it: own + 2 share h is
    the weighted mean of the two, and the sum of the vectors, each times its tokens, stays what it was.
    """
    return agreed.weight * (2 * agreed.partner_share if outer.weigh_tokens else 1.0)


def agreed_inner_steps(one: int, other: int) -> float:
    """The round length that two partners mix by: the geometric mean, the same bits whoever computes it.

    A product of whole numbers and a square root: both are rounded alike on every machine.
    """
    return math.sqrt(one * other)


def strengths(outer: OuterSpec, inner_steps: float) -> Mixing:
    """Those of the spec, or with "auto" those for rounds of `inner_steps`, on which both partners agree."""
    return mixing_for(inner_steps) if outer.is_auto else Mixing(outer.alpha, outer.beta, outer.gamma)


def closing_rounds(outer: OuterSpec, num_peers: int) -> int:
    """How many of them. Each halves the squared spread of randomly paired peers, so log2 N leave a share of 1 / N of
    it, and three more an eighth of that: every peer then ends nearly where the mean of all is."""
    if outer.closing_rounds == "auto":
        return math.ceil(math.log2(num_peers)) + CLOSING_MORE if num_peers > 1 else 0
    return outer.closing_rounds


def late_beta(outer: OuterSpec, agreed: Agreement) -> float:
    """What the half-difference of a gradient that came after its boundary is multiplied by: all that its swap agreed
    on, as the partner has used the same."""
    return strengths(outer, agreed.inner_steps).beta * gradient_weight(outer, agreed)


def mixing_for(inner_steps: float) -> Mixing:
    """Strengths for a round of `inner_steps`; continuous, and outside of the rows as at their ends.

    Only sums, products and quotients, which every machine rounds alike: the same length gives the same bits.
    """
    if inner_steps <= ROWS[0][0]:
        return ROWS[0][1]
    for (shorter, left), (longer, right) in pairwise(ROWS):
        if inner_steps < longer:
            share = (1 / shorter - 1 / inner_steps) / (1 / shorter - 1 / longer)
            return Mixing(
                alpha=left.alpha + share * (right.alpha - left.alpha),
                beta=left.beta + share * (right.beta - left.beta),
                gamma=left.gamma + share * (right.gamma - left.gamma),
            )
    return ROWS[-1][1]
