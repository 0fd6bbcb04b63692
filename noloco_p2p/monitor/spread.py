"""Uses the sketches in the peers' records to estimate how far apart the replicas are, without fetching any weights.

spread = sqrt(mean_i |phi_i - mean|^2) / |mean|, where phi_i are the slow weights of peer i. It is the quantity that
`trainer.swarm_evaluation` measures on checkpoints. The distances follow from the sketches, and the records contain the
exact norms. The norm of the mean follows from |mean|^2 = mean_i |phi_i|^2 - mean_i |phi_i - mean|^2.

Peers make sketches at marks, which are fixed points of the schedule (`peer/sketcher.py`), and only sketches of the same
mark can be compared. A record holds one sketch, and peers reach a mark and announce it at different times. For this
reason, the monitor keeps the last few sketches of each peer. Among the marks that are shared by nearly as many peers as
the most common mark, it uses the newest. If the same peers also share earlier marks close to it, the monitor averages
over all of these marks, because the sketches of different marks are independent. With n peers whose deviations are
independent, one mark gives the spread with a relative standard deviation of 1 / sqrt(2 * SKETCH_SIZE * (n - 1)), which
is 9 % for two peers. Averaging over k marks divides this by sqrt(k). Two peers that have just swapped with each other
count as one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from noloco_p2p.codec.sketch import AT_REST, MARKS, SKETCH_SIZE, Sketch, unpack
from noloco_p2p.swarm.records import PeerRecord

NEAR = MARKS // 32  # the spread changes by a few per cent between two marks within this distance
KEPT = 4  # sketches per peer
NEARLY = 0.9


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of the replicas.

    `of_all` is relative to the norm of the mean. `of_each` is the distance of each peer from the mean, relative to the
    same norm. `progress` is the point of the schedule at which the peers had these weights. It is 1 for peers at rest.
    """

    of_all: float
    of_each: Mapping[str, float]
    progress: float

    @property
    def num_peers(self) -> int:
        return len(self.of_each)


@dataclass(slots=True)
class _Kept:
    text: str = ""  # the last packed sketch, because most reads return it again
    by_mark: dict[int, Sketch] = field(default_factory=dict)  # the newest is last

    def take(self, text: str) -> None:
        if text == self.text:
            return
        self.text = text
        if sketch := unpack(text):
            self.by_mark.pop(sketch.mark, None)
            self.by_mark[sketch.mark] = sketch
            if len(self.by_mark) > KEPT:
                del self.by_mark[next(iter(self.by_mark))]


class Sketches:
    """The newest sketches of every peer, by mark."""

    def __init__(self) -> None:
        self._by_peer: dict[str, _Kept] = {}

    @property
    def num_peers(self) -> int:
        """The number of peers with a valid sketch."""
        return len(self._by_peer)

    def take(self, records: Iterable[PeerRecord]) -> None:
        """Add the sketches that these peers publish now, and forget all other peers."""
        before, self._by_peer = self._by_peer, {}
        for record in records:
            kept = before.get(record.peer_id) or _Kept()
            kept.take(record.sketch)
            if kept.by_mark:
                self._by_peer[record.peer_id] = kept

    def measure(self) -> Spread | None:
        """Measure the spread of the peers that share a mark. The result is None if no two peers share one."""
        by_mark: dict[int, dict[str, Sketch]] = defaultdict(dict)
        for peer, kept in self._by_peer.items():
            for mark, sketch in kept.by_mark.items():
                by_mark[mark][peer] = sketch
        most = max(map(len, by_mark.values()), default=0)
        if most < 2:
            return None
        newest = max(mark for mark, peers in by_mark.items() if len(peers) >= NEARLY * most)
        peers = by_mark[newest].keys()
        near = [mark for mark in by_mark if newest - NEAR <= mark <= newest and by_mark[mark].keys() == peers]
        measured = [found for mark in near if (found := _squares(by_mark[mark]))]
        if not measured:
            return None
        squares = {peer: sum(each[peer] for each in measured) / len(measured) for peer in peers}
        of_all = math.sqrt(max(0.0, sum(squares.values()) / len(squares)))
        of_each = {peer: math.sqrt(max(0.0, square)) for peer, square in squares.items()}
        return Spread(of_all, of_each, 1.0 if newest == AT_REST else newest / MARKS)


def _squares(sketches: Mapping[str, Sketch]) -> dict[str, float] | None:
    """Return |phi_i - mean|^2 / |mean|^2 for each peer at one mark.

    A value can be negative, because the expected rounding error of the integers is subtracted.
    """
    values = np.asarray([sketch.numbers for sketch in sketches.values()])
    rounding = np.asarray([SKETCH_SIZE / 12 * sketch.step**2 for sketch in sketches.values()])
    of_difference = (1 - 2 / len(sketches)) * rounding + rounding.mean() / len(sketches)
    squares = np.square(values - values.mean(0)).sum(1) - of_difference
    mean_square = float(np.square([sketch.norm for sketch in sketches.values()]).mean() - squares.mean())
    if mean_square <= 0:  # the peers have nothing in common, or one publishes nonsense
        return None
    return dict(zip(sketches, (squares / mean_square).tolist(), strict=True))
