"""How much others may ask of this node: a rate per peer, and one for all of them together. Pure.

Anybody can create peer ids, and a thousand of them together use up the shared rate. So a node that has answered a
request of this one also has a small allowance of its own, which no other peer can use up. Peers that only send requests
never get one. The number of these allowances is limited: while their owners keep answering, others have to wait for a
free one.
"""

from __future__ import annotations

from collections import OrderedDict

from noloco_p2p.rates import Buckets, Rate, TokenBucket

MAX_PEERS = 1024  # that are counted
MAX_KNOWN = 64  # nodes with their own allowance
KNOWN_FOR_S = 300.0  # how long a node keeps its place after its last answer, if others want it


class Allowance:
    """Call `admits` before the work, and `charge` its cost. `now_s` is of any clock that does not go back.

    `of_known`: what each of MAX_KNOWN nodes has for itself when `of_all` is used up.
    """

    def __init__(self, *, of_one: Rate, of_all: Rate, of_known: Rate) -> None:
        self._all = TokenBucket.full(of_all, 0.0)
        self._peers = Buckets(of_one, max_keys=MAX_PEERS)
        self._of_known = of_known
        # When each node last answered, the longest ago first, and its own allowance.
        self._known: OrderedDict[str, tuple[float, TokenBucket]] = OrderedDict()

    def answered(self, peer_id: str, *, now_s: float) -> None:
        """A node has answered a question of this one."""
        if peer_id not in self._known and len(self._known) >= MAX_KNOWN:
            oldest, (at_s, _) = next(iter(self._known.items()))
            if now_s - at_s < KNOWN_FOR_S:
                return
            del self._known[oldest]
        _, own = self._known.get(peer_id, (now_s, TokenBucket.full(self._of_known, now_s)))
        self._known[peer_id] = now_s, own
        self._known.move_to_end(peer_id)

    def admits(self, peer_id: str, *, now_s: float) -> bool:
        pays = self._payer(peer_id, now_s)
        return pays.left > 0.0 and self._peers.of(peer_id, now_s).left > 0.0

    def charge(self, peer_id: str, units: float, *, now_s: float) -> None:
        self._payer(peer_id, now_s).left -= units
        self._peers.of(peer_id, now_s).left -= units

    def _payer(self, peer_id: str, now_s: float) -> TokenBucket:
        """The shared bucket, or when that is empty the peer's own one if it has one; refilled."""
        payer = self._all
        if self._all.refill(now_s) <= 0.0 and peer_id in self._known:
            payer = self._known[peer_id][1]
            payer.refill(now_s)
        return payer
