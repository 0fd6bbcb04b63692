"""Define the other outer rules with which NoLoCo is compared.

These rules see all replicas at once, so no peer of a swarm could run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from noloco_p2p.optim.allreduce import Ring
from noloco_p2p.optim.ddp import DataParallel
from noloco_p2p.optim.diloco import DiLoCo
from noloco_p2p.optim.local import Local
from noloco_p2p.spec import OuterSpec

NOLOCO = "noloco"  # not one of `RULES`, because replicas run it as peers do


class Rule(Protocol):
    """An outer rule. All tensors are fp32, have shape (replicas, parameters) and are changed in place."""

    is_collective: bool  # whether replicas mix, in a ring all-reduce

    def mix_gradients(self, gradients: Tensor) -> None:
        """Mix the gradients after each backward pass, before clipping and the inner optimizer."""
        ...

    def outer_step(self, slow_weights: Tensor, fast_weights: Tensor) -> None:
        """Take the outer step at the end of a round.

        On entry, `slow_weights` holds the weights at the start of the round. On return, it holds the slow weights of
        the next round, which the caller copies to the fast weights. Changes to `fast_weights` are lost.
        """
        ...

    def sent_bytes(self, num_elements: int, num_replicas: int) -> tuple[float, float]:
        """Return the number of bytes that one replica sends, as the pair (per inner step, per round)."""
        ...


RULES: Mapping[str, Callable[[OuterSpec, Ring], Rule]] = {
    "diloco": lambda outer, ring: DiLoCo(ring, alpha=outer.alpha, beta=outer.beta),
    "diloco-nesterov": lambda outer, ring: DiLoCo(ring, alpha=outer.alpha, beta=outer.beta, is_nesterov=True),
    "ddp": lambda outer, ring: DataParallel(ring),
    "local": lambda outer, ring: Local(),
}
RULE_NAMES = (NOLOCO, *RULES)
