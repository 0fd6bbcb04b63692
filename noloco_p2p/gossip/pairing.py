"""This module implements matchmaking: it decides which peer to ask for a swap, and when to ask it again.

Callers supply the candidates, the current time and a random number generator as arguments.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from noloco_p2p.gossip.frames import FINAL, PASSED_ON, PASSING, Boundary, RefuseCode
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.shares import Shares

FAR_SHARE = 0.6  # fraction of the shorter round; equally fast peers are at most half a round apart, plus noise
FAILED_RETRY_S = 10.0  # the wait before an unreachable peer is asked again
PASSING_RETRY_S = 0.05  # added, with 50 % jitter, to the wait after a temporary refusal
LONGEST_PASSING_RETRY_S = 0.4  # that wait doubles with each such refusal, up to this limit
PASSING_TRIES = 10  # after this many temporary refusals in one round, a peer is passed over
MAX_PARTNERS = 1024  # the number of former partners that are remembered
PASSED_OVER_S = 10.0  # the wait before a peer that was passed over is asked again


def lateness_s(mine: Boundary, theirs: Boundary) -> float:
    """Return how many seconds the earlier peer would wait at its boundary for the other, or 0 if that is unknown."""
    if mine.seconds_to_boundary is None or theirs.seconds_to_boundary is None:
        return 0.0
    return abs(mine.seconds_to_boundary - theirs.seconds_to_boundary)


def too_far_s(mine: Boundary, theirs: Boundary) -> float:
    """Return by how many seconds the time between two boundaries exceeds the limit for a swap, or 0 if it does not."""
    rounds_s = [b.seconds_per_round for b in (mine, theirs) if b.seconds_per_round is not None]
    if not rounds_s:
        return 0.0
    return max(0.0, lateness_s(mine, theirs) - FAR_SHARE * min(rounds_s))


class _Answer(Enum):
    PASSING = auto()  # refused for the moment
    NO = auto()  # refused for this round
    NONE = auto()  # the peer could not be reached, or a swap with it failed


@dataclass(frozen=True, slots=True)
class _Memory:
    answer: _Answer
    retry_at_s: float
    tries: int = 1


class Pairing:
    """Chooses the peers to ask for a swap, and remembers their answers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._target = ""
        self._is_patient = False
        self._turned_away: set[str] = set()  # peers refused in this round because this peer had a partner
        self._waiting: set[str] = set()  # peers turned away in the last round, which may be waiting for this round
        self._last_partner = ""
        self._shares = Shares()
        self._partners: OrderedDict[str, None] = OrderedDict()  # former partners, the most recent last
        self._memory: dict[str, _Memory] = {}
        self._incompatible: dict[str, str] = {}

    def open_round(self, live: Sequence[Candidate], *, num_live: int, is_patient: bool = False) -> None:
        """Begin a round.

        All peers may be asked again, except peers that are incompatible or were recently unreachable.

        `num_live` is the number of live peers in the run, including this one. If `is_patient` is true, the last partner
        is not asked while any other peer is live, even if all other peers are busy.
        """
        self._target, self._is_patient = "", is_patient
        num_real = round(1 + (num_live - 1) * self._share_of_real(live))
        self._shares.open_round((peer.peer_id for peer in live), num_live=num_real)
        self._waiting, self._turned_away = self._turned_away, set()
        self._memory = {peer: memory for peer, memory in self._memory.items() if memory.answer is _Answer.NONE}

    def began(self, peer_id: str) -> None:
        """Record the start of a swap with a peer."""
        self._shares.swapped(peer_id)
        self._partners.pop(peer_id, None)
        self._partners[peer_id] = None
        if len(self._partners) > MAX_PARTNERS:
            self._partners.popitem(last=False)

    def has_had_its_share(self, peer_id: str) -> bool:
        """Return whether to refuse a peer's offers for now because that peer has had its share of swaps."""
        return self._shares.has_had(peer_id)

    def met(self, peer_id: str) -> None:
        """Record that the early part of a swap with a peer was committed."""
        self._last_partner = peer_id

    def turned_away(self, peer_id: str, *, mine: Boundary, theirs: Boundary) -> None:
        """Record a peer whose offer was refused because this peer already had a partner.

        This peer asks the refused peer first if its own next round opens before the refused peer's current round ends.
        """
        if mine.seconds_to_boundary is None or theirs.seconds_to_boundary is None:
            return
        if mine.seconds_to_boundary < theirs.seconds_to_boundary:
            self._turned_away.add(peer_id)

    def choose(self, live: Sequence[Candidate], now_s: float, *, latest_s: float) -> Candidate | None:
        """Return the peer to ask now, or None if there is no suitable peer or the drawn peer is not free yet.

        One peer is drawn uniformly at random, and it remains the choice as long as it is suitable. If the drawn peer
        already has a partner but its next round begins before `latest_s`, this peer waits for that round. Asking any
        free peer at once would pair the same two peers again and again, because they begin each round together while
        all others are in the middle of a round.

        The last partner, and any peer that has had more than its share of swaps, is drawn only if there is no other
        peer. A peer that was turned away in the last round is preferred, because it may be waiting for this round and
        would otherwise be late again.
        """
        reachable = {peer.peer_id: peer for peer in self._eligible(live) if self._in_time(peer, now_s, latest_s)}
        if self._target not in reachable:
            others = [peer for peer in reachable if peer != self._last_partner and not self._shares.owes(peer)]
            waiting = [peer_id for peer_id in others if peer_id in self._waiting]
            self._target = self._rng.choice(waiting or others or list(reachable)) if reachable else ""
        target = reachable.get(self._target)
        return target if target and self._may_ask(target, now_s) else None

    def wait_s(self, now_s: float) -> float:
        """Return the number of seconds until the drawn peer may be asked again, or infinity if no peer is drawn."""
        memory = self._memory.get(self._target)
        return memory.retry_at_s - now_s if memory and memory.retry_at_s > now_s else math.inf

    def hopeful(self, live: Sequence[Candidate], now_s: float, *, latest_s: float) -> bool:
        """Return whether any peer could still accept an offer, now or by `latest_s`.

        If the result is False, the round should be solo.
        """
        return any(self._in_time(candidate, now_s, latest_s) for candidate in self._eligible(live))

    def refused(self, peer_id: str, *, code: RefuseCode, retry_after_s: float, now_s: float) -> None:
        if peer_id in self._waiting:  # that peer has found another partner, so this peer stops waiting for it
            self._waiting.remove(peer_id)
            self._target = ""
        if code in PASSED_ON:
            self._target = ""
        if code in FINAL:
            self._incompatible[peer_id] = code.name
            return
        # A peer that waits at its boundary answers TAKEN with a retry time of 0 s, which would cause a busy loop.
        if code in PASSING or retry_after_s < PASSING_RETRY_S:
            before = self._memory.get(peer_id)
            tries = before.tries + 1 if before and before.answer is _Answer.PASSING else 1
            # A random delay that grows each time separates peers that keep refusing each other.
            apart_s = min(PASSING_RETRY_S * 2.0 ** (tries - 1), LONGEST_PASSING_RETRY_S)
            wait_s = retry_after_s + apart_s * self._rng.uniform(0.5, 1.5)
            if tries < PASSING_TRIES:
                self._memory[peer_id] = _Memory(_Answer.PASSING, now_s + wait_s, tries)
            else:
                self._memory[peer_id] = _Memory(_Answer.NO, now_s + PASSED_OVER_S)
        else:
            self._memory[peer_id] = _Memory(_Answer.NO, now_s + retry_after_s)

    def failed(self, peer_id: str, *, now_s: float) -> None:
        self._memory = {
            peer: memory
            for peer, memory in self._memory.items()
            if memory.answer is not _Answer.NONE or memory.retry_at_s > now_s
        }
        self._memory[peer_id] = _Memory(_Answer.NONE, now_s + FAILED_RETRY_S)

    def _share_of_real(self, live: Sequence[Candidate]) -> float:
        """Return the fraction of listed peers that have been partners of this peer or may still be reachable.

        Anyone can create records for free. If fake records counted, the fair share of each honest peer would become too
        small for any swap.
        """
        real = [peer for peer in live if peer.peer_id in self._partners or self._may_be_reached(peer)]
        return len(real) / len(live) if live else 1.0

    def _may_be_reached(self, candidate: Candidate) -> bool:
        memory = self._memory.get(candidate.peer_id)
        return candidate.can_be_called and (memory is None or memory.answer is not _Answer.NONE)

    def _eligible(self, live: Sequence[Candidate]) -> Sequence[Candidate]:
        training = [peer for peer in live if peer.state == "training" and peer.can_be_called]
        eligible = [peer for peer in training if peer.peer_id not in self._incompatible]
        others = [peer for peer in eligible if peer.peer_id != self._last_partner] if self._is_patient else []
        return others or eligible

    def _may_ask(self, candidate: Candidate, now_s: float) -> bool:
        memory = self._memory.get(candidate.peer_id)
        return memory is None or memory.retry_at_s <= now_s

    def _in_time(self, candidate: Candidate, now_s: float, latest_s: float) -> bool:
        """Return whether a peer may be asked now or will be free by `latest_s`.

        The result is False for unreachable peers.
        """
        memory = self._memory.get(candidate.peer_id)
        if memory is None or memory.retry_at_s <= now_s:
            return True
        return memory.answer is _Answer.PASSING or (memory.answer is _Answer.NO and memory.retry_at_s <= latest_s)
