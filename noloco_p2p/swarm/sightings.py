"""Keeps the newest record of each peer, and the record's age. Callers supply the current time as an argument.

A monotonic clock measures ages. The expiry in a record is in DHT time, because another machine has set it.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Container, Iterable
from dataclasses import dataclass

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.swarm.addresses import host_of
from noloco_p2p.swarm.dial_back import CLOSED
from noloco_p2p.swarm.records import TTL_S, PeerRecord

MEMORY_S = 2 * TTL_S  # how long a sequence number is remembered, so that an old record cannot revive a dead peer


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record, and the monotonic time at which it was made, as far as this machine can tell."""

    record: PeerRecord
    made_at_s: float


class Sightings:
    """The newest record of each peer. It uses copy-on-write, so any thread may read while the network thread merges."""

    def __init__(self, own_peer_id: str) -> None:
        self._own_peer_id = own_peer_id
        self._sightings: dict[str, Sighting] = {}

    def merge(self, records: Iterable[PeerRecord], *, now_s: float, dht_now_s: float) -> list[PeerRecord]:
        """Add records that were read, and return the new ones.

        Expired records and records with older sequence numbers are ignored. A record that is read again does not become
        younger, so nobody can keep a dead peer alive by replaying its last record.
        """
        sightings = {peer: s for peer, s in self._sightings.items() if now_s - s.made_at_s <= MEMORY_S}
        news: list[PeerRecord] = []
        for record in records:
            remaining_s = record.expires_at_s - dht_now_s
            known = sightings.get(record.peer_id)
            if record.peer_id == self._own_peer_id or not 0 < remaining_s <= 2 * TTL_S:
                continue
            if known is None or record.sequence > known.record.sequence:
                sightings[record.peer_id] = Sighting(record, now_s - max(0.0, TTL_S - remaining_s))
                news.append(record)
        self._sightings = sightings
        return news

    def live(self, *, now_s: float, among: Container[str] | None = None) -> list[Candidate]:
        """Return the peers that were seen within the TTL and are not leaving.

        If `among` is given, only the peers in it are returned.
        """
        return [
            _candidate(record)
            for record, _ in self.records(now_s=now_s)
            if record.state != "leaving" and (among is None or record.peer_id in among)
        ]

    def stage_of(self, peer_id: str, *, now_s: float) -> int | None:
        """Return the stage in the record of a peer, or None if no record was seen within the TTL.

        A leaving peer counts, because other peers still compute its last microbatches.
        """
        sighting = self._sightings.get(peer_id)
        return sighting.record.stage if sighting and now_s - sighting.made_at_s <= TTL_S else None

    def records(self, *, now_s: float) -> list[tuple[PeerRecord, float]]:
        """Return (record, age in seconds) for each other peer that was seen within the TTL, including leaving peers."""
        aged = [(sighting.record, max(0.0, now_s - sighting.made_at_s)) for sighting in self._sightings.values()]
        return [(record, age_s) for record, age_s in aged if age_s <= TTL_S]


def _candidate(record: PeerRecord) -> Candidate:
    try:
        key = b64decode(record.session_key, validate=True)
    except ValueError:  # the error is reported when the peer is dialled
        key = b""
    address = record.addresses[0] if record.addresses else ""
    nearby = [each for each in record.addresses if host_of(each) != host_of(address)]  # see `address_filter.nearby`
    return Candidate(
        record.peer_id,
        address,
        record.state,
        record.metrics.progress,
        session_key=key,
        can_be_called=bool(address) and record.reachability not in CLOSED,
        stage=record.stage,
        capacity=record.metrics.capacity,
        nearby=nearby[0] if nearby else "",
    )
