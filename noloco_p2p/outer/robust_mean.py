"""Compute the mean of the states of several peers, some of which may lie.

The centre is the coordinate-wise median, which liars cannot move outside the range of the honest states if fewer than
half of the peers lie (Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning, 2018). A state is left
out if it is further from the centre than any honest state would be. Every other state contributes its deviation from
the centre, clipped to a radius, so that no single state moves the mean by more than a small fraction of its norm
(centred clipping; Karimireddy, He, Jaggi: Learning from history for Byzantine robust optimization, 2021).

Both limits are based on measurements in honest swarms of eight peers. Distances from the centre are relative to its
norm. States saved at the same moment had distances of at most 0.037, and none of them would be clipped. States saved at
different times had distances of at most 0.33. A peer that a partition had separated from the seven others for the whole
run had a distance of 0.48.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.codec import chunk_bounds
from noloco_p2p.errors import CheckpointError
from noloco_p2p.outer.checkpoint import Vector

FURTHEST = 0.75  # distance from the centre, relative to its norm, above which a state is left out
# How far one state can move the mean, relative to the norm. The median also moves a little, but the sum is below 1 %.
MOST_MOVED = 0.008


@dataclass(frozen=True, slots=True)
class RobustMean:
    """A mean of states, and the peers whose states it includes.

    `left_out` maps peers to the distances of the states that were left out, and `shortened` maps peers to the distances
    of the states that were clipped.
    """

    weights: Tensor
    admitted: Sequence[str]
    left_out: Mapping[str, float]
    shortened: Mapping[str, float]


def robust_mean(states: Mapping[str, Vector]) -> RobustMean:
    """Compute the robust mean of `states`, which maps peers to flat, finite fp32 vectors of the same size.

    They are read chunk by chunk. Raises CheckpointError if the states are too far apart to decide which ones
    are wrong.
    """
    distances, left_out = leave_out_far(states)
    admitted = {peer: states[peer] for peer in distances}
    radius = MOST_MOVED * len(admitted)
    shortened = {peer: distance for peer, distance in distances.items() if distance > radius}
    shares = torch.tensor(
        [min(1.0, radius / max(each, radius)) for each in distances.values()], dtype=torch.float32, device="cpu"
    )
    weights = torch.empty(next(iter(states.values())).num_elements, dtype=torch.float32, device="cpu")
    for (start, stop), chunk in _chunks(admitted):
        if shortened:
            centre = _median(chunk)
            weights[start:stop] = centre + ((chunk - centre) * shares[:, None]).mean(0)
        else:
            weights[start:stop] = chunk.mean(0)
    return RobustMean(weights, list(admitted), left_out, shortened)


def leave_out_far(states: Mapping[str, Vector]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the distances of the states that are close to each other, and the distances of the other states.

    Raises CheckpointError if no state is left.
    """
    left_out: dict[str, float] = {}
    while near := {peer: state for peer, state in states.items() if peer not in left_out}:
        distances = _distances(near)
        far = {peer: each for peer, each in distances.items() if not each <= FURTHEST}
        if not far:
            return distances, left_out
        left_out |= far
    raise CheckpointError(
        f"the states of {len(states)} peers are too far apart to decide which ones are wrong; "
        "try again when more peers are live"
    )


def _distances(states: Mapping[str, Vector]) -> dict[str, float]:
    """Return the distance of each state from the coordinate-wise median, relative to the norm of the median."""
    squares, length = torch.zeros(len(states), dtype=torch.float64, device="cpu"), 0.0
    for _, chunk in _chunks(states):
        centre = _median(chunk)
        squares += (chunk - centre).square().sum(1, dtype=torch.float64)
        length += float(centre.square().sum(dtype=torch.float64))
    norm = max(length**0.5, 1e-30)  # if the median is zero, all other states are far away
    return dict(zip(states, (squares.sqrt() / norm).tolist(), strict=True))


def _chunks(states: Mapping[str, Vector]) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield ((start, stop), fp32 values of shape (states, stop - start)). Only one chunk of each state is in memory."""
    vectors = list(states.values())
    for start, stop in chunk_bounds(vectors[0].num_elements):
        yield (start, stop), torch.stack([vector.read(start, stop) for vector in vectors])


def _median(chunk: Tensor) -> Tensor:
    """Return the median over the states.

    For an even number of states, it is the midpoint of the middle two, so that no state is preferred.
    """
    ordered = chunk.sort(0).values
    return ordered[(len(chunk) - 1) // 2].lerp(ordered[len(chunk) // 2], 0.5)
