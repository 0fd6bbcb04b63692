"""Read a source, epoch after epoch, in an order that a hash determines. Reading can resume at any document.

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
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from noloco_p2p.data.documents import Document, Fault, Faults, Piece, Unavailable, is_held_out
from noloco_p2p.errors import DataError

log = logging.getLogger(__name__)

FEW_PIECES = 16
THINNED_PASSES = 8
MAX_ASIDE = 4  # pieces set aside; if more cannot be read, the network is at fault, and the first one is retried
MAX_FAILURES = 8  # failures of one piece while others can be read; after that, the rest of the piece is left out
MAX_PAUSE_S = 60.0
GIVE_UP_S = 3600.0  # total waiting time after which reading fails if no row has been read
MAX_BAD_START = 1000  # a file that begins with more faults than this has another format


class Place(NamedTuple):
    """The position of the next document. Pieces are counted in the order of the pass.

    `begun` lists the pieces that were started but not finished, each with its next row. The first one is being read,
    and the others were set aside. `num_begun` is the number of pieces that were ever started.
    """

    epoch: int = 0
    number: int = 0  # the number of the pass in this epoch
    num_begun: int = 0
    begun: tuple[tuple[int, int], ...] = ()

    def as_json(self) -> list[Any]:
        """Return the position as JSON values."""
        return [self.epoch, self.number, self.num_begun, [list(piece) for piece in self.begun]]

    @classmethod
    def from_json(cls, values: Any) -> Place:
        """Create a position from the values of `as_json`. Raises ValueError or TypeError for any other values."""
        *numbers, begun = values
        epoch, number, num_begun = map(int, numbers)
        return cls(epoch, number, num_begun, tuple((int(piece), int(row)) for piece, row in begun))


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
        self.num_passes = THINNED_PASSES if thin and len(pieces) < FEW_PIECES else 1

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the names of the pieces. It does not change if files move to another folder."""
        return blake3("\n".join(piece.name for piece in self.pieces).encode()).hexdigest(16)


class Reader:
    """An endless iterator over the documents of a source. None marks the end of an epoch.

    `order` is any string, or "" for the plain order of the pieces. A share `holdout` of the documents is left out.
    `place` is the position after the last document that was yielded. Set it before the first document to continue from
    there. If `stop` is set while the reader waits for a piece, it raises DataError.
    """

    def __init__(
        self,
        source: Source,
        *,
        order: str = "",
        holdout: float = 0.0,
        faults: Faults | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.source = source
        self.place = Place()
        self._order = order
        self._num_passes = source.num_passes if order else 1
        self._holdout = holdout
        self._faults = faults or Faults()
        self._stop = stop or threading.Event()
        self._failures: Counter[int] = Counter()  # by piece of this pass; a restart resets it
        self._tries = 0  # failures since the last row
        self._waited_s = 0.0  # waiting time since the last row
        self._documents = self._read()

    def __iter__(self) -> Iterator[Document | None]:
        return self

    def __next__(self) -> Document | None:
        return next(self._documents)

    def epoch(self) -> Iterator[Document]:
        """Yield the documents up to the end of the epoch."""
        return iter(self.__next__, None)

    def _read(self) -> Iterator[Document | None]:
        num_pieces = len(self.source.pieces)
        while True:
            epoch, number, num_begun, begun = self.place
            if number == self._num_passes:
                self.place = Place(epoch + 1)
                yield None
                continue
            pass_of_order = f"{self._order}/{epoch}/{number}"
            order = permutation(pass_of_order, num_pieces) if self._order else range(num_pieces)
            while begun or num_begun < num_pieces:
                if not begun:
                    self.place = self.place._replace(num_begun=num_begun + 1, begun=((num_begun, 0),))
                piece = self.source.pieces[order[self.place.begun[0][0]]]
                try:
                    yield from self._read_piece(piece)
                except Unavailable as error:
                    self._set_aside(piece, error)
                else:
                    self.place = self.place._replace(begun=self.place.begun[1:])
                _, _, num_begun, begun = self.place
            self._failures.clear()
            self.place = Place(epoch, number + 1)

    def _read_piece(self, piece: Piece) -> Iterator[Document]:
        epoch, number, num_begun, ((index, start), *aside) = self.place
        num_faults, has_documents = 0, False
        for row_number, row in enumerate(piece.rows(start), start=start):
            self.place = Place(epoch, number, num_begun, ((index, row_number + 1), *aside))
            self._tries, self._waited_s = 0, 0.0
            is_of_pass = self._num_passes == 1 or self._draw(piece, row_number) == number
            if isinstance(row, Document):
                has_documents = True
                if is_of_pass and not (self._holdout and is_held_out(row, self._holdout)):
                    yield row
            elif isinstance(row, Fault):
                if row.rest or is_of_pass:
                    self._faults.note(row)
                num_faults += 1
                if row.rest or (num_faults > MAX_BAD_START and not has_documents):
                    return

    def _draw(self, piece: Piece, row_number: int) -> int:
        """Return the pass to which a row belongs."""
        return (
            blake3(f"{self._order}/{self.place.epoch}/{piece.name}/{row_number}".encode()).digest(8)[0]
            % self._num_passes
        )

    def _set_aside(self, piece: Piece, error: Unavailable) -> None:
        """Go on with another piece, if there is one, and wait if that one may fail as well.

        The waiting time doubles with each failure, from 1 s to at most 60 s. There is no wait after the first one.
        """
        num_begun, (failed, *aside) = self.place.num_begun, self.place.begun
        self._failures[failed[0]] += self._tries == 0  # without a row in between, the network is at fault
        if self._failures[failed[0]] > MAX_FAILURES:
            reason = f"reading failed {MAX_FAILURES} times, although other files could be read: {error}"
            self._faults.note(Fault(piece.name, failed[1] + 1, reason, rest=True))
            self.place = self.place._replace(begun=tuple(aside))
            return
        aside.append(failed)
        if len(aside) <= MAX_ASIDE and num_begun < len(self.source.pieces):
            aside.insert(0, (num_begun, 0))
            num_begun += 1
        self.place = self.place._replace(num_begun=num_begun, begun=tuple(aside))
        is_same = aside[0] == failed
        self._tries += 1
        pause_s = 0.0 if self._tries == 1 and not is_same else min(MAX_PAUSE_S, 2.0 ** (self._tries - 2))
        what = "the same file" if is_same else "another file"
        log.warning("%s; reading continues with %s%s", error, what, f" in {pause_s:.0f} s" if pause_s else "")
        if self._stop.wait(pause_s) or self._waited_s > GIVE_UP_S:
            raise DataError(f"no data could be read for {self._waited_s:.0f} s: {error}")
        self._waited_s += pause_s


def permutation(seed: str, length: int) -> Sequence[int]:
    """Return the numbers from 0 to length - 1 in an order that depends only on `seed`."""
    generator = np.random.default_rng(int.from_bytes(blake3(seed.encode()).digest()))
    return generator.permutation(length).tolist()
