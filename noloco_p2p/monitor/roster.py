"""Keeps track of the peers that a monitor has seen, their health, and who swapped with whom.

The directory forgets a peer when its record expires, but an operator wants to know which peers were lost, and when.
This module does no I/O and reads no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from noloco_p2p.swarm.records import TTL_S, PeerRecord
from noloco_p2p.telemetry.metrics import FAILED, RECORDED

SILENT_AFTER_S = 35.0  # after this long without a new record, a peer has missed two announcements
LEAVING_FOR_S = 20.0  # after being in the state "leaving" for this long, a peer counts as having left
FORGET_AFTER_S = 3600.0
MAX_PEERS = 20_000
MAX_MEETINGS = 5_000
WINDOW_S = 600.0  # the window of `Roster.lately`
WINDOW_STEP_S = 10.0
COUNTED = ("swaps", *FAILED)  # over the window


class Health(StrEnum):
    """The health of a peer, judged by the age of its last record. Monitors list peers in this order."""

    ALIVE = "alive"
    SILENT = "silent"  # it has missed two announcements
    LEAVING = "leaving"
    LEFT = "left"  # it announced that it was leaving
    GONE = "gone"  # its record expired before it announced leaving


def health_of(state: str, age_s: float) -> Health:
    """Return the health of a peer whose last record has this state and age."""
    if state == "leaving":
        return Health.LEAVING if age_s <= LEAVING_FOR_S else Health.LEFT
    if age_s > TTL_S:
        return Health.GONE
    return Health.SILENT if age_s > SILENT_AFTER_S else Health.ALIVE


def describe(record: PeerRecord, age_s: float, *, quiet_s: float = 0.0) -> dict[str, Any]:
    """Return the record of one peer as JSON values, with its health. This is the row that monitors show.

    `age_s` is the age of the record. `quiet_s` is the time for which the peer has trained without a swap.
    """
    return {
        "peer_id": record.peer_id,
        "name": record.name,
        "health": str(health_of(record.state, age_s)),
        "state": record.state,
        "paused_by": record.paused_by if record.state == "paused" else "",
        **{name: getattr(record.metrics, name) for name in RECORDED},
        "failed": record.metrics.failed,
        "reachability": record.reachability,
        "addresses": list(record.addresses),
        "stage": record.stage if record.stages else None,
        "stages": record.stages,
        "sends_to": list(record.sends_to),
        "software": record.software,
        "age_s": round(age_s, 1),
        "quiet_s": round(quiet_s, 1),
    }


@dataclass(frozen=True, slots=True)
class Meeting:
    """A swap between two peers. `at_s` is the Unix time at which `peer` first reported it."""

    at_s: float
    peer: str
    partner: str


@dataclass(slots=True)
class Member:
    """A peer's newest record, when it was made, and since when the peer has been training without a swap.

    Times are on the clock of `now_s` in `Roster.take`.
    """

    record: PeerRecord
    made_at_s: float
    quiet_since_s: float


@dataclass(slots=True)
class Roster:
    """All peers that have been seen. Call `take` after each read of the directory.

    Times are Unix seconds on this machine's clock.
    """

    members: dict[str, Member] = field(default_factory=dict)
    meetings: deque[Meeting] = field(default_factory=lambda: deque(maxlen=MAX_MEETINGS))
    _counts: Counter[str] = field(default_factory=Counter)  # since this roster was created
    _window: deque[tuple[float, Counter[str]]] = field(default_factory=deque)

    def take(self, records: Iterable[tuple[PeerRecord, float]], *, now_s: float) -> None:
        """Add the records that the directory returned, each with its age in seconds."""
        for record, age_s in records:
            known, made_at_s = self.members.get(record.peer_id), now_s - age_s
            if known is None:
                self.members[record.peer_id] = Member(record, made_at_s, quiet_since_s=made_at_s)
            elif record.sequence > known.record.sequence:
                has_swapped = self._count(known.record, record, now_s=made_at_s)
                if has_swapped or record.state != "training":
                    known.quiet_since_s = made_at_s
                known.record, known.made_at_s = record, made_at_s
        self._forget(now_s)
        if not self._window or now_s - self._window[-1][0] >= WINDOW_STEP_S:
            self._window.append((now_s, Counter(self._counts)))
        while len(self._window) > 1 and now_s - self._window[0][0] > WINDOW_S:
            self._window.popleft()

    def rows(self, *, now_s: float) -> list[dict[str, Any]]:
        """Describe all peers, in the order of their ids."""
        return [
            describe(member.record, max(0.0, now_s - member.made_at_s), quiet_s=max(0.0, now_s - member.quiet_since_s))
            for _, member in sorted(self.members.items())
        ]

    def lately(self) -> dict[str, int]:
        """Count the committed and the failed swaps of the last ten minutes that this roster has observed."""
        begun = self._window[0][1] if self._window else Counter[str]()
        return {name: self._counts[name] - begun[name] for name in COUNTED}

    def _count(self, old: PeerRecord, new: PeerRecord, *, now_s: float) -> bool:
        """Count what has happened between two records of a peer, and return whether it has swapped."""
        for name in COUNTED:
            self._counts[name] += max(0, getattr(new.metrics, name) - getattr(old.metrics, name))
        has_swapped = new.metrics.swaps > old.metrics.swaps
        if has_swapped and new.metrics.last_partner:
            self.meetings.append(Meeting(now_s, new.peer_id, new.metrics.last_partner))
        return has_swapped

    def _forget(self, now_s: float) -> None:
        """Forget the peers whose record is too old, and if there are too many peers, those with the oldest records."""
        newest_first = sorted(self.members.items(), key=lambda item: -item[1].made_at_s)
        kept = (item for item in newest_first[:MAX_PEERS] if now_s - item[1].made_at_s <= FORGET_AFTER_S)
        self.members = dict(kept)
