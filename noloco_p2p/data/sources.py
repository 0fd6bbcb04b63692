"""Open the sources that a run spec names: the built-in corpus, files of `--data NAME=GLOB`, and hub data sets."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from noloco_p2p.data.documents import Document, Fault, Piece, Row
from noloco_p2p.data.files import file_piece
from noloco_p2p.data.hub import hub_source
from noloco_p2p.data.reader import Source
from noloco_p2p.errors import DataError, Unbound
from noloco_p2p.spec import DataSpec, SourceSpec

# encodings/ contains tables of code points, tests are not typical text, and the rest is not the standard library
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests", "lib-dynload"}
)


def open_source(part: SourceSpec, bindings: Mapping[str, str]) -> Source:
    """Open the source of a run, including the documents that are held out by hash.

    Raises DataError if that fails. The message names the flag or file that is wrong.
    """
    if part.source == "stdlib":
        return builtin_corpus()
    if part.source.startswith("hub:"):
        return hub_source(part, part.split)
    kept_apart = {path.resolve() for path in _bound_files(f"{part.source}.validation", bindings, is_needed=False)}
    paths = [path for path in _bound_files(part.source, bindings) if path.resolve() not in kept_apart]
    if not paths:
        raise Unbound(
            f"every file in --data {part.source} is also in --data {part.source}.validation, so no file is left for "
            "training"
        )
    return _file_source(paths, part)


def open_validation(part: SourceSpec, bindings: Mapping[str, str]) -> tuple[Source, bool]:
    """Return the source of the held-out documents, and whether it contains only held-out documents.

    If it does not, a hash selects the held-out ones.
    """
    if part.source.startswith("hub:") and part.validation_split:
        return hub_source(part, part.validation_split), True
    if paths := _bound_files(f"{part.source}.validation", bindings, is_needed=False):
        return _file_source(paths, part), True
    return open_source(part, bindings), False


def has_own_validation(part: SourceSpec) -> bool:
    """Return whether the spec itself provides separate validation data.

    A validation file that is bound on one machine does not count. The other peers still hold out documents by hash, and
    no peer may train on documents that another peer uses for validation.
    """
    return part.source.startswith("hub:") and bool(part.validation_split)


def check_bindings(data: DataSpec, bindings: Mapping[str, str]) -> None:
    """Raise Unbound if the files of a run are not bound here, and DataError if their type is unknown.

    The hub is not contacted.
    """
    for part, _ in data.parts():
        if not part.source.startswith("hub:"):
            open_source(part, bindings)


def _bound_files(name: str, bindings: Mapping[str, str], *, is_needed: bool = True) -> list[Path]:
    """Return the files that a binding names, sorted by file name. Raises Unbound if there are none.

    If `is_needed` is false, the binding itself may be missing, and the list is then empty.
    """
    pattern = bindings.get(name)
    if pattern is None:
        if not is_needed:
            return []
        raise Unbound(
            f"the run trains on data named '{name}', which is not bound to files on this machine; ask whoever gave you "
            f"the ticket for the files, and use --data {name}=GLOB, for example --data '{name}=/data/{name}/*.jsonl.gz'"
        )
    expanded = Path(pattern).expanduser()
    if expanded.is_dir():
        raise Unbound(f"--data {name}={pattern} is a folder; specify its files, for example '{pattern.rstrip('/')}/*'")
    literal = [str(expanded)] if expanded.is_file() else []  # a name may contain [ or *
    paths = [Path(found) for found in literal or glob.glob(str(expanded), recursive=True)]
    files = sorted((path for path in paths if path.is_file()), key=lambda path: (path.name, str(path)))
    if not files:
        raise Unbound(f"--data {name}={pattern} matches no files")
    return files


def _file_source(paths: list[Path], part: SourceSpec) -> Source:
    return Source([file_piece(path, part) for path in paths])


def builtin_corpus() -> Source:
    """Return a source with the Python files of the standard library, which take up about 11 MB and need no download.

    Held-out files are chosen by path, so that peers with different versions of Python hold out the same ones. Raises
    DataError if Python was installed without these files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths: dict[str, Path] = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        found = [Path(parent, name) for name in files if name.endswith(".py")]
        paths |= {path.relative_to(folder).as_posix(): path for path in found}
    if not paths:
        raise DataError(
            f"no Python sources in {folder}, so the built-in corpus (data.source = 'stdlib') is empty; "
            "install Python's standard library sources, or use other data"
        )
    return Source([Piece(name, partial(_python_rows, paths[name], name)) for name in sorted(paths)])


def _python_rows(path: Path, name: str, start: int) -> Iterator[Row]:
    if start == 0:
        try:
            yield Document(path.read_bytes().decode("utf-8", "replace"), origin=str(path), name=name)
        except OSError as error:
            yield Fault(str(path), None, f"cannot be read: {error.strerror or error}", rest=True)
