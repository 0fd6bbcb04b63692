from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from noloco_p2p.swarm.address_book import MAX_ADDRESSES, MAX_FILE_BYTES, MAX_PEERS, AddressBook


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
