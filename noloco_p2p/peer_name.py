"""Validate the name of this peer, show the names of other peers, and find a peer by what was shown.

Like nicknames in RFC 8266, a name is normalized with NFKC and contains no consecutive spaces. It contains no invisible
characters, and none that change the direction of text or control a terminal. A name proves nothing, because any peer
can choose any name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from noloco_p2p.errors import SettingsError
from noloco_p2p.identity import public_key_of, short_id

MAX_CHARS = 24
MIN_END = 4  # characters of the end of an id
MAX_MARKS = 2  # combining marks in a row; more of them would cover the lines above and below
# Python considers these characters printable, but they are invisible.
# They are fillers, joiners, the empty Braille cell and variation selectors.
INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)


def check(text: str) -> str:
    """Return the normalized name, which is empty if `text` is blank.

    Raises ValueError if the name is not allowed. The message is safe to print.
    """
    name = _normalised(text)
    if refused := next((char for char in name if not char.isprintable() or char in INVISIBLE), None):
        raise ValueError(
            f"{text!a} contains U+{ord(refused):04X}, but control characters and invisible characters are not allowed"
        )
    if len(name) > MAX_CHARS:
        raise ValueError(f"{text!a} is too long: it has {len(name)} characters, and the limit is {MAX_CHARS}")
    if _marks_too_much(name):
        raise ValueError(
            f"{text!a} is not allowed: a name can have at most {MAX_MARKS} combining marks per character, and cannot "
            "begin with one"
        )
    return name


def shown(value: object) -> str:
    """Return the first `MAX_CHARS` characters of a name from a peer's record, or "" if the name is invalid."""
    if not isinstance(value, str):
        return ""
    try:
        return check(_normalised(value)[:MAX_CHARS])
    except ValueError:
        return ""


def named(peer_id: str, name: str = "") -> str:
    """Return what people see of a peer: the end of its id, because all ids begin alike, and its name: `..7f3a2b Ada`.

    The id is first, so that no name can pass for it, and a name in a right-to-left script does not move it.
    """
    return f"..{short_id(peer_id)} {name}".rstrip()


def find(text: str, known: Mapping[str, str]) -> str:
    """Return the id of the peer that `text` means: a whole id, the end of one with or without dots, a name, or what
    `named` returns. `known` has the names of the known peers by id.

    Raises SettingsError if no known peer or more than one is meant.
    """
    try:
        public_key_of(text)
        return text
    except ValueError:
        pass
    end, name = text.split(" ")[0].lstrip("."), _normalised(text).casefold()
    found = [peer for peer in known if len(end) >= MIN_END and peer.endswith(end)]
    if not text.startswith("."):  # otherwise, a name could pass for an id
        found += [peer for peer in known if name and known[peer].casefold() == name and peer not in found]
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"{text!r} can mean {len(found)} peers; choose one of the ids {', '.join(found)}")
    raise SettingsError(
        f"{text!r} is no other peer known here; a running peer knows the names of the live ones, and a whole id "
        "(12D3Koo..) is always known"
    )


def _normalised(text: str) -> str:
    # NFKC turns spaces of other widths into plain ones. Tabs and line breaks remain, and `check` refuses them.
    return " ".join(word for word in unicodedata.normalize("NFKC", text).split(" ") if word)


def _marks_too_much(name: str) -> bool:
    run = MAX_MARKS  # the first character must not be a combining mark
    for char in name:
        run = run + 1 if unicodedata.category(char).startswith("M") else 0
        if run > MAX_MARKS:
            return True
    return False
