"""Documents, and the order in which a peer reads them.

A source is a list of *pieces* (files, or shards of a hub data set), each a row of documents. Everything that decides
an order is a hash, so that it is the same on every machine and after every restart. Imports neither torch nor datasets.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from noloco_p2p.data.faults import Fault
from noloco_p2p.data.reader import START, Context, Document, Piece, Place, Reader, Row
from noloco_p2p.errors import DataError

FEW_PIECES = 16
THINNED_PASSES = 8
# encodings/ is tables of code points, tests are not typical text, the rest is not the standard library
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests", "lib-dynload"}
)


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

    @property
    def pieces(self) -> Sequence[Piece]:
        return self._pieces

    def read(self, *, order: str = "", place: Place = START, context: Context | None = None) -> Reader:
        """One epoch in `order` (any string; empty = the plain order), from `place` on."""
        passes = self._passes if order else 1
        return Reader(self._pieces, order=order, passes=passes, place=place, context=context or Context())

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a piece comes, goes or is renamed; folders do not matter."""
        return blake3("\n".join(piece.name for piece in self._pieces).encode()).hexdigest(16)


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
    def rows(start: int) -> Iterator[Row]:
        if start == 0:
            try:
                yield Document(path.read_bytes().decode("utf-8", "replace"), origin=str(path), name=name)
            except OSError as error:
                yield Fault(str(path), None, f"cannot be read: {error.strerror or error}", rest=True)

    return Piece(name, rows)
