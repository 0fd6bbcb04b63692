"""This module keeps accounts that limit each of the other peers to its fair share of this peer's swaps.

Without a limit, a peer that constantly makes offers to everybody would be this peer's partner most of the time. So this
peer keeps an account for each authenticated peer id. A swap costs one credit, regardless of who made the offer. Each
swap of this peer adds 1.5 / (live - 1) credits to every account. Offers from a peer with less than one credit are
refused. A swap that holds this peer up costs as much as the swaps that it could have made meanwhile.

This peer draws all other peers with equal probability, except that a peer with a negative balance is drawn only if
there is no other. Otherwise, a peer that is always free would be found more often than the others.
"""

from __future__ import annotations

from collections.abc import Iterable

FAIR_SHARES = 1.5  # the limit is above one because pairs are random, so some honest peers meet more often
START = 2.0  # initial balance of an account, in swaps
MOST = 4.0
LEAST = -2.0
LEAST_OF_SLOW = -1000.0
MAX_ACCOUNTS = 4096  # in addition to the accounts of live peers


class Shares:
    """The accounts of all other peers.

    The account of a peer without a live record is kept while it is below START, so that a peer gains nothing by leaving
    and rejoining.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, float] = {}

    def earn(self, live: Iterable[str], *, num_live: int) -> None:
        """Credit every account, because a swap of this peer begins.

        `live` holds the known peers with a live record. `num_live` is the number of all live peers,
        including this one.
        """
        earned, here = FAIR_SHARES / max(1, num_live - 1), set(live)
        grown = {peer: min(MOST, self._account(peer) + earned) for peer in here | self._accounts.keys()}
        gone = sorted(peer for peer, account in grown.items() if peer not in here and account < START)
        kept = here | set(sorted(gone, key=lambda peer: grown[peer])[:MAX_ACCOUNTS])
        self._accounts = {peer: account for peer, account in grown.items() if peer in kept}

    def swapped(self, peer_id: str) -> None:
        """Charge a peer for a swap that is beginning. A swap that fails costs the same."""
        self._charge(peer_id, 1.0, least=LEAST)

    def held_up(self, peer_id: str, num_swaps: float) -> None:
        """Charge a peer for a swap that took the time of this many swaps."""
        self._charge(peer_id, num_swaps - 1.0, least=LEAST_OF_SLOW)

    def has_had(self, peer_id: str) -> bool:
        """Return whether a peer has had its share of swaps."""
        return self._account(peer_id) < 1.0 - 1e-9  # tolerance for sums of fractions

    def owes(self, peer_id: str) -> bool:
        """Return whether a peer has had more than its share of swaps."""
        return self._account(peer_id) < 0.0

    def _charge(self, peer_id: str, amount: float, *, least: float) -> None:
        account = self._account(peer_id)
        self._accounts[peer_id] = min(account, max(least, account - amount))

    def _account(self, peer_id: str) -> float:
        return self._accounts.get(peer_id, START)
