"""Replicas without a model around rounds whose outcome is applied: was each part of it applied whole, or not at all?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.rounds import Vectors
from harness.specs import FP32
from harness.swapped import received
from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Alone, Outcome, Swapped
from noloco_p2p.optim.gates import OPEN
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.spec import CodecSpec, OuterSpec


class Replica:
    """What rounds change: an outer state with gates that are open, whose one tensor trains by an amount from its seed.

    Replicas of other seeds are a hundredth of their length away.
    """

    def __init__(self, seed: int, *, outer: OuterSpec, num_elements: int = 100) -> None:
        common, own = (Vectors.random(each, num_elements=num_elements) for each in (99, seed))
        self._model = nn.Linear(num_elements, 1, bias=False)
        self._amount = 0.01 * own.outer_gradient
        with torch.no_grad():
            self._model.weight.copy_(common.slow_weights + 0.01 * own.slow_weights)
        self.state = OuterState(self._model, outer, limits=OPEN)
        if self.state.outer_momentum is not None:
            self.state.outer_momentum.copy_(0.01 * own.outer_momentum)

    @torch.no_grad()
    def train(self) -> Vectors:
        """The inner steps of a round; what the replica brings to it, in memory of its own."""
        self._model.weight.add_(self._amount)
        gradient = torch.cat([chunk.clone() for chunk in self.state.outer_gradient()])
        momentum = self.state.outer_momentum
        assert momentum is not None, "`Vectors` have one"
        return Vectors(self.state.slow_weights.clone(), momentum.clone(), gradient)

    def step(self, outcome: Outcome) -> None:
        """The outer step with what the round brought."""
        self.state.step(None if isinstance(outcome, Alone) else outcome.received)

    def numbers(self) -> Tensor:
        """All that a swap may change: slow weights, momentum, the model's weights."""
        return torch.cat([*self.state.tensors().values(), self.state.parameters.read(0, self.state.num_elements)])


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replicas that swap with each other, and their twins, to which exact parts are given without a network."""

    replicas: Sequence[Replica]
    twins: Sequence[Replica]

    @classmethod
    def make(cls, outer: OuterSpec) -> Pair:
        return cls(*([Replica(seed, outer=outer) for seed in (1, 2)] for _ in range(2)))

    def train(self) -> list[Vectors]:
        """What both bring to their next round; the twins go where they are."""
        for replica, twin in zip(self.replicas, self.twins, strict=True):
            twin.state.take(replica.state.tensors())
            twin.train()
        return [replica.train() for replica in self.replicas]

    def is_whole(self, outcomes: Sequence[Outcome], vectors: Sequence[Vectors], *, codec: CodecSpec) -> bool:
        """Takes the outer step; True when each replica applied the parts that its outcome names, and nothing else.

        Where nothing was swapped, and with fp32, it then has the bits of its twin. Other codecs may not move the mean.
        """
        for index, (replica, twin, outcome) in enumerate(zip(self.replicas, self.twins, outcomes, strict=True)):
            own, partner = (_parts(outcome, each) for each in (vectors[index], vectors[1 - index]))
            twin.state.step(received(own, partner) if own else None)
            replica.step(outcome)
            is_exact = isinstance(outcome, Alone) or codec == FP32
            if is_exact and not torch.equal(replica.numbers(), twin.numbers()):
                return False
        mean, exact = (torch.stack([each.numbers() for each in both]).mean(0) for both in (self.replicas, self.twins))
        return torch.allclose(mean, exact, atol=1e-6)


def _parts(outcome: Outcome, vectors: Vectors) -> dict[SectionName, Tensor]:
    late = {SectionName.OUTER_GRADIENT: vectors.outer_gradient} if isinstance(outcome, Swapped) else {}
    return {} if isinstance(outcome, Alone) else {**vectors.state(), **late}
