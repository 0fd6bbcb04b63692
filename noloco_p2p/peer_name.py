"""The name of a peer: which names are valid, and what is shown of a name that another peer sent.

As for nicknames in RFC 8266, a name is normalised by NFKC and has single spaces. It holds nothing that is invisible,
that turns the direction of text or that controls a terminal. It proves nothing: any peer may take any name.
"""

from __future__ import annotations

import unicodedata

MAX_CHARS = 24
MAX_MARKS = 2  # in a row: more of them run over the lines above and below
# Printable according to Python, but invisible: fillers, joiners, the empty Braille cell, variation selectors.
INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)


def check(text: str) -> str:
    """Return the name to announce, empty where `text` is blank. Raises ValueError; its message is safe to print."""
    name = _normalised(text)
    if refused := next((char for char in name if not char.isprintable() or char in INVISIBLE), None):
        raise ValueError(f"{text!a} must not hold control or invisible characters such as U+{ord(refused):04X}")
    if len(name) > MAX_CHARS:
        raise ValueError(f"{text!a} must have at most {MAX_CHARS} characters; it has {len(name)}")
    if _marks_too_much(name):
        raise ValueError(f"{text!a} must have at most {MAX_MARKS} marks on a character, and none before the first")
    return name


def shown(value: object) -> str:
    """Return what is shown of a name in a peer's record: its first `MAX_CHARS`, or nothing where it is invalid."""
    if not isinstance(value, str):
        return ""
    try:
        return check(_normalised(value)[:MAX_CHARS])
    except ValueError:
        return ""


def _normalised(text: str) -> str:
    # Spaces of other widths have become plain ones. Tabs and line ends have not, and are refused.
    return " ".join(word for word in unicodedata.normalize("NFKC", text).split(" ") if word)


def _marks_too_much(name: str) -> bool:
    run = MAX_MARKS  # so that the first character may not be one
    for char in name:
        run = run + 1 if unicodedata.category(char).startswith("M") else 0
        if run > MAX_MARKS:
            return True
    return False
