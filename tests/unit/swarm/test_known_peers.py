"""What a peer knows of others through their records, and what it tells them in its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from harness.identities import identity_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm import directory
from noloco_p2p.swarm.clock import CLOCK, DhtClock
from noloco_p2p.swarm.directory import LOOKS_A_MINUTE, MEMORY_S, SILENT_S, SwarmDirectory, is_copy
from noloco_p2p.swarm.records import TTL_S, PeerRecord, decode_record, encode_record

RUN = "ab" * 32
DHT_NOW_S = 1_800_000_000.0
ME = identity_of("me")
A = PeerRecord("a", "demo", RUN, addresses=("10.0.0.1:1",), sequence=5, expires_at_s=DHT_NOW_S + TTL_S)


class Node:
    """A DHT node whose entries are in memory. `stored` has (record, expiry) of each store."""

    guard = DialGuard()
    peer_id = ME.peer_id

    def __init__(self) -> None:
        self.entries: dict[str, tuple[bytes, float]] = {}
        self.stored: list[tuple[PeerRecord, float]] = []
        self.num_reads = 0

    def neighbours(self) -> set[str]:
        return {"another node"}

    def multiaddrs(self) -> list[str]:
        return []

    async def get(self, key: str, *, timeout_s: float) -> dict[str, tuple[bytes, float]]:
        self.num_reads += 1
        return dict(self.entries)

    async def store(self, key: str, subkey: str, value: bytes, *, expires_at_s: float, timeout_s: float) -> None:
        self.stored.append((decode_record(value), expires_at_s))

    def put(self, name: str, *, stage: int, state: str = "training", sequence: int = 1) -> None:
        """Put the record of another peer into the DHT."""
        identity, expires_at_s = identity_of(name), CLOCK.now() + TTL_S
        record = PeerRecord(
            identity.peer_id,
            "run",
            RUN,
            state=state,
            stage=stage,
            stages=3,
            sequence=sequence,
            expires_at_s=expires_at_s,
        )
        self.entries[identity.peer_id] = encode_record(record, identity), expires_at_s


def directory_on(node: Node, describe: Callable[[], PeerRecord | None] = lambda: None) -> SwarmDirectory:
    made = SwarmDirectory(
        identity_path=Path("unused"),
        identity=ME,
        listen_host="127.0.0.1",
        listen_port=0,
        spec_digest=RUN,
        describe=describe,
    )
    made.node = cast(Any, node)
    return made


class Known:
    """A directory that is handed records, and the clocks that it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(directory, "time", self)
        monkeypatch.setattr(directory, "CLOCK", DhtClock(wall=lambda: DHT_NOW_S, steady=self.monotonic))
        self.directory = directory_on(Node())

    def monotonic(self) -> float:
        return self.now_s

    def hear(self, *records: PeerRecord) -> None:
        self.directory._merge(records)

    def records(self, at_s: float = 0.0) -> list[tuple[PeerRecord, float]]:
        self.now_s = at_s
        return self.directory.records()

    def live(self, at_s: float = 0.0) -> list[str]:
        self.now_s = at_s
        return [candidate.peer_id for candidate in self.directory.live()]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Known:
    return Known(monkeypatch)


def test_a_peer_is_live_until_its_ttl(known: Known) -> None:
    known.hear(A)
    assert known.live(TTL_S) == ["a"]
    [candidate] = known.directory.live()
    assert (candidate.address, candidate.state) == ("10.0.0.1:1", "training")
    assert known.live(TTL_S + 0.1) == []


def test_a_newer_word_is_never_replaced_by_an_older_one(known: Known) -> None:
    leaving = replace(A, sequence=6, state="leaving")
    known.hear(A)
    known.hear(leaving)
    known.hear(A)
    assert known.live() == []
    assert [record for record, _ in known.records()] == [leaving]


