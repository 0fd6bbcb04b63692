"""Define the rows of a source, which are documents or faults.

A hash decides which documents are held out, because all machines must agree on them without communicating. By contrast,
`datasets` splits by a seed and the number of rows. With that method, if one machine had one more document than the
others, four in five of its held-out documents would differ (benchmarks/results/data_library.txt).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from noloco_p2p.data.chats import Message
from noloco_p2p.errors import DataError

log = logging.getLogger(__name__)

REMEMBERED = 100_000  # faults whose places are stored; any further fault may be counted again in each epoch
LOGGED_OF_A_FILE = 5  # faults logged one by one; after that, one is logged each time their number has grown tenfold


class Unavailable(DataError):
    """Raised if a piece cannot be read now, but may be readable later."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, its token ids (1-D integers), or the messages of a chat.

    If `name` is set, a hash of the name decides whether the document is held out.
    """

    content: str | np.ndarray | list[Message]
    origin: str  # the file or data set that it comes from, for messages
    name: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """An unusable line of a file or row of a table. `line` is its number, counted from 1.

    If `rest` is true, the rest of the file is unusable as well.
    """

    file: str
    line: int | None
    reason: str
    rest: bool = False

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.reason}" + ("; the rest of the file is skipped" if self.rest else "")


Row = Document | Fault | None  # None is a row without a document


@dataclass(frozen=True, slots=True)
class Piece:
    """One file or shard. `rows(start)` yields the rows from row `start` on, and may raise Unavailable."""

    name: str
    rows: Callable[[int], Iterator[Row]]


def is_held_out(document: Document, share: float) -> bool:
    """Return whether a document belongs to the `share` that is held out for validation.

    A hash of the document decides, so that all machines agree.
    """
    if document.name:
        key = document.name.encode()
    elif isinstance(document.content, str):
        key = document.content.encode("utf-8", "replace")
    elif isinstance(document.content, list):
        key = json.dumps(document.content, sort_keys=True, default=str).encode()
    else:
        key = document.content.astype("<i8").tobytes()
    return int.from_bytes(blake3(key).digest(8)) < share * 2**64


class Faults:
    """A log that counts and reports each fault once. It calls `on_fault` for each fault, on the reading thread."""

    def __init__(self, on_fault: Callable[[Fault], None] | None = None) -> None:
        self.on_fault = on_fault
        self.last: Fault | None = None
        self.num_truncated = 0  # samples, which are no faults
        self._of_file: Counter[str] = Counter()
        self._seen: set[tuple[str, int | None]] = set()

    @property
    def count(self) -> int:
        return self._of_file.total()

    def summary(self) -> str:
        """Return the number of faults and the last one, for the end of an error message, or "" if there were none."""
        return f"; lines and files skipped: {self.count}; most recent reason: {self.last}" if self.last else ""

    def note(self, fault: Fault) -> None:
        if not self._is_new(fault.file, fault.line):
            return
        self.last = fault
        self._of_file[fault.file] += 1
        number = self._of_file[fault.file]
        if fault.rest or number <= LOGGED_OF_A_FILE:
            log.warning("skipped: %s", fault)
        elif str(number).strip("0") == "1":
            log.warning("skipped: %d lines of %s so far; most recent reason: %s", number, fault.file, fault.reason)
        if self.on_fault:
            self.on_fault(fault)

    def note_truncated(self, document: Document, num_tokens: int, kept: int) -> None:
        """Count a sample of which only the first `kept` tokens are used."""
        if self._is_new(document.origin, document.line):
            self.num_truncated += 1
            if str(self.num_truncated).strip("0") == "1":
                place = Fault(
                    document.origin, document.line, f"{num_tokens:,} tokens, but data.sequence_length is {kept:,}"
                )
                log.warning("truncated: %d samples so far; most recent: %s", self.num_truncated, place)

    def _is_new(self, file: str, line: int | None) -> bool:
        """Return False if this place was seen in an earlier epoch."""
        if (file, line) in self._seen:
            return False
        if len(self._seen) < REMEMBERED:
            self._seen.add((file, line))
        return True
