"""Other nodes accept every record that a peer stores about itself, whatever its clock does."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from harness.identities import identity_of

from noloco_p2p.swarm import announcer
from noloco_p2p.swarm.announcer import Announcer
from noloco_p2p.swarm.clock import DhtClock
from noloco_p2p.swarm.records import TTL_S, PeerRecord, decode_record

ME = identity_of("me")
RECORD = PeerRecord(ME.peer_id, "demo", "ab" * 32)


class Kept:
    """Stands in for a node and a membership view; records (record, expiry) of each store."""

    def __init__(self) -> None:
        self.stored: list[tuple[PeerRecord, float]] = []

    async def store(self, key: str, subkey: str, value: bytes, *, expires_at_s: float, timeout_s: float) -> None:
        self.stored.append((decode_record(value), expires_at_s))

    def depths(self) -> tuple[int, ...]:
        return (0,)


def announcer_of(record: PeerRecord) -> tuple[Announcer, Kept]:
    kept = Kept()
    made = Announcer(
        cast(Any, kept),
        ME,
        cast(Any, kept),
        spec_digest=RECORD.spec_digest,
        describe=lambda: record,
        multiaddrs=list,
        every_s=15.0,
        on_copy=lambda record: None,
    )
    return made, kept


def test_after_a_clock_is_set_back_the_record_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s = [1_000_000_000.0 + 7200.0]
    clock = DhtClock(wall=lambda: wall_s[0], steady=lambda: 0.0)
    monkeypatch.setattr(announcer, "CLOCK", clock)
    made, kept = announcer_of(RECORD)
    asyncio.run(made.announce())
    wall_s[0] -= 7200.0
    clock.follow_wall()
    for _ in range(2):
        asyncio.run(made.announce())
    (_, first_s), *later = kept.stored
    assert first_s > clock.now() + 7200.0
    assert [round(expires_at_s - clock.now()) for _, expires_at_s in later] == [TTL_S, TTL_S]
    assert later[1][1] > later[0][1], "a node keeps what expires last"
