"""Decide which peer to ask for a swap, and when to ask it again, and give each peer its fair share of swaps.

Without a limit, a peer that constantly makes offers to everybody would be this peer's partner most of the time. So this
peer keeps an account for each authenticated peer id. A swap costs one credit, regardless of who made the offer. Each
swap of this peer adds 1.35 / (live - 1) credits to every account. Offers from a peer with less than one credit are
refused. A swap that holds this peer up costs as much as the swaps that it could have made meanwhile, whether or not it
is committed in the end.

This peer draws all other peers with equal probability, except that a peer with a negative balance is drawn only if
there is no other. Otherwise, a peer that is always free would be found more often than the others.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from noloco_p2p.gossip.frames import FINAL, RefuseCode
from noloco_p2p.gossip.seams import Candidate

FAILED_RETRY_S = 10.0  # before an unreachable peer is asked again
LEAST_RETRY_S, MOST_RETRY_S = 0.05, 2.0  # before a peer that refused is asked again; doubles with each refusal
MANY_REFUSALS = 32  # in a row, after which a peer counts as away until its next swap
MAX_REMEMBERED = 4096
FAIR_SHARES = 1.35  # above one because pairs are random, so some honest peers meet more often
START = 2.0  # initial balance of an account, in swaps
MOST = 4.0
LEAST = -2.0
LEAST_OF_SLOW = -1000.0
MAX_ACCOUNTS = 4096  # in addition to the accounts of live peers


class Pairing:
    """Draws partners uniformly at random among the live peers that may be asked now."""

    def __init__(self, rng: random.Random) -> None:
        self.shares = Shares()
        self._rng = rng
        self._retry_at_s: OrderedDict[str, float] = OrderedDict()
        self._refusals: dict[str, int] = {}  # in a row
        # Peers that do not swap with this one at the moment, with their reason, or None for a failure.
        self._away: dict[str, RefuseCode | None] = {}
        self._incompatible: dict[str, str] = {}

    def next(self, live: Sequence[Candidate], now_s: float) -> Candidate | None:
        """Return the peer to ask, or None if there is none at the moment.

        A peer that has had more than its share of swaps is asked only if no other may be asked now, and one that has
        held this peer up only if there is no other.
        """
        free = [peer for at_s, peer in self._free_at_s(live) if at_s <= now_s]
        return self._rng.choice([peer for peer in free if not self.shares.owes(peer.peer_id)] or free) if free else None

    def wait_s(self, live: Sequence[Candidate], now_s: float) -> float:
        """Return the number of seconds until a peer may be asked, at most MOST_RETRY_S, as new peers may appear."""
        waits = (at_s - now_s for at_s, _ in self._free_at_s(live))
        return min(MOST_RETRY_S, max(0.0, min(waits, default=MOST_RETRY_S)))

    def began(self, peer_id: str, live: Sequence[Candidate], *, num_live: int) -> None:
        """Record the start of a swap with a peer."""
        # Anyone can create records, and some peers are away, but the shares of the others must not shrink.
        real = [peer for peer in self._eligible(live) if peer.peer_id not in self._away]
        share = len(real) / len(live) if live else 1.0
        self.shares.earn((peer.peer_id for peer in live), num_live=round(1 + (num_live - 1) * share))
        self.shares.swapped(peer_id)
        self._refusals.pop(peer_id, None)
        self._away.pop(peer_id, None)

    def refused(self, peer_id: str, code: RefuseCode, *, retry_after_s: float, now_s: float) -> None:
        if code in FINAL:
            self._incompatible[peer_id] = code.name
            return
        times = self._refusals[peer_id] = self._refusals.get(peer_id, 0) + 1
        if code in (RefuseCode.NOT_TRAINING, RefuseCode.STALE) or times >= MANY_REFUSALS:
            self._away[peer_id] = code
        # A random delay that grows separates peers that keep refusing each other.
        apart_s = min(MOST_RETRY_S, LEAST_RETRY_S * 2.0 ** min(times - 1, 10)) * self._rng.uniform(0.5, 1.5)
        self._wait(peer_id, now_s + max(0.0, retry_after_s) + apart_s)

    def failed(self, peer_id: str, now_s: float) -> None:
        """Record that a peer could not be reached, or that a swap with it failed."""
        self._away[peer_id] = None
        self._wait(peer_id, now_s + FAILED_RETRY_S)

    def num_failing(self, live: Iterable[Candidate]) -> int:
        """Return how many peers could not be reached or failed when they were tried last."""
        return sum(self._away.get(peer.peer_id, self) is None for peer in live)

    def may_come(self, live: Iterable[Candidate]) -> bool:
        """Return whether any peer is training, as far as its record and its last answer say."""
        return any(
            peer.state == "training" and self._away.get(peer.peer_id) is not RefuseCode.NOT_TRAINING for peer in live
        )

    def _wait(self, peer_id: str, until_s: float) -> None:
        self._retry_at_s.pop(peer_id, None)
        self._retry_at_s[peer_id] = until_s
        if len(self._retry_at_s) > MAX_REMEMBERED:
            forgotten, _ = self._retry_at_s.popitem(last=False)
            self._refusals.pop(forgotten, None)
            self._away.pop(forgotten, None)

    def avoids(self, peer_id: str, live: Sequence[Candidate]) -> bool:
        """Return whether a peer has held this one up, and there are others."""
        slow = self.shares.is_slow
        return slow(peer_id) and any(
            not slow(peer.peer_id) and peer.peer_id not in self._away for peer in self._eligible(live)
        )

    def _free_at_s(self, live: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        asked = [peer for peer in self._eligible(live) if not self.avoids(peer.peer_id, live)]
        return [(self._retry_at_s.get(peer.peer_id, 0.0), peer) for peer in asked]

    def _eligible(self, live: Sequence[Candidate]) -> list[Candidate]:
        return [
            peer
            for peer in live
            if peer.state == "training" and peer.can_be_called and peer.peer_id not in self._incompatible
        ]


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

    def is_slow(self, peer_id: str) -> bool:
        """Return whether a peer has held this one up, and has not made up for it."""
        return self._account(peer_id) < LEAST

    def _charge(self, peer_id: str, amount: float, *, least: float) -> None:
        account = self._account(peer_id)
        self._accounts[peer_id] = min(account, max(least, account - amount))

    def _account(self, peer_id: str) -> float:
        return self._accounts.get(peer_id, START)
