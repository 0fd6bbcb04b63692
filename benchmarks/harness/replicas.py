"""Provide replicas that apply the outcomes of rounds, to check that each part is applied completely or not at all."""

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
    """An outer state with open gates, whose only tensor changes in each round by an amount that the seed determines.

    The distance between replicas with different seeds is about a hundredth of their norm.
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
        """Take the inner steps of a round, and return copies of the vectors that the replica swaps."""
        self._model.weight.add_(self._amount)
        gradient = torch.cat([chunk.clone() for chunk in self.state.outer_gradient()])
        momentum = self.state.outer_momentum
        assert momentum is not None, "`Vectors` have one"
        return Vectors(self.state.slow_weights.clone(), momentum.clone(), gradient)

    def step(self, outcome: Outcome) -> None:
        """Take the outer step with the outcome of the round."""
        self.state.step(None if isinstance(outcome, Alone) else outcome.received)

    def numbers(self) -> Tensor:
        """Return everything that a swap may change: the slow weights, the momentum and the model's weights."""
        return torch.cat([*self.state.tensors().values(), self.state.parameters.read(0, self.state.num_elements)])


@dataclass(frozen=True, slots=True)
class Pair:
    """Two replicas that swap with each other, and their twins, which receive exact parts without a network."""

    replicas: Sequence[Replica]
    twins: Sequence[Replica]

    @classmethod
    def make(cls, outer: OuterSpec) -> Pair:
        return cls(*([Replica(seed, outer=outer) for seed in (1, 2)] for _ in range(2)))

    def train(self) -> list[Vectors]:
        """Train the replicas, and twins that first take over their states. Return the vectors of the replicas."""
        for replica, twin in zip(self.replicas, self.twins, strict=True):
            twin.state.take(replica.state.tensors())
            twin.train()
        return [replica.train() for replica in self.replicas]

    def is_whole(self, outcomes: Sequence[Outcome], vectors: Sequence[Vectors], *, codec: CodecSpec) -> bool:
        """Take the outer step. Returns whether each replica applied the parts that its outcome names, and nothing else.

        After a solo round, and with fp32, a replica must equal its twin bit for bit. Other codecs must keep the mean.
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
