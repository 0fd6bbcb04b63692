"""This module decides the order in which neighbours in the next stage are asked for a slot.

Callers supply the random number generator as an argument.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from statistics import fmean
from typing import Literal

from blake3 import blake3

from noloco_p2p.flow.frames import MicrobatchTicket

SMOOTHING = 0.2  # weight of a new measurement; the average covers about five microbatches

Rule = Literal["random", "fast"]


class Routing:
    """Draws the order of the neighbours by one of two rules.

    With `random`, all orders are equally likely, so each neighbour with a free slot is equally likely to get the
    microbatch. With `fast`, the probability that a neighbour comes first is proportional to its measured rate, so slow
    neighbours are still measured.
    """

    def __init__(self, rng: random.Random, rule: Rule = "random") -> None:
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
