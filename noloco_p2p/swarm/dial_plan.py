"""Decides which peers to dial, and when to try again.

This module uses neither the network nor a clock. Callers supply the current time as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
ENOUGH_NEIGHBOURS = 16  # with this many neighbours, only bootstraps and lost peers are dialled
LOST_PEERS = 8  # how many of the most recently lost peers are dialled, because they may be alive beyond a partition
LONGEST_PAUSE_LOST_S = 20.0  # short, so that the swarm reunites within half a minute after a partition


@dataclass(slots=True)
class _Attempts:
    failures: int = 0
    next_at_s: float = 0.0
    failed_at_s: float = math.inf
    reason: str = ""


class DialPlan:
    """The plan for dialling bootstraps and known peers.

    The pause between two attempts to dial a peer doubles after each failure, up to a limit. Bootstraps are dialled at
    least every `longest_pause_s`, and the most recently lost peers at least every LONGEST_PAUSE_LOST_S, so that the
    parts of a divided swarm find each other again. For other known peers, the limit is `longest_pause_remembered_s`.
    """

    def __init__(
        self,
        own_peer_id: str,
        bootstraps: Mapping[str, Sequence[str]],
        *,
        longest_pause_s: float,
        longest_pause_remembered_s: float = 300.0,
    ) -> None:
        self._own_peer_id = own_peer_id
        self._bootstraps = {peer: tuple(addresses) for peer, addresses in bootstraps.items() if peer != own_peer_id}
        self._longest_pause_s = longest_pause_s
        self._longest_pause_remembered_s = longest_pause_remembered_s
        self._attempts: dict[str, _Attempts] = {}
        self._lost: frozenset[str] = frozenset()

    def due(
        self,
        remembered: Mapping[str, Sequence[str]],
        neighbours: Iterable[str],
        *,
        heard_of: Iterable[str] = (),
        now_s: float,
        most: int = 8,
    ) -> dict[str, tuple[str, ...]]:
        """Return, by peer id, the addresses of at most `most` peers that must be dialled now.

        Missing bootstraps come first. The missing peers in `remembered` follow, in the order of `remembered`. A peer in
        `neighbours` does not count as missing. If there are many neighbours, a peer in `heard_of` does not count as
        missing either, because its records still arrive.
        """
        near = {*neighbours, self._own_peer_id}
        reachable = {*self._bootstraps, *remembered} - near
        self._attempts = {peer: attempts for peer, attempts in self._attempts.items() if peer in reachable}
        known = near | {*heard_of} if len(near) > ENOUGH_NEIGHBOURS else near
        missing = [peer for peer in remembered if peer not in known and peer not in self._bootstraps]
        self._lost = frozenset(missing[:LOST_PEERS])
        targets = [peer for peer in self._bootstraps if peer not in near]
        targets += missing if len(near) <= ENOUGH_NEIGHBOURS else missing[:LOST_PEERS]
        due = [peer for peer in targets if self._next_at_s(peer) <= now_s]
        return {peer: self._merged(peer, remembered) for peer in due[:most]}

    def reached(self, peer_id: str, *, now_s: float) -> None:
        """Record that a peer answered. It is not dialled again for a while, even if it does not become a neighbour."""
        self._attempts[peer_id] = _Attempts(next_at_s=now_s + self._longest_pause_s)

    def failed(self, peer_id: str, reason: str, *, now_s: float) -> None:
        attempts = self._attempts.setdefault(peer_id, _Attempts())
        attempts.next_at_s = now_s + FIRST_PAUSE_S * 2.0 ** min(attempts.failures, 30)
        attempts.failed_at_s = now_s
        attempts.failures += 1
        attempts.reason = reason

    def forget_failures(self) -> None:
        """Make all peers due for dialling, because this machine's network has just come back."""
        self._attempts.clear()

    def failures(self) -> dict[str, str]:
        """Return, by peer id, why bootstraps could not be reached on the last attempt."""
        tried = {peer: self._attempts[peer] for peer in self._bootstraps if peer in self._attempts}
        return {peer: attempts.reason for peer, attempts in tried.items() if attempts.failures}

    def _next_at_s(self, peer_id: str) -> float:
        attempts = self._attempts.get(peer_id)
        if attempts is None:
            return -math.inf
        # The longest pause is computed on each call, because the peer may have become one of the lost peers since.
        if peer_id in self._bootstraps:
            longest_s = self._longest_pause_s
        else:
            longest_s = LONGEST_PAUSE_LOST_S if peer_id in self._lost else self._longest_pause_remembered_s
        return min(attempts.next_at_s, attempts.failed_at_s + longest_s)

    def _merged(self, peer_id: str, remembered: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._bootstraps.get(peer_id, ()), *remembered.get(peer_id, ()))))
