"""Half-differences: the only way in which a partner's vector changes a peer.

Let Q be encode then decode, and h = (Q(partner) - Q(own)) / 2. A peer uses its *exact* own vector plus h, be it slow
weights, outer momentum or outer gradient. Both peers know both coded vectors, so both compute the same h up to its
sign:

    (own_a + h) + (own_b - h) = own_a + own_b

The mean of a pair is that of the exact vectors, however coarse Q is: a coding error moves the two peers by the same
amount in opposite directions, and enters only their distance, which the next swaps shrink. Averaging Q(partner) with
the exact own vector would instead leave half of each coding error in the mean, round after round.
"""

from __future__ import annotations

import torch
from torch import Tensor


def half_difference_(own_coded: Tensor, partner_coded: Tensor) -> Tensor:
    """Compute (partner - own) / 2 in place of `partner_coded`: what `own` must move by to reach the midpoint.

    `own_coded` is the own vector after encode and decode, not the exact one; it is overwritten. The partner's call
    gives exactly the opposite, element by element (a zero stays a zero), because each operand is halved separately, and
    rounding a difference to nearest is symmetric. Halving first also keeps every h of finite vectors finite, which
    (partner - own) / 2 would not. It is not fused into one multiply-add, which would round subnormal operands
    differently. Raises ValueError when a dtype is not fp32 or the shapes differ.
    """
    _check(own_coded, partner_coded)
    return partner_coded.mul_(0.5).sub_(own_coded.mul_(0.5))


def _check(own_coded: Tensor, partner_coded: Tensor) -> None:
    for name, tensor in (("own_coded", own_coded), ("partner_coded", partner_coded)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be torch.float32, it is {tensor.dtype}")
    if own_coded.shape != partner_coded.shape:
        raise ValueError(f"shapes differ: own {tuple(own_coded.shape)}, partner {tuple(partner_coded.shape)}")
