"""One epoch of a source in an order drawn by a hash, resumable at any document. Imports neither torch nor datasets.

A source is a list of pieces (files, or shards of a hub data set). A piece that is temporarily unreadable (network) is
set aside at its row, and another one is read meanwhile; it is resumed when a piece has ended.

An `IterableDataset` of `datasets` ends at the first unreadable file. Its retries wait for the same file, and its
`shuffle` draws from a buffer that a restart does not restore (benchmarks/data_library.py).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from blake3 import blake3

from noloco_p2p.data.documents import Document, Fault, Faults, Piece, Unavailable
from noloco_p2p.errors import DataError

log = logging.getLogger(__name__)

FEW_PIECES = 16
THINNED_PASSES = 8
MAX_ASIDE = 4  # pieces; when this many cannot be read the network is at fault, and the first of them is retried
MAX_FAILURES = 8  # of one piece, while others could be read: then the rest of it is left out
MAX_PAUSE_S = 60.0
GIVE_UP_S = 3600.0  # of waiting without one document
MAX_BAD_START = 1000  # rows: a file that begins with this many faults is of another kind


@dataclass(frozen=True, slots=True)
class Place:
    """The position of the next document.

    `index`: a piece in the order of the pass; `fresh`: the first one not begun; `aside`: index and row of those set
    aside.
    """

    number: int = 0  # of the pass
    fresh: int = 1
    index: int = 0
    row: int = 0
    aside: tuple[tuple[int, int], ...] = ()

    def next_piece(self) -> Place:
        """Move to the piece that was set aside first, else to a fresh one."""
        if not self.aside:
            return replace(self, index=self.fresh, fresh=self.fresh + 1, row=0)
        (index, row), *others = self.aside
        return replace(self, index=index, row=row, aside=tuple(others))

    def set_aside(self, num_pieces: int) -> Place:
        """Move to another piece, or the same one when there is no other."""
        aside = (*self.aside, (self.index, self.row))
        if len(aside) > MAX_ASIDE or self.fresh >= num_pieces:
            return replace(self, aside=aside).next_piece()
        return replace(self, index=self.fresh, fresh=self.fresh + 1, row=0, aside=aside)

    def as_list(self) -> list[object]:
        """Return the position as values of JSON."""
        return [self.number, self.fresh, self.index, self.row, [list(entry) for entry in self.aside]]

    @classmethod
    def from_list(cls, values: Sequence[object]) -> Place:
        """Raises ValueError or TypeError for anything that `as_list` does not return. Older lists also counted
        failures.
        """
        *numbers, aside = values
        number, fresh, index, row = (int(value) for value in numbers[:4])  # pyright: ignore
        return cls(number, fresh, index, row, tuple((int(a), int(b)) for a, b, *_ in aside))  # pyright: ignore


START = Place()


class Source:
    """Pieces, read in any number of orders.

    Peers that walk through one large file side by side would train on the same text at the same time. So a source of
    few pieces is read in eight passes per epoch, each with another eighth of the documents, selected by the order: that
    costs parsing (about 200,000 rows per second), not memory. `thin` is off where reading again means downloading
    again.
    """

    def __init__(self, pieces: Sequence[Piece], *, thin: bool = True) -> None:
        assert pieces, "a source without a piece must be refused where it is opened"
        self.pieces = pieces
        self._passes = THINNED_PASSES if thin and len(pieces) < FEW_PIECES else 1

    def read(
        self,
        *,
        order: str = "",
        place: Place = START,
        faults: Faults | None = None,
        stop: threading.Event | None = None,
    ) -> Reader:
        """Read one epoch in `order` (any string; empty = the plain order), starting at `place`.

        `stop` ends a wait for a piece; reading then raises DataError.
        """
        passes = self._passes if order else 1
        return Reader(self.pieces, order, passes, place, faults or Faults(), stop or threading.Event())

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a piece is added, removed or renamed; folders do not matter."""
        return blake3("\n".join(piece.name for piece in self.pieces).encode()).hexdigest(16)


