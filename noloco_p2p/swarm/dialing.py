"""Whom to dial, and when to try again. Pure: times are given, nothing here touches the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
ENOUGH_NEIGHBOURS = 16  # with so many, only bootstraps that are missing are dialled: that is what merges islands


@dataclass(slots=True)
class _Attempts:
    failures: int = 0
    next_at_s: float = 0.0
    reason: str = ""


class DialPlan:
    """Bootstraps are tried for ever, every `longest_pause_s` in the end; remembered peers ever more rarely."""

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

    def due(
        self, remembered: Mapping[str, Sequence[str]], neighbours: Iterable[str], *, now_s: float, most: int = 8
    ) -> dict[str, tuple[str, ...]]:
        """Peer id -> addresses of those to dial now: missing bootstraps, then remembered peers while few are near."""
        near = {*neighbours, self._own_peer_id}
        for peer in near & self._attempts.keys():
            del self._attempts[peer]
        targets = dict(self._bootstraps)
        if len(near) <= ENOUGH_NEIGHBOURS:
            targets = {peer: tuple(addresses) for peer, addresses in remembered.items()} | targets
            targets = {peer: self._merged(peer, remembered) for peer in [*self._bootstraps, *targets]}
        due = [peer for peer in targets if peer not in near and self._next_at_s(peer) <= now_s]
        return {peer: targets[peer] for peer in due[:most]}

    def failed(self, peer_id: str, reason: str, *, now_s: float) -> None:
        attempts = self._attempts.setdefault(peer_id, _Attempts())
        longest_s = self._longest_pause_s if peer_id in self._bootstraps else self._longest_pause_remembered_s
        attempts.next_at_s = now_s + min(longest_s, FIRST_PAUSE_S * 2.0 ** min(attempts.failures, 30))
        attempts.failures += 1
        attempts.reason = reason

    def forget_failures(self) -> None:
        """Try everybody at once: this machine's own network has just come back."""
        self._attempts.clear()

    def failures(self) -> dict[str, str]:
        """Bootstrap -> why it could not be reached the last time."""
        return {peer: self._attempts[peer].reason for peer in self._bootstraps if peer in self._attempts}

    def _next_at_s(self, peer_id: str) -> float:
        attempts = self._attempts.get(peer_id)
        return attempts.next_at_s if attempts else 0.0

    def _merged(self, peer_id: str, remembered: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._bootstraps.get(peer_id, ()), *remembered.get(peer_id, ()))))
