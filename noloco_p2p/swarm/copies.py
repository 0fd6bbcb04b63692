"""A key that is used twice: two starts of one peer id announce themselves, and the older one has to stop. Pure."""

from __future__ import annotations

from noloco_p2p.swarm.records import PeerRecord


class CopyWatch:
    """Is told the records that the directory holds under the own peer id.

    A record outlives who made it, so one of another start is none of a copy yet: the copy is believed in when it has
    spoken twice. Of two starts the later one stays, by the clocks of their machines; with equal clocks the session
    keys decide, so that never both stop.
    """

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}  # session key of another start -> its first sequence number

    def must_stop(self, own: PeerRecord, found: PeerRecord) -> bool:
        """`own`: what this start announces; `found`: what was read under its peer id."""
        if found.peer_id != own.peer_id or found.session_key == own.session_key or found.state == "leaving":
            return False
        if (found.started_at_ms, found.session_key) < (own.started_at_ms, own.session_key):
            return False
        if len(self._heard) > 16:
            self._heard.clear()
        return found.sequence > self._heard.setdefault(found.session_key, found.sequence)