def test_repeating_the_same_word_does_not_make_it_younger(known: Known) -> None:
    known.hear(A)
    known.now_s = TTL_S - 1
    known.hear(replace(A, expires_at_s=DHT_NOW_S + 2 * TTL_S))
    assert known.live(TTL_S + 1) == []


def test_the_age_of_a_word_heard_late_follows_from_its_expiry(known: Known) -> None:
    known.hear(replace(A, expires_at_s=DHT_NOW_S + 20.0))
    assert known.records()[0][1] == TTL_S - 20.0
    assert known.live(20.1) == []


def test_expired_far_future_and_own_words_are_ignored(known: Known) -> None:
    late = replace(A, expires_at_s=DHT_NOW_S + 2 * TTL_S + 1)
    known.hear(replace(A, expires_at_s=DHT_NOW_S), late, replace(A, peer_id=ME.peer_id))
    assert known.records() == []


@pytest.mark.parametrize(
    "changes", [{"addresses": ()}, *({"reachability": word} for word in ("outbound-only", "relayed", "punched"))]
)
def test_a_peer_that_cannot_be_dialled_is_alive_but_never_called(known: Known, changes: dict[str, Any]) -> None:
    known.hear(replace(A, **changes))
    assert [candidate.can_be_called for candidate in known.directory.live()] == [False]


def test_sequence_numbers_are_forgotten_in_the_end(known: Known) -> None:
    known.hear(A)
    known.now_s = MEMORY_S + 1
    known.hear()
    restarted = replace(A, sequence=1, expires_at_s=A.expires_at_s + MEMORY_S)
    known.hear(restarted)
    assert [record for record, _ in known.records(known.now_s)] == [restarted]


def test_the_names_of_peers_that_are_gone_are_kept(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_NAMED", 2)
    known.hear(replace(A, name="Ada"), replace(A, peer_id="b", name="Ben"))
    known.now_s = MEMORY_S + 1
    later = replace(A, sequence=6, expires_at_s=A.expires_at_s + known.now_s)
    known.hear(replace(later, name="Ada"), replace(later, peer_id="c", name="Cem"))
    assert known.directory.names() == [("c", "Cem"), ("a", "Ada")]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.floats(-10, 130)), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_highest_acceptable_sequence_is_kept_in_any_order(
    known: Known, words: list[tuple[str, int, float]]
) -> None:
    known.directory._known = {}
    best: dict[str, int] = {}
    for peer, sequence, remaining_s in words:
        known.hear(replace(A, peer_id=peer, sequence=sequence, expires_at_s=DHT_NOW_S + remaining_s))
        if 0 < (DHT_NOW_S + remaining_s) - DHT_NOW_S <= 2 * TTL_S:
            best[peer] = max(best.get(peer, 0), sequence)
    assert {record.peer_id: record.sequence for record, _ in known.records()} == best


def test_the_private_address_of_a_peer_behind_the_same_router_is_tried_first(known: Known) -> None:
    known.hear(replace(A, addresses=("203.0.114.9:1", "192.168.1.8:1")), replace(A, peer_id="b"))
    assert [(each.address, each.nearby) for each in known.directory.live()] == [
        ("203.0.114.9:1", "192.168.1.8:1"),
        ("10.0.0.1:1", ""),
    ]


# what a peer knows of a name that somebody else tells it


def test_the_stage_of_a_peer_is_in_its_record() -> None:
    async def main() -> None:
        node = Node()
        view = directory_on(node)
        for name, stage, state in (("head", 0, "training"), ("inner", 1, "training"), ("left", 0, "leaving")):
            node.put(name, stage=stage, state=state)
        await view.refresh_now()
        found = [view.record_of(identity_of(name).peer_id) for name in ("head", "inner", "left", "invented")]
        assert [record and record.stage for record in found] == [0, 1, 0, None]
        assert not view.knows(identity_of("left").peer_id)

    asyncio.run(main())


