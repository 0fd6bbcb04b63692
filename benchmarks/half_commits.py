"""Measure how a swarm is affected by swaps that only one side has applied.

    python benchmarks/half_commits.py [--quick] [--json FILE]

Eight replicas, which use the outer state of the production code, minimize a noisy quadratic function in 1,000 rounds of
random pairs. The first time, all swaps are whole. The second time, only one side commits the early or the late part in
a tenth of the swaps, as after a lost Ready. Noise, pairs and start are the same in both cases, so only the half-commits
differ.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from claims import Claim, run
from harness.specs import published
from harness.swapped import EVEN, received
from torch import Tensor, nn

from noloco_p2p.gossip.frames import SectionName
from noloco_p2p.gossip.outcome import Received
from noloco_p2p.outer.outer_state import OuterState

NUM_REPLICAS, SIZE, SHARE = 8, 1000, 0.1
INNER_RATE, NOISE = 0.05, 0.02
SLOW, MOMENTUM, GRADIENT = SectionName


@dataclass(frozen=True, slots=True)
class Walk:
    """The result of a walk by round: the mean of all replicas, and their root mean square distance from it."""

    means: Tensor
    spreads: Tensor
    losses: Tensor
    num_half: int


class Bowl(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(SIZE))


def sections(state: OuterState) -> dict[SectionName, Tensor]:
    gradient = torch.cat([chunk.clone() for chunk in state.outer_gradient()])
    return {name: vector.clone() for name, vector in state.sections().items()} | {GRADIENT: gradient}


def part_of(whole: Received, names: tuple[SectionName, ...]) -> Received | None:
    for name in set(whole.sections) - set(names):
        del whole.sections[name]
    return whole if whole.sections else None


def walk(num_rounds: int, *, share: float, seed: int) -> Walk:
    """Run the rounds. In the fraction `share` of the swaps, only one of the two peers commits a part."""
    pairs, faults, noise = random.Random(seed), random.Random(seed + 1), torch.Generator().manual_seed(seed)
    curvature = torch.linspace(0.2, 2.0, SIZE)
    states = [OuterState(Bowl(), published()) for _ in range(NUM_REPLICAS)]
    means, spreads, losses, num_half = [], [], [], 0
    for _ in range(num_rounds):
        for state in states:
            weights = state.parameters.read(0, SIZE)
            state.parameters.add(0, -INNER_RATE * curvature * weights + NOISE * torch.randn(SIZE, generator=noise))
        sent = [sections(state) for state in states]
        order = pairs.sample(range(NUM_REPLICAS), NUM_REPLICAS)
        for one, other in zip(order[::2], order[1::2], strict=True):
            broken, loser, is_early = faults.random() < share, faults.choice((one, other)), faults.random() < 0.5
            num_half += broken
            for here, there in ((one, other), (other, one)):
                names = (SLOW, MOMENTUM, GRADIENT)
                if broken and is_early:  # one peer has the early part and gets no late part; the other has nothing
                    names = () if here == loser else (SLOW, MOMENTUM)
                elif broken:
                    names = (SLOW, MOMENTUM) if here == loser else names
                swap = part_of(received(sent[here], sent[there]), names)
                gradient = swap.sections.get(GRADIENT) if swap else None
                verdict = states[here].judge(gradient, EVEN)
                states[here].step(swap, scales=verdict.scales)
        slow = torch.stack([state.slow_weights for state in states])
        means.append(slow.mean(0))
        spreads.append((slow - means[-1]).square().sum(1).mean().sqrt())
        losses.append((0.5 * curvature * slow.square()).sum(1).mean())
    return Walk(torch.stack(means), torch.stack(spreads), torch.stack(losses), num_half)


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    num_rounds = 100 if quick else 1000
    whole, half = (walk(num_rounds, share=share, seed=7) for share in (0.0, SHARE))
    other = walk(num_rounds, share=0.0, seed=8)
    settled = slice(num_rounds // 2, None)
    apart = (half.means - whole.means).norm(dim=1)[settled]
    chance = (other.means - whole.means).norm(dim=1)[settled]
    first, last = apart[: len(apart) // 2].mean(), apart[len(apart) // 2 :].mean()
    loss = float(half.losses[settled].mean() / whole.losses[settled].mean() - 1)
    return [
        Claim("rounds", num_rounds, "rounds"),
        Claim("swaps committed by one side only", half.num_half / (num_rounds * NUM_REPLICAS / 2), "of all"),
        Claim("spread of the replicas, whole swaps", float(whole.spreads[settled].mean()), "norm"),
        Claim("spread of the replicas, with half-commits", float(half.spreads[settled].mean()), "norm"),
        Claim("mean of the swarm, apart from that of whole swaps", float(apart.mean()), "norm"),
        Claim("the same, from another seed of the noise", float(chance.mean()), "norm"),
        Claim(
            "drift that adds up: last quarter against third",
            float(last / first),
            "times",
            "<= 1.2",
            bool(last <= 1.2 * first),
        ),
        Claim("loss, here all noise, against whole swaps", 100 * loss, "%"),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
