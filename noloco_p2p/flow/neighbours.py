"""Draw the neighbours to which a node of the pipeline sends, and the order in which it asks them for a slot.

Callers supply the random number generator as an argument.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from statistics import fmean
from typing import Literal

from blake3 import blake3

from noloco_p2p.flow.frames import MicrobatchTicket

SMOOTHING = 0.2  # weight of a new measurement; the average covers about five microbatches


class Few:
    """A few random live peers, which are kept as long as they are alive."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self.chosen: tuple[str, ...] = ()
        self._rng = rng
        self._most = most

    def update(self, live: Collection[str]) -> None:
        kept = [peer for peer in self.chosen if peer in live]
        others = sorted(set(live) - set(kept))
        num_new = max(0, min(self._most - len(kept), len(others)))
        self.chosen = (*kept, *self._rng.sample(others, num_new))

    def drop_one(self) -> None:
        """Drop one peer. The next `update` draws a replacement, possibly the same peer."""
        if self.chosen:
            left_out = self._rng.choice(self.chosen)
            self.chosen = tuple(peer for peer in self.chosen if peer != left_out)


class Routing:
    """Draws the order of the neighbours by one of two rules.

    With `random`, all orders are equally likely, so each neighbour with a free slot is equally likely to get the
    microbatch. With `fast`, the probability that a neighbour comes first is proportional to its measured rate, so slow
    neighbours are still measured.
    """

    def __init__(self, rng: random.Random, rule: Literal["random", "fast"] = "random") -> None:
        self._rng = rng
        self._rule = rule
        self._seconds: dict[str, float] = {}  # from sending a Forward to TAKEN

    def order(self, candidates: Iterable[str], ticket: MicrobatchTicket) -> list[str]:
        """Return the candidates in the order in which to ask them.

        For an evaluation, the result has only one candidate, so that all evaluations of a head take the same path.
        """
        names = sorted(candidates)  # because a seed does not determine the order of a set
        if not ticket.is_training:  # rendezvous hashing: the path changes only where neighbours join or leave
            return sorted(names, key=lambda peer: blake3(f"{ticket.id.head} {peer}".encode()).digest())[:1]
        self._rng.shuffle(names)
        if self._rule == "fast" and self._seconds:
            usual_s = fmean(self._seconds.values())  # an unmeasured neighbour counts as average
            # Efraimidis and Spirakis (2006): the largest u^(1/w) comes first with a probability proportional to w =
            # 1/s.
            names.sort(key=lambda peer: -(self._rng.random() ** self._seconds.get(peer, usual_s)))
        return names

    def measured(self, peer: str, seconds: float) -> None:
        seconds = max(seconds, 1e-3)
        before = self._seconds.get(peer, seconds)
        self._seconds[peer] = before + SMOOTHING * (seconds - before)

    def forget(self, peer: str) -> None:
        self._seconds.pop(peer, None)
