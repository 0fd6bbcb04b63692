"""Limits the work that other peers may request of this node, with one rate per peer and one shared rate for all peers.

Anybody can create peer ids, and a thousand ids together can use up the shared rate. A node that has answered a request
from this node therefore also has a small allowance of its own, which no other peer can use up. Peers that only send
requests never get such an allowance. The number of these allowances is limited, so new nodes must wait while the owners
of all allowances keep answering. This module reads no clock: callers supply the current time as an argument.
"""

from __future__ import annotations

from collections import OrderedDict

from noloco_p2p.rates import Buckets, Rate, TokenBucket

MAX_PEERS = 1024  # peers whose requests are counted
MAX_KNOWN = 64  # nodes with their own allowance
KNOWN_FOR_S = 300.0  # how long after its last answer a node keeps its allowance if others want one


class Allowance:
    """The rates that limit the requests of other peers.

    Call `admits` before the work for a request, and `charge` with its cost. `now_s` can come from any monotonic clock.
    `of_one` is the rate per peer, and `of_all` is the shared rate. `of_known` is the rate that each of up to MAX_KNOWN
    nodes has for itself when the shared rate is used up.
    """

    def __init__(self, *, of_one: Rate, of_all: Rate, of_known: Rate) -> None:
        self._all = TokenBucket.full(of_all, 0.0)
        self._peers = Buckets(of_one, max_keys=MAX_PEERS)
        self._of_known = of_known
        # The time of each node's last answer, and its own allowance. The node that answered longest ago comes first.
        self._known: OrderedDict[str, tuple[float, TokenBucket]] = OrderedDict()

    def answered(self, peer_id: str, *, now_s: float) -> None:
        """Record that a node has answered a request from this node."""
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
        """Return the refilled bucket to charge: the shared bucket, or the peer's own if the shared bucket is empty."""
        payer = self._all
        if self._all.refill(now_s) <= 0.0 and peer_id in self._known:
            payer = self._known[peer_id][1]
            payer.refill(now_s)
        return payer
