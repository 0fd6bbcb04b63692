"""Compute the terms on which two partners mix, and the number and length of a run's closing rounds.

This module does not use torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from noloco_p2p.spec import OuterSpec

# In a closing round, nobody trains, and both partners move to the midpoint.
CLOSING = OuterSpec(alpha=0.0, beta=1.0, gamma=1.0)
CLOSING_MORE = 3  # closing rounds in addition to log2 of the number of peers
# The shortest and the longest wait in a closing round. Between these limits, the wait is as long as a round.
CLOSING_WAIT_S = (10.0, 600.0)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The terms on which two partners mix. Both partners compute the same terms from their announcements to each other.

    `inner_steps` is the length of a round. All half-differences are multiplied by `weight`, which is below 1 between
    peers that are many rounds apart. `partner_share` is the partner's share of the inner steps of both rounds. The
    shares of the two partners add up to 1.
    """

    inner_steps: int
    weight: float = 1.0
    partner_share: float = 0.5


def gradient_weight(outer: OuterSpec, agreed: Agreement) -> float:
    """Return the factor by which a peer multiplies the half-difference h of the outer gradients.

    The peer adds the product to its own outer gradient. With `outer.weigh_tokens`, each gradient is weighted by the
    number of tokens it was computed from: own + 2 * share * h is the weighted mean of the two gradients. The sum of the
    two partners' vectors, each multiplied by its number of tokens, is preserved.
    """
    return agreed.weight * (2 * agreed.partner_share if outer.weigh_tokens else 1.0)


def agreed_inner_steps(one: int, other: int) -> int:
    """Return the round length that two partners agree on: the shorter of both, which neither of them can stretch."""
    return min(one, other)


def closing_rounds(outer: OuterSpec, num_peers: int) -> int:
    """Return the number of closing rounds.

    Each closing round halves the squared spread of randomly paired peers. After log2 N rounds, 1 / N of the squared
    spread is left, and three more rounds reduce it to an eighth of that. Every peer then ends close to the mean of all
    peers.
    """
    if outer.closing_rounds == "auto":
        return math.ceil(math.log2(num_peers)) + CLOSING_MORE if num_peers > 1 else 0
    return outer.closing_rounds


def closing_wait_s(outer: OuterSpec, round_s: float | None) -> float:
    """Return how many seconds a closing round may take.

    This is long enough to wait for peers that train for one more round.
    """
    least_s, most_s = CLOSING_WAIT_S
    return min(max(outer.max_wait_s, round_s or 0.0, least_s), most_s)
