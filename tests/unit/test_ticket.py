from __future__ import annotations

import base64
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import TicketError
from noloco_p2p.identity import peer_id_of
from noloco_p2p.ticket import MAX_ADDRESSES, PREFIX, Ticket, is_ticket

PEER = peer_id_of(bytes(32))
TICKET = Ticket("demo", "0123456789abcdef" * 4, (f"/ip4/203.0.113.5/tcp/4001/p2p/{PEER}",))

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
ports = st.integers(0, 65535)
addresses = st.builds(
    lambda host, port, key: f"/ip4/{host}/tcp/{port}/p2p/{peer_id_of(key)}",
    st.ip_addresses(v=4),
    ports,
    st.binary(min_size=32, max_size=32),
)
tickets = st.builds(Ticket, names, digests, st.lists(addresses, max_size=MAX_ADDRESSES).map(tuple))


@given(tickets)
def test_round_trip_on_one_lower_case_line(ticket: Ticket) -> None:
    text = ticket.encode()
    assert Ticket.decode(text) == ticket
    assert Ticket.decode(f"  {text.upper()}\n") == ticket
    assert text.startswith(PREFIX)
    assert text.isalnum()
    assert text == text.lower()
    assert is_ticket(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [("spec.toml", "begin with noloco1"), (TICKET.encode().replace("noloco1", "noloco2"), r"version 2.*newer")],
)
def test_what_is_no_ticket_and_what_is_too_new(text: str, words: str) -> None:
    with pytest.raises(TicketError, match=words):
        Ticket.decode(text)


@given(tickets, st.data())
def test_a_ticket_is_found_in_what_people_paste(ticket: Ticket, data: st.DataObject) -> None:
    """It may be quoted and broken into lines, and words of the same letters may stand before and after it."""
    words = st.sampled_from(["noloco join", "please run `", "> ", '"', "'", "it is noloco1:", "(", "\u201c", ""])
    ends = st.sampled_from([".", '"', "'", "`", " thanks", "\nsee you", ")", " --name Ada", ", or\nnoloco join x", ""])
    text, breaks = ticket.encode(), st.sampled_from(["\n", "\r\n", " ", "\n> ", "-\n", "=\n"])
    for place in sorted(data.draw(st.sets(st.integers(23, len(text) - 1), max_size=5)), reverse=True):
        text = text[:place] + data.draw(breaks) + text[place:]
    pasted = f"{data.draw(words)} {text}{data.draw(ends)}"
    assert is_ticket(pasted)
    assert Ticket.decode(pasted) == ticket


@given(tickets, st.data())
def test_cut_off_is_told(ticket: Ticket, data: st.DataObject) -> None:
    text = ticket.encode()
    kept = data.draw(st.integers(len(PREFIX), len(text) - 1))
    with pytest.raises(TicketError, match="a part is missing or mistyped"):
        Ticket.decode(text[:kept])


@given(st.data())
def test_one_wrong_character_never_gives_another_ticket(data: st.DataObject) -> None:
    text = TICKET.encode()
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789-/ é"))
    with suppress(TicketError):
        assert Ticket.decode(text[:place] + character + text[place + 1 :]) == TICKET


@given(st.text(max_size=200))
def test_any_text_is_a_ticket_or_an_error_in_words(text: str) -> None:
    with pytest.raises(TicketError):
        Ticket.decode(PREFIX + text)
    with pytest.raises(TicketError):
        Ticket.decode(text)


def test_fields_of_the_future_are_skipped() -> None:
    from noloco_p2p import ticket

    fields = ticket._field(9, b"an invitation") + ticket._field(1, b"demo") + ticket._field(2, bytes(32))
    text = PREFIX + base64.b32encode(fields + ticket._checksum(fields)).decode().rstrip("=").lower()
    assert Ticket.decode(text) == Ticket("demo", "00" * 32)


@pytest.mark.parametrize(
    ("name", "digest", "addresses", "words"),
    [
        ("", "00" * 32, (), "not a valid run name"),
        ("demo", "00", (), "64 hexadecimal"),
        ("demo", "00" * 32, ("/ip4/1.2.3.4/tcp/1",), "not a dialable address"),
        ("demo", "00" * 32, TICKET.addresses * (MAX_ADDRESSES + 1), "cannot contain 17 addresses"),
    ],
)
def test_bounds(name: str, digest: str, addresses: tuple[str, ...], words: str) -> None:
    with pytest.raises(TicketError, match=words):
        Ticket(name, digest, addresses)


def test_a_ticket_stays_under_its_limit() -> None:
    long = tuple(f"/dns4/{'a' * 190}{n:02}/p2p/{PEER}" for n in range(MAX_ADDRESSES))
    with pytest.raises(TicketError, match="use fewer addresses"):
        Ticket("demo", "00" * 32, long).encode()
    assert len(TICKET.encode()) < 300


@pytest.mark.parametrize("text", ["spec.toml", "noloco1.toml", "runs/noloco1abcdefghijklmnopq", "noloco", ""])
def test_files_are_not_taken_for_tickets(text: str) -> None:
    assert not is_ticket(text)
