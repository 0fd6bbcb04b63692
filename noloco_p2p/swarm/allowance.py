"""How much others may ask of this node: a rate for each peer, and one for all of them together. Pure.

Peer ids cost nothing, so many of them could use up what there is for all. Half of that is kept for peers that this
node knows: a flood of strangers does not keep it from answering its neighbours.
"""

from __future__ import annotations

from noloco_p2p.rates import Buckets, Rate, TokenBucket

KEPT_FOR_THE_KNOWN = 0.5  # of what there is for all
MAX_PEERS = 1024  # that are counted


class Allowance:
    """Ask `admits` before the work, and `charge` what it cost. `now_s` is of any clock that does not go back."""

    def __init__(self, *, of_one: Rate, of_all: Rate) -> None:
        self._all = TokenBucket.full(of_all, 0.0)
        self._peers = Buckets(of_one, max_keys=MAX_PEERS)

    def admits(self, peer_id: str, *, is_known: bool, now_s: float) -> bool:
        kept = 0.0 if is_known else KEPT_FOR_THE_KNOWN * self._all.rate.burst
        return self._all.refill(now_s) > kept and self._peers.of(peer_id, now_s).left > 0.0

    def charge(self, peer_id: str, units: float, *, now_s: float) -> None:
        self._all.left -= units
        self._peers.of(peer_id, now_s).left -= units
