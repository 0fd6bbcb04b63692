"""Read one epoch of a source in an order that a hash determines. Reading can resume at any document.

A source is a list of pieces, which are files or shards of a hub data set. A piece that cannot be read for the moment,
for example because of the network, is set aside at its current row. Another piece is read in the meantime. When that
piece ends, reading returns to the piece that was set aside.

An `IterableDataset` of `datasets` ends at the first unreadable file. Its retries wait for the same file, and its
`shuffle` draws from a buffer that a restart does not restore (benchmarks/results/data_library.txt).

This module imports neither torch nor datasets.
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
MAX_ASIDE = 4  # pieces set aside; if more cannot be read, the network is at fault, and the first one is retried
MAX_FAILURES = 8  # failures of one piece while others can be read; after that, the rest of the piece is left out
MAX_PAUSE_S = 60.0
GIVE_UP_S = 3600.0  # total waiting time after which reading fails if no row has been read
MAX_BAD_START = 1000  # a file that begins with more faults than this has another format


@dataclass(frozen=True, slots=True)
class Place:
    """The position of the next document.

    `index` is the current piece in the order of the pass, and `fresh` is the first piece that has not been started.
    `aside` lists the index and row of each piece that was set aside.
    """

    number: int = 0  # the number of the pass
    fresh: int = 1
    index: int = 0
    row: int = 0
    aside: tuple[tuple[int, int], ...] = ()

    def next_piece(self) -> Place:
        """Return the position in the piece that was set aside first, or in a fresh piece if there is none."""
        if not self.aside:
            return replace(self, index=self.fresh, fresh=self.fresh + 1, row=0)
        (index, row), *others = self.aside
        return replace(self, index=index, row=row, aside=tuple(others))

    def set_aside(self, num_pieces: int) -> Place:
        """Set the current piece aside, and return the position in another piece.

        If there is no other piece, this is the position in the same piece.
        """
        aside = (*self.aside, (self.index, self.row))
        if len(aside) > MAX_ASIDE or self.fresh >= num_pieces:
            return replace(self, aside=aside).next_piece()
        return replace(self, index=self.fresh, fresh=self.fresh + 1, row=0, aside=aside)

    def as_list(self) -> list[object]:
        """Return the position as JSON values."""
        return [self.number, self.fresh, self.index, self.row, [list(entry) for entry in self.aside]]

    @classmethod
    def from_list(cls, values: Sequence[object]) -> Place:
        """Create a position from the values that `as_list` has returned.

        Raises ValueError or TypeError for any other values.
        """
        *numbers, aside = values
        number, fresh, index, row = (int(value) for value in numbers)  # pyright: ignore
        return cls(number, fresh, index, row, tuple((int(a), int(b)) for a, b in aside))  # pyright: ignore


START = Place()


class Source:
    """A list of pieces that can be read in any number of orders.

    If all peers read a single large file from its start, they would train on the same text at the same time. A source
    with few pieces is therefore read in eight passes per epoch. Each pass yields a different eighth of the documents,
    and the order determines which eighth. The additional passes take time for parsing (about 200,000 rows per second),
    but no memory. `thin` is false if reading a source again means downloading it again.
    """

    def __init__(self, pieces: Sequence[Piece], *, thin: bool = True) -> None:
        assert pieces, "a source must have at least one piece"
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
        """Read one epoch, starting at `place`. `order` is any string, or "" for the plain order of the pieces.

        If `stop` is set while the reader waits for a piece, it raises DataError.
        """
        passes = self._passes if order else 1
        return Reader(self.pieces, order, passes, place, faults or Faults(), stop or threading.Event())

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the names of the pieces. It does not change if files move to another folder."""
        return blake3("\n".join(piece.name for piece in self.pieces).encode()).hexdigest(16)


class Reader:
    """An iterator over the documents of one epoch, created by `Source.read`."""

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
        self._waited_s = 0.0  # waiting time since the last row

    @property
    def place(self) -> Place:
        """The position after the last document that was yielded."""
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
            reason = f"reading failed {MAX_FAILURES} times, although other files could be read: {error}"
            self._faults.note(Fault(piece.name, at.row + 1, reason, rest=True))
            self._go_to(at.next_piece())
            return
        self._go_to(at.set_aside(len(self._pieces)))
        self._wait(error, go_on_with="the same file" if self._at.index == at.index else "another file")

    def _wait(self, error: Unavailable, *, go_on_with: str) -> None:
        """Wait after a failure. The waiting time doubles with each failure, from 1 s to at most 60 s.

        After the first failure, there is no wait if another file can be read.
        """
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
    """Return the numbers from 0 to length - 1 in an order that depends only on `seed`."""
    generator = np.random.default_rng(int.from_bytes(blake3(seed.encode()).digest()))
    return generator.permutation(length).tolist()
