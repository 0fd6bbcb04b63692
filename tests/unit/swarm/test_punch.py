"""The messages with which two peers agree on a hole: their content, what is accepted, and when to connect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.swarm.punch import MAX_WAIT_S, NO_TOKEN, TOKEN_BYTES, Words, targets, wait_s
from noloco_p2p.swarm.streams import MAX_LINE_BYTES
from noloco_p2p.tcp import Endpoint

OWN, SEEN, ROUTER = ("8.8.8.8", 20_000), ("9.9.9.9", 20_001), ("8.8.8.8", 20_002)
AT_HOME = ("192.168.1.7", 40_000)

endpoints = st.tuples(st.ip_addresses().map(str), st.integers(1, 65_535))


@given(st.none() | endpoints, st.none() | endpoints, st.binary(min_size=16, max_size=16), st.floats(0, 3))
def test_what_one_says_the_other_hears(
    seen: Endpoint | None, local: Endpoint | None, token: bytes, round_trip_s: float
) -> None:
    said = Words(seen, local, token, round_trip_s)
    heard = Words.parse(said.line())
    assert heard.token == token
    assert heard.round_trip_s == round_trip_s
    assert (heard.seen is None) == (seen is None)
    assert heard.seen is None or heard.seen[1] == said.seen[1]  # pyright: ignore[reportOptionalSubscript]
    assert len(said.line()) <= MAX_LINE_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"seen": ["not an address", 1]},
        {"seen": ["8.8.8.8", 0]},
        {"seen": ["8.8.8.8", 65_536]},
        {"seen": ["8.8.8.8", "80"]},
        {"seen": ["8.8.8.8"]},
        {"seen": {"host": "8.8.8.8"}},
        {"local": ["example.com", 80]},
        {"token": "00"},
        {"token": 7},
        {"round_trip_s": -1},
        {"round_trip_s": 1e9},
        {"round_trip_s": "1"},
        {"more": "x" * MAX_LINE_BYTES},
    ],
)
def test_other_words_are_refused(changes: dict[str, Any]) -> None:
    values = json.loads(Words(seen=SEEN).line()) | changes
    with pytest.raises(ValueError, match=r"."):
        Words.parse(json.dumps(values).encode() + b"\n")


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b"[]\n", b"null\n", b"yes\n", b"\xff\n", Words().line()[:-1]])
def test_what_is_no_words_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Words.parse(line)


def test_a_partner_elsewhere_is_dialled_where_others_see_it_and_nowhere_else() -> None:
    assert targets(OWN, SEEN, None, only_public=True) == [SEEN]
    assert targets(OWN, SEEN, AT_HOME, only_public=True) == [SEEN]


def test_a_partner_in_the_household_is_dialled_at_home_too() -> None:
    assert targets(OWN, ROUTER, AT_HOME, only_public=True) == [AT_HOME, ROUTER]


@pytest.mark.parametrize("local", [("127.0.0.1", 22), ("9.9.9.9", 22), ("224.0.0.1", 22), ("0.0.0.0", 22), ("::1", 22)])
def test_a_household_has_neither_loopback_nor_public_addresses(local: Endpoint) -> None:
    assert targets(OWN, ROUTER, local, only_public=True) == [ROUTER]


@pytest.mark.parametrize("seen", [None, AT_HOME, ("127.0.0.1", 80), ("100.64.0.1", 80), ("2001:4860::1", 80)])
def test_a_partner_without_a_public_address_is_not_dialled(seen: Endpoint | None) -> None:
    with pytest.raises(ValueError, match="no address"):
        targets(OWN, seen, None, only_public=True)


def test_in_a_swarm_on_private_addresses_those_are_dialled() -> None:
    assert targets(("10.0.0.1", 1), ("10.0.0.2", 2), None, only_public=False) == [("10.0.0.2", 2)]


def test_the_called_one_waits_until_its_line_has_arrived() -> None:
    assert wait_s(0.1, 0.3) == pytest.approx(0.2)
    assert wait_s(3.0, 3.0) == MAX_WAIT_S


def test_a_token_is_as_long_as_both_sides_expect() -> None:
    assert len(NO_TOKEN) == TOKEN_BYTES
