"""How many swaps each other peer has had with this one, compared to its fair share. Pure.

Without a bound, a peer that offers to everybody all the time would be the partner in most rounds. So this peer keeps an
account for each proven peer id. A swap costs one, regardless of who offered it, and each round of this peer adds
1.5 / (live - 1). Offers of a peer whose account is below one are refused. This peer itself draws every peer with the
same chance, but one whose account is below zero only when there is no other: a peer that is always free would otherwise
be found more often than the others.
"""

from __future__ import annotations

from collections.abc import Iterable

FAIR_SHARES = 1.5  # the most that a peer may have: pairs of an honest swarm are random, so some meet more often
START = 2.0  # initial value of an account, in swaps
MOST = 4.0
LEAST = -2.0
MAX_ACCOUNTS = 4096  # in addition to those of the live peers


class Shares:
    """The accounts. For a peer without a live record the account is kept while it is below START.

    So leaving and coming back gains nothing.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, float] = {}

    def open_round(self, live: Iterable[str], *, num_live: int) -> None:
        """Begin a round of this peer.

        live: peers with a live record, or the known ones among them. num_live: how many there are, including this one.
        """
        earned, here = FAIR_SHARES / max(1, num_live - 1), set(live)
        grown = {peer: min(MOST, self._account(peer) + earned) for peer in here | self._accounts.keys()}
        gone = sorted(peer for peer, account in grown.items() if peer not in here and account < START)
        kept = here | set(sorted(gone, key=lambda peer: grown[peer])[:MAX_ACCOUNTS])
        self._accounts = {peer: account for peer, account in grown.items() if peer in kept}

    def swapped(self, peer_id: str) -> None:
        """A swap with this peer begins; one that fails costs as much."""
        self._accounts[peer_id] = max(LEAST, self._account(peer_id) - 1.0)

    def has_had(self, peer_id: str) -> bool:
        """Whether this peer has had its share."""
        return self._account(peer_id) < 1.0 - 1e-9  # tolerance for sums of fractions

    def owes(self, peer_id: str) -> bool:
        """Whether this peer has had more than its share."""
        return self._account(peer_id) < 0.0

    def _account(self, peer_id: str) -> float:
        return self._accounts.get(peer_id, START)
