"""Sources that a run spec names: files bound on this machine with `--data NAME=GLOB`, and data sets of the hub."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path

from noloco_p2p.data.corpus import Source, builtin_corpus
from noloco_p2p.data.files import file_piece
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec, SourceSpec


def open_source(part: SourceSpec, bindings: Mapping[str, str]) -> Source:
    """What the run trains on, held-out documents included. Raises DataError that says which flag or file is wrong."""
    if part.source == "stdlib":
        return builtin_corpus()
    if part.source.startswith("hub:"):
        return _hub_source(part, part.split)
    paths = bound_files(part.source, bindings)
    kept_apart = {path.resolve() for path in _validation_files(part, bindings)}
    return _file_source([path for path in paths if path.resolve() not in kept_apart], part)


def open_validation(part: SourceSpec, bindings: Mapping[str, str]) -> tuple[Source, bool]:
    """Where held-out documents are, and whether all documents there are held out (else: those the hash chooses)."""
    if part.source.startswith("hub:") and part.validation_split:
        return _hub_source(part, part.validation_split), True
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


def _hub_source(part: SourceSpec, split: str) -> Source:
    from noloco_p2p.data.hub import hub_source  # the library behind it takes a second to import

    return hub_source(part, split)