class Reader:
    """One epoch of a source: the iterator that `Source.read` gives."""

    def __init__(
        self, pieces: Sequence[Piece], order: str, passes: int, place: Place, faults: Faults, stop: threading.Event
    ) -> None:
        self._pieces = pieces
        self._order = order
        self._passes = passes
        self._faults = faults
        self._stop = stop
        self._at = place
        self._row = place.row
        self._failures: Counter[int] = Counter()  # by index in the order of this pass; a restart resets it
        self._tries = 0  # failures since the last row
        self._waited_s = 0.0  # since the last row

    @property
    def place(self) -> Place:
        """The position after the last yielded document."""
        return replace(self._at, row=self._row)

    def __iter__(self) -> Iterator[Document]:
        for number in range(self._at.number, self._passes):
            indices = self._permutation(number)
            self._failures.clear()
            while self._at.index < len(indices):
                piece = self._pieces[indices[self._at.index]]
                try:
                    yield from self._read_piece(piece)
                except Unavailable as error:
                    self._failed(piece, error)
                else:
                    self._go_to(self.place.next_piece())
            self._go_to(Place(number + 1))

    def _read_piece(self, piece: Piece) -> Iterator[Document]:
        num_faults, has_documents = 0, False
        for row in piece.rows(self._row):
            number, self._row = self._row, self._row + 1
            self._tries, self._waited_s = 0, 0.0
            if isinstance(row, Document):
                has_documents = True
                if self._is_of_pass(piece, number):
                    yield row
            elif isinstance(row, Fault):
                if row.rest or self._is_of_pass(piece, number):
                    self._faults.note(row)
                num_faults += 1
                if row.rest or (num_faults > MAX_BAD_START and not has_documents):
                    return

    def _failed(self, piece: Piece, error: Unavailable) -> None:
        at = self.place
        self._failures[at.index] += self._tries == 0  # without a row in between, the network is at fault, not the piece
        if self._failures[at.index] > MAX_FAILURES:
            reason = f"could not be read {MAX_FAILURES} times, though other files could: {error}"
            self._faults.note(Fault(piece.name, at.row + 1, reason, rest=True))
            self._go_to(at.next_piece())
            return
        self._go_to(at.set_aside(len(self._pieces)))
        self._wait(error, go_on_with="the same file" if self._at.index == at.index else "another file")

    def _wait(self, error: Unavailable, *, go_on_with: str) -> None:
        """Wait: not at the first failure if there is another file, then 1, 2, 4 .. 60 s."""
        self._tries += 1
        at_once = self._tries == 1 and go_on_with == "another file"
        pause_s = 0.0 if at_once else min(MAX_PAUSE_S, 2.0 ** (self._tries - 2))
        log.warning("%s; reading continues with %s%s", error, go_on_with, f" in {pause_s:.0f} s" if pause_s else "")
        if self._stop.wait(pause_s) or self._waited_s > GIVE_UP_S:
            raise DataError(f"no data could be read for {self._waited_s:.0f} s: {error}")
        self._waited_s += pause_s

    def _go_to(self, place: Place) -> None:
        self._at, self._row = place, place.row

    def _permutation(self, number: int) -> Sequence[int]:
        if not self._order:
            return range(len(self._pieces))
        return permutation(f"{self._order}/{number}", len(self._pieces))

    def _is_of_pass(self, piece: Piece, row: int) -> bool:
        if self._passes == 1:
            return True
        return blake3(f"{self._order}/{piece.name}/{row}".encode()).digest(8)[0] % self._passes == self._at.number


def permutation(seed: str, length: int) -> Sequence[int]:
    """Return 0 .. length - 1 in an order drawn from `seed` alone."""
    generator = np.random.default_rng(int.from_bytes(blake3(seed.encode()).digest()))
    return generator.permutation(length).tolist()
