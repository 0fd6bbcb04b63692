"""How far apart the replicas are, from the sketches in their records: no weight has to travel. Pure.

spread = sqrt(mean_i |phi_i - mean|^2) / |mean|, phi_i the slow weights of peer i: what `train.judge` measures on
checkpoints. Distances come from the sketches, norms are published exactly, and
|mean|^2 = mean_i |phi_i|^2 - mean_i |phi_i - mean|^2. With n peers whose deviations are independent the estimate has a
relative standard deviation of 1 / sqrt(2 * SKETCH_SIZE * (n - 1)): 5 % at four peers, 3 % at nine. Records are of
different moments, up to a round or an announcement apart, so what peers learn in between counts as spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from noloco_p2p.codec.sketch import SKETCH_SIZE, unpack
from noloco_p2p.swarm.records import PeerRecord

LARGEST_NORM = 1e30


@dataclass(frozen=True, slots=True)
class Spread:
    """`of_all`: the spread of the replicas; `of_each`: the distance of a peer from the mean, as a share of its norm."""

    of_all: float
    of_each: Mapping[str, float]

    @property
    def num_peers(self) -> int:
        return len(self.of_each)


def measure(records: list[PeerRecord]) -> Spread | None:
    """The spread of the peers that publish a sketch that can be read; None with fewer than two."""
    readable = [
        (record.peer_id, record.norm, packed)
        for record in records
        if record.sketch and record.norm and 0 < record.norm < LARGEST_NORM and (packed := unpack(record.sketch))
    ]
    if len(readable) < 2:
        return None
    values = np.asarray([numbers for _, _, (numbers, _) in readable])
    noise = np.asarray([SKETCH_SIZE / 12 * step**2 for _, _, (_, step) in readable])  # of rounding to 16 bits
    squares = np.maximum(0.0, np.square(values - values.mean(0)).sum(1) - noise)
    mean_square = float(np.square([norm for _, norm, _ in readable]).mean() - squares.mean())
    if mean_square <= 0:  # the peers have nothing in common, or somebody publishes nonsense
        return None
    norm = math.sqrt(mean_square)
    each = np.sqrt(squares) / norm
    peers = [peer for peer, _, _ in readable]
    return Spread(math.sqrt(float(squares.mean())) / norm, dict(zip(peers, each.tolist(), strict=True)))
