"""What two partners agree on before they mix, and how a run ends. Pure, and no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from noloco_p2p.spec import OuterSpec

# For a closing round, in which nobody trains: both partners move to the midpoint.
CLOSING = OuterSpec(alpha=0.0, beta=1.0, gamma=1.0)
CLOSING_MORE = 3  # rounds in addition to log2 of the peers
# for a partner in a closing round: at least and at most; in between the duration of a round
CLOSING_WAIT_S = (10.0, 600.0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two partners agree on. Each computes it from what both announced, with the same result.

    inner_steps: length of a round. weight: of all half-differences, below 1 between peers that are many rounds apart.
    partner_share: of the inner steps of both rounds; the shares of the two partners add up to 1.
    """

    inner_steps: float
    weight: float = 1.0
    partner_share: float = 0.5


def gradient_weight(outer: OuterSpec, agreed: Agreement) -> float:
    """The factor of the half-difference of the outer gradients.

    It is used as own gradient + weight x h. With `outer.weigh_tokens` a gradient counts by the tokens behind it:
    own + 2 share h is the weighted mean of the two, and the sum of the vectors, each times its tokens, is preserved.
    """
    return agreed.weight * (2 * agreed.partner_share if outer.weigh_tokens else 1.0)


def agreed_inner_steps(one: int, other: int) -> float:
    """The round length of two partners: the geometric mean, with the same bits on both sides.

    It is a product of integers and a square root, which every machine rounds in the same way.
    """
    return math.sqrt(one * other)


def closing_rounds(outer: OuterSpec, num_peers: int) -> int:
    """The number of closing rounds.

    Each halves the squared spread of randomly paired peers. So log2 N rounds leave a share of 1 / N of it, and three
    more an eighth of that: every peer then ends close to the mean of all.
    """
    if outer.closing_rounds == "auto":
        return math.ceil(math.log2(num_peers)) + CLOSING_MORE if num_peers > 1 else 0
    return outer.closing_rounds


def closing_wait_s(outer: OuterSpec, round_s: float | None) -> float:
    """How long a closing round may take, in seconds: peers that train for one more round are waited for."""
    least_s, most_s = CLOSING_WAIT_S
    return min(max(outer.max_wait_s, round_s or 0.0, least_s), most_s)
