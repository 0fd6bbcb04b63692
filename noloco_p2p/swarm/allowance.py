"""How much others may ask of this node: so much a second for each peer, and so much for all of them together. Pure.

Peer ids cost nothing, so that many of them can use up what is there for all. Half of that is kept for peers that this
node knows: a flood of strangers does not keep it from answering its neighbours.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

KEPT_FOR_THE_KNOWN = 0.5  # of what there is for all
MAX_PEERS = 1024  # that are counted; who was heard of longest ago is forgotten


@dataclass(frozen=True, slots=True)
class Rate:
    """Units a second in the long run, and units at once."""

    per_s: float
    burst: float


@dataclass(slots=True)
class TokenBucket:
    """`left` may fall below zero, by one charge: what an answer costs is known when it is made."""

    rate: Rate
    left: float
    at_s: float

    def refill(self, now_s: float) -> float:
        """Units that are left now."""
        self.left = min(self.left + max(now_s - self.at_s, 0.0) * self.rate.per_s, self.rate.burst)
        self.at_s = now_s
        return self.left


class Allowance:
    """Ask `admits` before the work, and `charge` what it cost. `now_s` is of any clock that does not go back."""

    def __init__(self, *, of_one: Rate, of_all: Rate) -> None:
        self._of_one = of_one
        self._all = TokenBucket(of_all, of_all.burst, 0.0)
        self._peers: OrderedDict[str, TokenBucket] = OrderedDict()

    def admits(self, peer_id: str, *, is_known: bool, now_s: float) -> bool:
        kept = 0.0 if is_known else KEPT_FOR_THE_KNOWN * self._all.rate.burst
        return self._all.refill(now_s) > kept and self._bucket(peer_id, now_s).refill(now_s) > 0.0

    def charge(self, peer_id: str, units: float, *, now_s: float) -> None:
        self._all.left -= units
        self._bucket(peer_id, now_s).left -= units

    def _bucket(self, peer_id: str, now_s: float) -> TokenBucket:
        bucket = self._peers.setdefault(peer_id, TokenBucket(self._of_one, self._of_one.burst, now_s))
        self._peers.move_to_end(peer_id)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return bucket
