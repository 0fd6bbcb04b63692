"""The mean of the states of several peers, some of which may lie.

The centre is the coordinate-wise median, which liars cannot move beyond the honest peers while they are fewer than half
(Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning, 2018). A state that is further from it than
any honest one is left out. Every other state contributes its deviation from the centre, shortened to a radius (centred
clipping; Karimireddy, He, Jaggi: Learning from history for Byzantine robust optimization, 2021), so that no single
state moves the mean by more than a share of its norm.

Both limits come from honest swarms of eight (`benchmarks/honest_states.py`): states of the same moment were up to 0.037
of the norm from the centre, and none of them is shortened. States that were saved up to seven rounds apart were up to
0.33 from it, and a peer that a partition had separated from the seven others for the whole run 0.48.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.errors import CheckpointError

FURTHEST = 0.75  # from the centre, relative to its norm; states further away are left out
MOST_MOVED = 0.008  # of the norm, by one state; the median also moves a little, and together they stay below 1 %


@dataclass(frozen=True, slots=True)
class Distances:
    """The distance `of_each` state from the coordinate-wise median, relative to `norm`, the norm of the median."""

    of_each: Mapping[str, float]
    norm: float


@dataclass(frozen=True, slots=True)
class RobustMean:
    """The mean. `left_out`: distances of the states that do not count. `shortened`: distances of those that were
    clipped.
    """

    weights: Tensor
    admitted: Sequence[str]
    left_out: Mapping[str, float]
    shortened: Mapping[str, float]


def robust_mean(states: Mapping[str, Tensor]) -> RobustMean:
    """Compute the mean of `states`: by peer, flat fp32 vectors of one size, all finite. Mapped files are read by chunk.

    Raises CheckpointError when the states are too far apart to decide which ones are wrong.
    """
    distances, left_out = leave_out_far(states)
    admitted = {peer: states[peer] for peer in distances.of_each}
    radius = MOST_MOVED * len(admitted)
    shortened = {peer: distance for peer, distance in distances.of_each.items() if distance > radius}
    shares = torch.tensor([min(1.0, radius / max(each, radius)) for each in distances.of_each.values()])
    weights = torch.empty_like(next(iter(states.values())))
    for (start, stop), chunk in _chunks(admitted):
        if shortened:
            centre = _median(chunk)
            weights[start:stop] = centre + ((chunk - centre) * shares[:, None]).mean(0)
        else:
            weights[start:stop] = chunk.mean(0)
    return RobustMean(weights, list(admitted), left_out, shortened)


def leave_out_far(states: Mapping[str, Tensor]) -> tuple[Distances, dict[str, float]]:
    """Return the distances of the states that are close to each other, and those of the others.

    Raises CheckpointError when none is left.
    """
    left_out: dict[str, float] = {}
    while near := {peer: state for peer, state in states.items() if peer not in left_out}:
        distances = _distances(near)
        far = {peer: each for peer, each in distances.of_each.items() if not each <= FURTHEST}
        if not far:
            return distances, left_out
        left_out |= far
    raise CheckpointError(
        f"the states of {len(states)} peers are too far apart to decide which ones are wrong; "
        "try again when more peers are live"
    )


def _distances(states: Mapping[str, Tensor]) -> Distances:
    squares, length = torch.zeros(len(states), dtype=torch.float64), 0.0
    for _, chunk in _chunks(states):
        centre = _median(chunk)
        squares += (chunk.double() - centre).square().sum(1)
        length += float(centre.double().square().sum())
    norm = max(length**0.5, 1e-30)  # of zeros, every other state is far
    return Distances(dict(zip(states, (squares.sqrt() / norm).tolist(), strict=True)), norm)


def _chunks(states: Mapping[str, Tensor]) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield ((start, stop), fp32 of shape (states, stop - start)). Only one chunk of each state is in memory."""
    vectors = list(states.values())
    for start, stop in chunk_bounds(vectors[0].numel()):
        yield (start, stop), torch.stack([vector[start:stop] for vector in vectors])


def _median(chunk: Tensor) -> Tensor:
    """The median over the states. An even number has the midpoint of the middle two, so no state is preferred."""
    ordered = chunk.sort(0).values
    return ordered[(len(chunk) - 1) // 2].lerp(ordered[len(chunk) // 2], 0.5)
