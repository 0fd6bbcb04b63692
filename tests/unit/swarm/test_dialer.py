"""Which peers are dialled when, and what is remembered of them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm import dialer
from noloco_p2p.swarm.clock import Offset
from noloco_p2p.swarm.dialer import (
    DIALLED_AT_ONCE,
    ENOUGH_NEIGHBOURS,
    LONGEST_PAUSE_LOST_S,
    LOST_PEERS,
    MAX_ADDRESSES,
    MAX_FILE_BYTES,
    MAX_PEERS,
    AddressBook,
    Dialer,
)

BOOT = {"boot": ["/boot/1"]}
BOOK = {"b": ("/b/1",), "me": ("/me/1",)}


def plan() -> Dialer:
    return Dialer(cast(Any, SimpleNamespace(peer_id="me")), BOOT, AddressBook(), every_s=10.0)


def test_the_missing_are_due_bootstraps_first() -> None:
    assert plan().due(BOOK, [], now_s=0) == {"boot": ("/boot/1",), "b": ("/b/1",)}
    assert plan().due(BOOK, ["boot"], now_s=0) == {"b": ("/b/1",)}
    assert len(plan().due({f"old{n}": ("/old/1",) for n in range(20)}, [], now_s=0)) == DIALLED_AT_ONCE


def test_those_that_always_fail_leave_room_for_the_others() -> None:
    dialing, book, dialled = plan(), {f"old{n}": ("/old/1",) for n in range(3 * DIALLED_AT_ONCE)}, set[str]()
    for now_s in (0.0, 100.0, 200.0, 300.0):
        for peer in dialing.due(book, [], now_s=now_s):
            dialing.failed(peer, "refused", now_s=now_s)
            dialled.add(peer)
    assert dialled == {"boot", *book}


def test_what_is_remembered_of_a_bootstrap_is_tried_too() -> None:
    assert plan().due({"boot": ("/boot/2", "/boot/1")}, [], now_s=0) == {"boot": ("/boot/1", "/boot/2")}


def test_a_bootstrap_is_tried_for_ever_with_a_bounded_pause() -> None:
    dialing, now_s, pauses_s = plan(), 0.0, []
    for _ in range(100):
        dialing.failed("boot", "refused", now_s=now_s)
        start_s = now_s
        while not dialing.due({}, [], now_s=now_s):
            now_s += 0.5
        pauses_s.append(now_s - start_s)
    assert pauses_s[:6] == [1, 2, 4, 8, 10, 10]
    assert max(pauses_s) == 10


def test_remembered_peers_are_tried_ever_more_rarely_but_for_those_lost_last() -> None:
    dialing, book = plan(), {f"old{n}": (f"/old/{n}",) for n in range(2 * LOST_PEERS)}
    for peer in ("boot", *book):
        for _ in range(100):
            dialing.failed(peer, "refused", now_s=0)
    lost, others = list(book)[:LOST_PEERS], list(book)[LOST_PEERS:]
    assert not dialing.due(book, ["boot"], now_s=LONGEST_PAUSE_LOST_S - 1)
    assert list(dialing.due(book, ["boot"], now_s=LONGEST_PAUSE_LOST_S)) == lost
    assert list(dialing.due(book, ["boot"], now_s=299)) == lost
    for peer in lost:
        dialing.reached(peer, now_s=300)
    assert list(dialing.due(book, ["boot"], now_s=300)) == others


def test_with_many_neighbours_bootstraps_and_silent_peers_are_dialled() -> None:
    near = [f"n{n}" for n in range(ENOUGH_NEIGHBOURS)]
    assert list(plan().due(BOOK, near, heard_of=["b"], now_s=0)) == ["boot"]
    assert list(plan().due(BOOK, near, now_s=0)) == ["boot", "b"]
    assert list(plan().due(BOOK, [], heard_of=["b"], now_s=0)) == ["boot", "b"]


def test_one_that_answered_is_not_dialled_again_at_once() -> None:
    dialing = plan()
    dialing.reached("boot", now_s=0)
    assert dialing.due({}, [], now_s=9) == {}
    assert list(dialing.due({}, [], now_s=10)) == ["boot"]
    assert dialing.failures() == {}


def test_failures_are_told_until_the_bootstrap_is_there() -> None:
    dialing = plan()
    dialing.failed("boot", "refused", now_s=0)
    dialing.failed("b", "refused", now_s=0)
    assert dialing.failures() == {"boot": "refused"}
    dialing.due({}, ["boot"], now_s=0)
    assert dialing.failures() == {}


def test_those_that_the_book_has_forgotten_are_forgotten() -> None:
    made = plan()
    for number in range(100):
        peer = f"invented {number}"
        assert peer in made.due({peer: ("/x",)}, (), now_s=number)
        made.failed(peer, "closed", now_s=number)
    made.due({}, (), now_s=100.0)
    assert len(made._attempts) == 0


def test_after_a_restart_everybody_is_due() -> None:
    dialing = plan()
    dialing.failed("boot", "refused", now_s=0)
    assert dialing.due({}, [], now_s=0) == {}
    dialing.dial_all_now()
    assert list(dialing.due({}, [], now_s=0)) == ["boot"]


# the address book


def address(peer: str, port: int = 1) -> str:
    return f"/ip4/10.0.0.1/tcp/{port}/p2p/{peer}"


def test_what_was_saved_is_read_again_latest_first(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "deep" / "peers.json")
    book.remember("a", [address("a")])
    book.remember("b", [address("b"), address("b", 2)])
    book.remember("a", [address("a", 3)])
    book.save()
    again = AddressBook(tmp_path / "deep" / "peers.json")
    assert list(again.addresses().items()) == [("a", (address("a", 3),)), ("b", (address("b"), address("b", 2)))]
    assert os.listdir(tmp_path / "deep") == ["peers.json"]


def test_it_is_bounded_and_the_oldest_makes_room() -> None:
    book = AddressBook()
    for n in range(MAX_PEERS + 5):
        book.remember(f"p{n}", [address(f"p{n}", port) for port in range(20)])
    assert len(book.addresses()) == MAX_PEERS
    assert "p4" not in book.addresses()
    assert all(len(addresses) == MAX_ADDRESSES for addresses in book.addresses().values())


def test_addresses_of_somebody_else_are_not_remembered() -> None:
    book = AddressBook()
    book.remember("a", [address("b"), "junk", "/p2p/a" * 100, ""])
    assert book.addresses() == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"peers": 5}',
        '{"peers": [5]}',
        '{"peers": [["a", [5, null]]]}',
        "[" * 5000,
        "x" * MAX_FILE_BYTES * 2,
    ],
)
def test_a_damaged_file_is_an_empty_book(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(text)
    book = AddressBook(path)
    assert book.addresses() == {}
    book.remember("a", [address("a")])
    book.save()
    assert json.loads(path.read_text())["peers"] == [["a", [address("a")]]]


def test_failing_to_save_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    book = AddressBook(tmp_path / "file" / "peers.json")
    book.remember("a", [address("a")])
    book.save()
    assert book.addresses() == {"a": (address("a"),)}


async def test_bootstraps_that_do_not_answer_are_told_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def dial(peer_id: str, addresses: list[str]) -> Offset:
        if is_dead:
            raise DirectoryError("dialling boot: connection refused")
        return Offset(0.0, 1.0)

    async def hosts_of(peer_id: str) -> set[str]:
        return set()

    now_s = 0.0
    monkeypatch.setattr(dialer, "time", SimpleNamespace(monotonic=lambda: now_s))
    is_dead, guard = True, DialGuard(only_public=False)
    node = SimpleNamespace(peer_id="me", neighbours=list, dial=dial, hosts_of=hosts_of, guard=guard)
    address = "/ip4/127.0.0.1/tcp/9/p2p/boot"
    dialing = Dialer(cast(Any, node), {"boot": [address]}, AddressBook(), every_s=0.0)
    assert not await dialing.dial(())
    assert not caplog.text, "it may answer soon, and a newcomer with a dead ticket is told so anyway"
    now_s += dialer.WARN_AFTER_S
    for _ in range(3):
        assert not await dialing.dial(())
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "none of the peers in the ticket or in --bootstrap answers (dialling boot: connection refused); trying again "
        "until one does. Check that the addresses are right and reachable, or get a new ticket from a live peer"
    ]
    is_dead = False
    assert await dialing.dial(())
    is_dead = True
    now_s += dialer.WARN_AFTER_S
    assert not await dialing.dial(())
    assert caplog.text.count("trying again until one does") == 2, "it answered in between"
