"""Decide which peer to ask for a swap, and when to ask it again."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from noloco_p2p.gossip.frames import FINAL, RefuseCode
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.shares import Shares

FAILED_RETRY_S = 10.0  # before an unreachable peer is asked again
LEAST_RETRY_S, MOST_RETRY_S = 0.05, 2.0  # before a peer that refused is asked again; doubles with each refusal
MAX_REMEMBERED = 4096


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

        A peer that has had more than its share of swaps is asked only if there is no other.
        """
        free = [peer for peer in self._eligible(live) if self._retry_at_s.get(peer.peer_id, 0.0) <= now_s]
        return self._rng.choice([peer for peer in free if not self.shares.owes(peer.peer_id)] or free) if free else None

    def wait_s(self, live: Sequence[Candidate], now_s: float) -> float:
        """Return the number of seconds until a peer may be asked, at most MOST_RETRY_S, as new peers may appear."""
        waits = (self._retry_at_s.get(peer.peer_id, 0.0) - now_s for peer in self._eligible(live))
        return max(0.0, min(waits, default=MOST_RETRY_S))

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
        if code in (RefuseCode.NOT_TRAINING, RefuseCode.STALE):
            self._away[peer_id] = code
        times = self._refusals[peer_id] = self._refusals.get(peer_id, 0) + 1
        # A random delay that grows separates peers that keep refusing each other.
        apart_s = min(MOST_RETRY_S, LEAST_RETRY_S * 2.0 ** min(times - 1, 10)) * self._rng.uniform(0.5, 1.5)
        self._wait(peer_id, now_s + max(0.0, retry_after_s) + apart_s)

    def failed(self, peer_id: str, now_s: float) -> None:
        """Record that a peer could not be reached, or that a swap with it failed."""
        self._away[peer_id] = None
        self._wait(peer_id, now_s + FAILED_RETRY_S)

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

    def _eligible(self, live: Sequence[Candidate]) -> list[Candidate]:
        return [
            peer
            for peer in live
            if peer.state == "training" and peer.can_be_called and peer.peer_id not in self._incompatible
        ]