def test_a_new_record_is_seen_at_once_by_a_peer_that_looks_for_it() -> None:
    async def main() -> None:
        node = Node()
        view, head = directory_on(node), identity_of("head").peer_id
        node.put("head", stage=1)
        await view.refresh_now()
        node.put("head", stage=0, sequence=2)
        await view.look_for(head, timeout_s=1.0)
        record = view.record_of(head)
        assert record
        assert record.stage == 0

    asyncio.run(main())


def test_invented_names_cause_few_reads() -> None:
    async def main() -> None:
        node = Node()
        view = directory_on(node)
        for number in range(1000):
            await view.look_for(identity_of(f"invented {number}").peer_id, timeout_s=1.0)
        assert 1 <= node.num_reads <= LOOKS_A_MINUTE

    asyncio.run(main())


# its own record


def test_after_a_clock_is_set_back_the_record_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s = [1_000_000_000.0 + 7200.0]
    clock = DhtClock(wall=lambda: wall_s[0], steady=lambda: 0.0)
    monkeypatch.setattr(directory, "CLOCK", clock)

    async def main() -> list[tuple[PeerRecord, float]]:
        node = Node()
        made = directory_on(node, lambda: PeerRecord(ME.peer_id, "demo", RUN))
        await made.announce_now()
        wall_s[0] -= 7200.0
        clock.follow_wall()
        for _ in range(2):
            await made.announce_now()
        return node.stored

    (_, first_s), *later = asyncio.run(main())
    assert first_s > clock.now() + 7200.0
    assert [round(expires_at_s - clock.now()) for _, expires_at_s in later] == [TTL_S, TTL_S]
    assert later[1][1] > later[0][1], "a node keeps what expires last"


OLD = PeerRecord("a", "demo", RUN, session_key="old", started_at_ms=1000, sequence=7)
NEW = replace(OLD, session_key="new", started_at_ms=2000)


def sees_copy(own: PeerRecord, *found: PeerRecord) -> bool:
    heard = dict[str, int]()
    return True in {is_copy(own, record, heard) for record in found}


def spoken(record: PeerRecord, *, first: int = 3000) -> tuple[PeerRecord, PeerRecord]:
    return replace(record, sequence=first), replace(record, sequence=first + 1)


def test_of_two_processes_with_one_key_the_older_stops_at_the_second_word_and_the_newer_is_told_at_the_first() -> None:
    assert sees_copy(OLD, *spoken(NEW))
    assert sees_copy(NEW, spoken(OLD)[0]), "the older one may stop before its second word"
    assert OLD.start < NEW.start, "the older one stops"


def test_what_an_earlier_start_left_behind_is_no_copy() -> None:
    """Its last record does not change any more, even if the clock was set back in between."""
    assert not sees_copy(OLD, NEW, NEW, NEW)
    assert not sees_copy(NEW, *spoken(OLD, first=1998)), "two nodes may hold its last two records"


def test_the_own_word_another_peer_and_a_farewell_are_no_copies() -> None:
    assert not sees_copy(OLD, *spoken(OLD))
    assert not sees_copy(OLD, *spoken(replace(NEW, peer_id="b")))
    assert not sees_copy(OLD, *(replace(record, state="leaving") for record in spoken(NEW)))


def test_a_peer_that_cannot_announce_itself_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        node = Node()
        made = directory_on(node, lambda: PeerRecord(ME.peer_id, "demo", RUN))
        await made._beat()
        works, made.node.store = made.node.store, refuse
        for silent_s in (12.0, 27.0, 30.0):
            made._announced_at_s = time.monotonic() - silent_s
            with pytest.raises(DirectoryError):
                await made._beat()
            assert bool(made.fault) is (silent_s > SILENT_S)
        made.node.store = works
        await made._beat()
        assert not made.fault

    async def refuse(*values: object, **rest: object) -> None:
        raise DirectoryError("no node stores it")

    asyncio.run(main())
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "has not been able to announce itself for 27 s: no node stores it" in warning.message
