"""The name of a peer is readable in any script, and harmless in a terminal and on a page."""

from __future__ import annotations

import unicodedata

import pytest
from harness.identities import identity_of
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.errors import SettingsError
from noloco_p2p.peer_name import MAX_CHARS, check, find, named, shown
from noloco_p2p.settings import PeerSettings

LONG = "a" * (MAX_CHARS + 1)
NUMEROUS = "\ufdfa"  # one letter that NFKC expands to eighteen


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Ada", "Ada"),
        ("  Ada \u3000 Lovelace\u00a0", "Ada Lovelace"),
        ("ＡＤＡ", "ADA"),
        ("cafe\u0301", "café"),
        ("東京", "東京"),
        ("עדה", "עדה"),
        ("हिन्दी", "हिन्दी"),
        ("<b>&amp;", "<b>&amp;"),  # the page escapes it
        ("🐑", "🐑"),
        (" ", ""),
    ],
)
def test_a_name_is_normalised(text: str, name: str) -> None:
    assert check(text) == name == shown(text)
    assert PeerSettings.load({"name": text}).name == name


@pytest.mark.parametrize(
    "text",
    [
        *("a\x1b[2Jb", "a\x00b", "a\nb", "a\tb", "a\x85b", "\x9bm", "a\u2028b"),  # control characters
        *("a\u202eb", "a\u2067b", "a\u200fb", "a\u061cb"),  # text direction
        *("a\u200bb", "a\u200db", "a\ufeffb", "a\u00adb", "a\u2060b"),  # zero width
        *("a\u034fb", "\u3164", "\u115f", "\u2800", "a\ufe0f", "a\U000e0101", "a\U000e0041"),  # invisible
        *("a\ud800b", "a\ue000b", "a\u0378b"),  # surrogate, private use, unassigned
        *("a\u0301\u0302\u0303\u0304", "\u0301a"),  # stacked marks, and a leading mark
    ],
)
def test_what_is_not_safe_to_show_is_refused_in_words_that_are(text: str) -> None:
    with pytest.raises(SettingsError, match=r"name '.*' (contains|is not allowed)") as refused:
        PeerSettings.load({"name": text})
    assert str(refused.value).isascii()
    assert shown(text) == ""


def test_a_long_name_is_refused_here_and_cut_where_another_peer_sent_it() -> None:
    for text in (LONG, 2 * NUMEROUS):
        with pytest.raises(
            SettingsError, match=f"it has {len(check_length(text))} characters, and the limit is {MAX_CHARS}"
        ):
            PeerSettings.load({"name": text})
    assert shown(LONG) == LONG[:MAX_CHARS]
    assert shown("a" * (MAX_CHARS - 1) + " b") == "a" * (MAX_CHARS - 1)


def check_length(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


@given(st.text() | st.integers() | st.none() | st.lists(st.text()))
def test_what_is_shown_is_printable_short_and_a_name_itself(value: object) -> None:
    name = shown(value)
    assert name.isprintable()
    assert len(name) <= MAX_CHARS
    assert check(name) == name


def test_what_is_shown_of_a_peer_finds_it() -> None:
    ada, eve, nobody = (identity_of(name).peer_id for name in ("ada", "eve", "nobody"))
    known = {ada: "Ada", eve: f"..{ada[-6:]}", nobody: ""}
    for text in (ada, ada[-6:], f"..{ada[-6:]}", named(ada, "Ada"), named(ada), "Ada", "ada"):
        assert find(text, known) == ada, text
    assert find(named(eve, known[eve]), known) == eve, "a name cannot pass for an id"
    assert find(identity_of("stranger").peer_id, known) == identity_of("stranger").peer_id
    with pytest.raises(SettingsError, match=f"can mean 2 peers; choose one of the ids {ada}, {nobody}"):
        find("ADA", known | {nobody: "Ada"})
    for text in ("..abcdef", "Bob", "12D3KooWabc", "", ".", ada[-3:]):
        with pytest.raises(SettingsError, match="no other peer known here"):
            find(text, known)
