"""One epoch of pieces in an order drawn by a hash, resumable at any document.

A piece that cannot be read just now (network) is set aside where it stands, and another one is read meanwhile; pieces
set aside are taken up again when a piece has ended. `Place` is the whole state, and each step of it is a pure function
of what happened. Set-asides are recorded (`Context.detours`): given back as a script they make a reader go the same
way again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from blake3 import blake3

from noloco_p2p.data.faults import Fault, Faults
from noloco_p2p.errors import DataError

log = logging.getLogger(__name__)

MAX_ASIDE = 4  # pieces; when as many cannot be read it is the network, and the first of them is tried again
MAX_FAILURES = 8  # of one piece, while others could be read: then the rest of it is left out
MAX_PAUSE_S = 60.0
GIVE_UP_S = 3600.0  # of waiting without one document
MAX_BAD_START = 1000  # rows: a file that begins with so many faults is of another kind


class Unavailable(DataError):
    """A piece cannot be read now, and may be in a while."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or the token ids of one (1-D integers). `name`: a text known by its name rather than its content."""

    content: str | np.ndarray
    origin: str  # for messages: the file or data set it comes from
    name: str = ""
    line: int | None = None


Row = Document | Fault | None  # None: a row without a document


@dataclass(frozen=True, slots=True)
class Piece:
    """One file or shard. `rows(start)` reads from row `start` on; raises Unavailable."""

    name: str
    rows: Callable[[int], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the next document stands. `index`: a piece in the order of the pass; `fresh`: the first one not begun."""

    number: int = 0  # of the pass
    fresh: int = 1
    index: int = 0
    row: int = 0
    failures: int = 0  # of this piece
    streak: int = 0  # failures of all pieces since the last row
    aside: tuple[tuple[int, int, int], ...] = ()  # index, row, failures

    def after_piece(self) -> Place:
        if self.aside:
            return self._take_up(self.aside)
        return replace(self, index=self.fresh, fresh=self.fresh + 1, row=0, failures=0)

    def set_aside(self, num_pieces: int) -> Place:
        """After a failure: another piece, or the same one when there is no other."""
        failures = self.failures + (1 if self.streak == 0 else 0)  # with a streak it is the network, not the piece
        aside = (*self.aside, (self.index, self.row, failures))
        at = replace(self, streak=self.streak + 1)
        if len(aside) > MAX_ASIDE or self.fresh >= num_pieces:
            return at._take_up(aside)
        return replace(at, index=self.fresh, fresh=self.fresh + 1, row=0, failures=0, aside=aside)

    def _take_up(self, aside: tuple[tuple[int, int, int], ...]) -> Place:
        (index, row, failures), *rest = aside
        return replace(self, index=index, row=row, failures=failures, aside=tuple(rest))

    def as_list(self) -> list[object]:
        """JSON-able."""
        numbers = [self.number, self.fresh, self.index, self.row, self.failures, self.streak]
        return [*numbers, [list(entry) for entry in self.aside]]

    @classmethod
    def from_list(cls, values: Sequence[object]) -> Place:
        """Raises ValueError or TypeError for what `as_list` did not give."""
        *numbers, aside = values
        number, fresh, index, row, failures, streak = (int(value) for value in numbers)  # pyright: ignore
        entries = tuple((int(a), int(b), int(c)) for a, b, c in aside)  # pyright: ignore
        return cls(number, fresh, index, row, failures, streak, entries)


START = Place()


@dataclass(slots=True)
class Context:
    """What a reader shares with its owner."""

    faults: Faults = field(default_factory=Faults)
    stop: threading.Event = field(default_factory=threading.Event)  # ends a wait; reading then raises DataError
    detours: list[list[int]] = field(default_factory=list)  # pass, index and row of each set-aside
    script: list[list[int]] = field(default_factory=list)  # set-asides to make again
    steadfast: bool = False  # wait for a piece that fails rather than read another: a block is made again


class Reader:
    """One epoch of a source."""

    def __init__(self, pieces: Sequence[Piece], *, order: str, passes: int, place: Place, context: Context) -> None:
        self._pieces = pieces
        self._order = order
        self._passes = passes
        self._context = context
        self._at = place
        self._row = place.row
        self._found = place.streak == 0  # a row was read since the last failure
        self._tries = 0  # failures since then
        self._waited_s = 0.0

    @property
    def place(self) -> Place:
        """Where the document after the last one yielded stands."""
        return replace(self._at, row=self._row, streak=0 if self._found else self._at.streak)

    def __iter__(self) -> Iterator[Document]:
        for number in range(self._at.number, self._passes):
            permutation = self._permutation(number)
            while self._at.index < len(permutation):
                piece = self._pieces[permutation[self._at.index]]
                try:
                    yield from self._read_piece(piece)
                except Unavailable as error:
                    self._failed(piece, error, len(permutation))
                else:
                    self._go_to(self.place.after_piece())
            self._go_to(Place(number + 1))

    def _read_piece(self, piece: Piece) -> Iterator[Document]:
        at, bad_start = self._at, 0
        rows = piece.rows(at.row)
        while True:
            if self._is_scripted():
                raise Unavailable("set aside as before")
            row = next(rows, _END)
            if row is _END:
                return
            number, self._row = self._row, self._row + 1
            self._found, self._tries, self._waited_s = True, 0, 0.0
            if isinstance(row, Fault):
                if row.rest or self._pass_of(piece, number) == at.number:
                    self._note(row, at)
                bad_start += bad_start >= 0
                if row.rest or bad_start > MAX_BAD_START:
                    return
            elif isinstance(row, Document):
                bad_start = -1
                if self._pass_of(piece, number) == at.number:
                    yield row

    def _note(self, fault: Fault, at: Place) -> None:
        if not fault.rest or at.number == 0:  # else it was told in the first pass
            self._context.faults.note(fault)

    def _is_scripted(self) -> bool:
        script = self._context.script
        return bool(script) and script[0] == [self._at.number, self._at.index, self._row]

    def _failed(self, piece: Piece, error: Unavailable, num_pieces: int) -> None:
        scripted = self._is_scripted()
        if scripted:
            self._context.script.pop(0)
        elif self._context.steadfast:
            self._wait(error, go_on_with="the same file")
            self._go_to(self.place)
            return
        self._context.detours.append([self._at.number, self._at.index, self._row])
        if self._at.failures >= MAX_FAILURES:
            reason = f"could not be read {MAX_FAILURES} times, though other files could: {error}"
            self._context.faults.note(Fault(piece.name, self._row + 1, reason, rest=True))
            self._go_to(self.place.after_piece())
            return
        before, after = self._at, self.place.set_aside(num_pieces)
        self._go_to(after)
        self._found = False
        if not scripted:
            same = after.index == before.index
            self._wait(error, go_on_with="the same file" if same else "another file")

    def _wait(self, error: Unavailable, *, go_on_with: str) -> None:
        """Nothing at the first failure if there is another file, then 1, 2, 4 .. 60 s."""
        self._tries += 1
        at_once = self._tries == 1 and go_on_with == "another file"
        pause_s = 0.0 if at_once else min(MAX_PAUSE_S, 2.0 ** (self._tries - 2))
        log.warning("%s; reading goes on with %s%s", error, go_on_with, f" in {pause_s:.0f} s" if pause_s else "")
        if self._context.stop.wait(pause_s) or self._waited_s > GIVE_UP_S:
            raise DataError(f"no data could be read for {self._waited_s:.0f} s: {error}")
        self._waited_s += pause_s

    def _go_to(self, place: Place) -> None:
        self._at, self._row = place, place.row

    def _permutation(self, number: int) -> Sequence[int]:
        if not self._order:
            return range(len(self._pieces))
        return permutation(f"{self._order}/{number}", len(self._pieces))

    def _pass_of(self, piece: Piece, row: int) -> int:
        if self._passes == 1:
            return 0
        return blake3(f"{self._order}/{piece.name}/{row}".encode()).digest(8)[0] % self._passes


_END = object()


def permutation(seed: str, length: int) -> Sequence[int]:
    """0 .. length - 1 in an order drawn from `seed` alone."""
    generator = np.random.default_rng(int.from_bytes(blake3(seed.encode()).digest()))
    return generator.permutation(length).tolist()
