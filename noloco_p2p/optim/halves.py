"""Compute half-differences. A partner's vectors affect a peer only through half-differences.

Let Q be encoding followed by decoding, and let h = (Q(partner) - Q(own)) / 2. A peer adds h to its own *exact* vector
(slow weights, outer momentum or outer gradient). Both partners know both decoded vectors, so both compute the same h up
to its sign:

    (own_a + h) + (own_b - h) = own_a + own_b

The mean of the pair is therefore the mean of the exact vectors, however coarse Q is. An encoding error moves the two
peers by the same amount in opposite directions. It affects only the distance between them, which the next swaps reduce.
If a peer instead averaged Q(partner) with its own exact vector, half of each encoding error would stay in the mean,
round after round.
"""

from __future__ import annotations

import torch
from torch import Tensor


def half_difference_(own_coded: Tensor, partner_coded: Tensor) -> Tensor:
    """Compute (partner - own) / 2 in place of `partner_coded`. Adding the result to `own` gives the midpoint.

    `own_coded` is the peer's own vector after encoding and decoding, not the exact vector; it is overwritten. The
    partner's call returns exactly the negative, element by element, because each operand is halved separately and
    rounding a difference to nearest is symmetric. A zero stays a zero. Halving first also keeps the result finite if
    both vectors are finite, whereas (partner - own) could overflow. The computation is not fused into one multiply-add,
    which would round subnormal operands differently. Raises ValueError if a dtype is not fp32 or the shapes differ.
    """
    _check(own_coded, partner_coded)
    return partner_coded.mul_(0.5).sub_(own_coded.mul_(0.5))


def _check(own_coded: Tensor, partner_coded: Tensor) -> None:
    for name, tensor in (("own_coded", own_coded), ("partner_coded", partner_coded)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be torch.float32, but it is {tensor.dtype}")
    if own_coded.shape != partner_coded.shape:
        own, partner = tuple(own_coded.shape), tuple(partner_coded.shape)
        raise ValueError(f"the shapes differ: own_coded has {own}, and partner_coded has {partner}")
