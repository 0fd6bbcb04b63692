"""Compare what the checkpoints of two scripts contain."""

from __future__ import annotations

import torch
from torch import Tensor

from noloco_p2p.outer.noloco import NoLoCo


def check_same(one: NoLoCo, other: NoLoCo) -> None:
    """Check that two replicas have the same slow weights, momentum and position, bit for bit."""
    states = [outer.state_dict() for outer in (one, other)]
    for state in states:
        del state["place"]["metrics"]  # which have durations
    for name, value in states[0].items():
        found = states[1][name]
        assert torch.equal(value, found) if isinstance(value, Tensor) else value == found, name
