"""Sources that a run spec names: the built-in corpus, files bound with `--data NAME=GLOB`, and data sets of the hub."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from noloco_p2p.data.documents import Document, Fault, Piece, Row
from noloco_p2p.data.files import file_piece
from noloco_p2p.data.hub import hub_source
from noloco_p2p.data.reader import Source
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec, SourceSpec

# encodings/ is tables of code points, tests are not typical text, the rest is not the standard library
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests", "lib-dynload"}
)


def open_source(part: SourceSpec, bindings: Mapping[str, str]) -> Source:
    """What the run trains on, held-out documents included. Raises DataError that says which flag or file is wrong."""
    if part.source == "stdlib":
        return builtin_corpus()
    if part.source.startswith("hub:"):
        return hub_source(part, part.split)
    paths = bound_files(part.source, bindings)
    kept_apart = {path.resolve() for path in _validation_files(part, bindings)}
    return _file_source([path for path in paths if path.resolve() not in kept_apart], part)


def open_validation(part: SourceSpec, bindings: Mapping[str, str]) -> tuple[Source, bool]:
    """Where held-out documents are, and whether all documents there are held out (else: those the hash chooses)."""
    if part.source.startswith("hub:") and part.validation_split:
        return hub_source(part, part.validation_split), True
    if paths := _validation_files(part, bindings):
        return _file_source(paths, part), True
    return open_source(part, bindings), False


def has_own_validation(part: SourceSpec) -> bool:
    """Whether the spec itself sets validation apart. A file bound on one machine alone does not count: the other peers
    then hold out by hash, and nobody may train on what another one validates on."""
    return part.source.startswith("hub:") and bool(part.validation_split)


def check_bindings(data: DataSpec, bindings: Mapping[str, str]) -> None:
    """Raises DataError when the files of a run are not bound here, or cannot be read. Asks no hub."""
    for part, _ in data.parts():
        if not part.source.startswith("hub:"):
            open_source(part, bindings)


def unused_bindings(data: DataSpec, bindings: Mapping[str, str]) -> list[str]:
    """Names that are bound, and of no use as the run reads other data."""
    names = {part.source for part, _ in data.parts()}
    return [name for name in bindings if name.removesuffix(".validation") not in names]


def bound_files(name: str, bindings: Mapping[str, str]) -> list[Path]:
    """The files that a binding names, by file name. Raises DataError."""
    pattern = bindings.get(name)
    if pattern is None:
        raise DataError(
            f"the run trains on data named '{name}', and this machine was not told where it lies: "
            f"give --data {name}=GLOB, for example --data '{name}=/data/{name}/*.jsonl.gz'"
        )
    expanded = Path(pattern).expanduser()
    if expanded.is_dir():
        raise DataError(f"--data {name}={pattern} is a folder; name its files, for example '{pattern.rstrip('/')}/*'")
    literal = [str(expanded)] if expanded.is_file() else []  # a name may hold [ or *
    paths = [Path(found) for found in literal or glob.glob(str(expanded), recursive=True)]
    files = sorted((path for path in paths if path.is_file()), key=lambda path: (path.name, str(path)))
    if not files:
        raise DataError(f"--data {name}={pattern} matches no file")
    return files


def _validation_files(part: SourceSpec, bindings: Mapping[str, str]) -> list[Path]:
    name = f"{part.source}.validation"
    return bound_files(name, bindings) if name in bindings else []


def _file_source(paths: list[Path], part: SourceSpec) -> Source:
    if not paths:
        raise DataError(f"every file of --data {part.source} is also one of --data {part.source}.validation")
    return Source([file_piece(path, part.text_field) for path in paths])


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
