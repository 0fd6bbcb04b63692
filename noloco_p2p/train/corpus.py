"""Documents, and the order in which a peer reads them.

A source is a list of *pieces* (files, or shards of a hub data set), each a row of documents. Everything that decides
an order is a hash, so that it is the same on every machine and after every restart. Imports neither torch nor datasets.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from noloco_p2p.errors import DataError

Place = tuple[int, int, int]  # pass, piece (in the order of the reader), row of the next document
FEW_PIECES = 16
THINNED_PASSES = 8
# encodings/ is tables of code points, tests are not typical text, the rest is not the standard library
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests", "lib-dynload"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or the token ids of one (1-D integers). `name`: a text known by its name rather than its content."""

    content: str | np.ndarray
    origin: str  # for messages: the file or data set it comes from
    name: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """One file or shard. `rows(start)` reads from row `start` on; None stands for a row without a document."""

    name: str
    rows: Callable[[int], Iterator[Document | None]]


class Reader:
    """One epoch of a source. `place` is where the document after the last one yielded stands."""

    def __init__(self, pieces: Sequence[Piece], *, order: str, passes: int, place: Place | None) -> None:
        self.place: Place | None = place
        self._pieces = pieces
        self._order = order
        self._passes = passes

    def __iter__(self) -> Iterator[Document]:
        first_pass, first_piece, first_row = self.place or (0, 0, 0)
        for number in range(first_pass, self._passes):
            permutation = self._permutation(number)
            for index in range(first_piece, len(permutation)):
                yield from self._read_piece(self._pieces[permutation[index]], (number, index, first_row))
                first_row = 0
            first_piece = 0

    def _read_piece(self, piece: Piece, start: Place) -> Iterator[Document]:
        number, index, first_row = start
        for row, document in enumerate(piece.rows(first_row), start=first_row):
            self.place = (number, index, row + 1)
            if document is not None and self._pass_of(piece, row) == number:
                yield document

    def _permutation(self, number: int) -> Sequence[int]:
        if not self._order:
            return range(len(self._pieces))
        return permutation(f"{self._order}/{number}", len(self._pieces))

    def _pass_of(self, piece: Piece, row: int) -> int:
        if self._passes == 1:
            return 0
        return blake3(f"{self._order}/{piece.name}/{row}".encode()).digest(8)[0] % self._passes


class Source:
    """Pieces, read in any number of orders.

    Peers that walk through one big file side by side would train on the same text at the same time. So a source of few
    pieces is read in eight passes an epoch, each with another eighth of the documents, drawn by the order: it costs
    parsing (about 200,000 rows a second), not memory. `thin` is off where reading again means downloading again.
    """

    def __init__(self, pieces: Sequence[Piece], *, thin: bool = True) -> None:
        assert pieces, "a source without a piece must be refused where it is opened"
        self._pieces = pieces
        self._passes = THINNED_PASSES if thin and len(pieces) < FEW_PIECES else 1

    def read(self, *, order: str = "", place: Place | None = None) -> Reader:
        """One epoch in `order` (any string; empty = the plain order), from `place` on."""
        return Reader(self._pieces, order=order, passes=self._passes if order else 1, place=place)

    def fingerprint(self) -> str:
        """Changes when a piece comes, goes or is renamed; folders do not matter."""
        return blake3("\n".join(piece.name for piece in self._pieces).encode()).hexdigest(16)


def permutation(seed: str, length: int) -> Sequence[int]:
    """0 .. length - 1 in an order drawn from `seed` alone."""
    generator = np.random.default_rng(int.from_bytes(blake3(seed.encode()).digest()))
    return generator.permutation(length).tolist()


def is_held_out(document: Document, share: float) -> bool:
    """Whether a document belongs to the `share` kept for validation: its hash decides, so all machines agree."""
    if document.name:
        key = document.name.encode()
    elif isinstance(document.content, str):
        key = document.content.encode("utf-8", "replace")
    else:
        key = document.content.astype("<i8").tobytes()
    return int.from_bytes(blake3(key).digest(8)) < share * 2**64


def builtin_corpus() -> Source:
    """The sources of Python's own standard library, about 11 MB; there is nothing to download.

    Held-out files are chosen by path, so that peers with different versions of Python hold out the same ones.
    Raises DataError where Python comes without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(_python_files(folder), key=lambda path: path.relative_to(folder).as_posix())
    if not paths:
        raise DataError(
            f"no Python sources in {folder}, so the built-in corpus (data.source = 'stdlib') is empty; "
            "install Python's standard library sources, or use other data"
        )
    return Source([_python_piece(path, path.relative_to(folder).as_posix()) for path in paths])


def _python_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        yield from (Path(parent, name) for name in files if name.endswith(".py"))


def _python_piece(path: Path, name: str) -> Piece:
    def rows(start: int) -> Iterator[Document]:
        if start == 0:
            yield Document(read_text(path), origin=str(path), name=name)

    return Piece(name, rows)


def read_text(path: Path) -> str:
    """The whole file, line ends untouched. Raises DataError naming it."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
