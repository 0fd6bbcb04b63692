"""The half-difference of two vectors as a new tensor, for tests that still need both vectors."""

from __future__ import annotations

from torch import Tensor

from noloco_p2p.gossip.coder import half_difference_


def half_difference(own_coded: Tensor, partner_coded: Tensor) -> Tensor:
    return half_difference_(own_coded.clone(), partner_coded.clone())
