"""Sources that a run spec names: files bound on this machine with `--data NAME=GLOB`, and data sets of the hub.

Text files are read here; JSON and Parquet through the `datasets` library, streaming, so that nothing is copied into a
cache. That library is imported when a file of it is opened (1 s), not before.
"""

from __future__ import annotations

import functools
import glob
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec
from noloco_p2p.train.corpus import FEW_PIECES, Document, Piece, Source, builtin_corpus

if TYPE_CHECKING:
    from datasets import IterableDataset

KINDS = {".txt": "text", ".text": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
ROWS_A_READ = 256
TEXT_PIECE_CHARS = 64 * 1024  # a longer text file becomes several documents, cut at a blank line where there is one
TOKENS_FIELD = "input_ids"
MASK_FIELD = "attention_mask"


def open_source(data: DataSpec, bindings: Mapping[str, str]) -> Source:
    """What the run trains on, held-out documents included. Raises DataError that says which flag or file is wrong."""
    if data.source == "stdlib":
        return builtin_corpus()
    if data.source.startswith("hub:"):
        return _hub_source(data, data.split)
    paths = _bound_files(data.source, bindings)
    kept_apart = {path.resolve() for path in _validation_files(data, bindings)}
    return _file_source([path for path in paths if path.resolve() not in kept_apart], data)


def open_validation(data: DataSpec, bindings: Mapping[str, str]) -> tuple[Source, bool]:
    """Where held-out documents are, and whether all documents there are held out (else: those the hash chooses)."""
    if data.source.startswith("hub:") and data.validation_split:
        return _hub_source(data, data.validation_split), True
    if paths := _validation_files(data, bindings):
        return _file_source(paths, data), True
    return open_source(data, bindings), False


def has_own_validation(data: DataSpec) -> bool:
    """Whether the spec itself sets validation apart. A file bound on one machine alone does not count: the other peers
    then hold out by hash, and nobody may train on what another one validates on."""
    return data.source.startswith("hub:") and bool(data.validation_split)


# files of this machine


def _validation_files(data: DataSpec, bindings: Mapping[str, str]) -> list[Path]:
    name = f"{data.source}.validation"
    return _bound_files(name, bindings) if name in bindings else []


def _bound_files(name: str, bindings: Mapping[str, str]) -> list[Path]:
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


def _file_source(paths: list[Path], data: DataSpec) -> Source:
    if not paths:
        raise DataError(f"every file of --data {data.source} is also one of --data {data.source}.validation")
    return Source([_file_piece(path, data.text_field) for path in paths])


def _file_piece(path: Path, text_field: str) -> Piece:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    kind = KINDS.get(suffix.lower())
    if kind is None or (kind != "json" and path.suffix == ".gz"):
        raise DataError(f"{path}: unknown kind of file; readable are .txt, .json, .jsonl (both also .gz) and .parquet")
    if kind == "text":
        return Piece(path.name, lambda start: _text_rows(path, start))
    return Piece(path.name, lambda start: _table_rows(lambda: _open_file(kind, path), start, str(path), text_field))


def _text_rows(path: Path, start: int) -> Iterator[Document]:
    for row, text in enumerate(_cut_text(path)):
        if row >= start:
            yield Document(text, origin=str(path))


def _cut_text(path: Path) -> Iterator[str]:
    lines: list[str] = []
    num_chars = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while line := file.readline(TEXT_PIECE_CHARS):
                lines.append(line)
                num_chars += len(line)
                blank = not line.strip() and num_chars >= TEXT_PIECE_CHARS // 2
                if blank or num_chars >= TEXT_PIECE_CHARS:
                    yield "".join(lines)
                    lines, num_chars = [], 0
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    if lines:
        yield "".join(lines)


def _open_file(kind: str, path: Path) -> IterableDataset | None:
    return _stream_of(kind, path) if path.stat().st_size else None  # the library fails on an empty file


@functools.lru_cache(maxsize=FEW_PIECES)  # opening costs 50 ms, and few files are read again and again
def _stream_of(kind: str, path: Path) -> IterableDataset:
    datasets = _import_datasets()
    with tempfile.TemporaryDirectory() as cache:  # the library leaves one lock file a data file in its cache
        return datasets.load_dataset(
            kind, data_files=[glob.escape(str(path))], split="train", streaming=True, cache_dir=cache
        )


# the hub


def _hub_source(data: DataSpec, split: str) -> Source:
    name = data.source.removeprefix("hub:")
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or Path(name).exists():
        raise DataError(f"data.source: {name!r} is not a data set name of the hub, or a folder of that name lies here")
    datasets = _import_datasets()
    try:
        stream = datasets.load_dataset(
            name, data.subset or None, split=split, revision=data.revision or None, streaming=True
        )
    except Exception as error:  # noqa: BLE001 - network, hub and parser errors have no common base; all mean the same here
        raise DataError(
            f"hub data set {name!r} (subset {data.subset!r}, split {split!r}, revision {data.revision!r}) cannot be "
            f"opened: {_first_line(error)}. Check the name and the network; a data set without a split for validation "
            'needs data.validation_split = ""'
        ) from None
    return shard_source(stream, name=name, text_field=data.text_field)


def shard_source(stream: IterableDataset, *, name: str, text_field: str) -> Source:
    """The shards of a streamed data set as pieces; a peer reads them in its own order."""
    pieces = []
    for index in range(stream.num_shards):
        shard = stream.shard(num_shards=stream.num_shards, index=index)
        piece_name = f"{name}#{index}"
        pieces.append(Piece(piece_name, _shard_rows(shard, piece_name, text_field)))
    return Source(pieces, thin=False)


def _shard_rows(shard: IterableDataset, name: str, text_field: str) -> Callable[[int], Iterator[Document | None]]:
    return lambda start: _table_rows(lambda: shard, start, name, text_field)


# tables


def _table_rows(
    open_stream: Callable[[], IterableDataset | None], start: int, origin: str, text_field: str
) -> Iterator[Document | None]:
    """One item a row, from row `start` on. Raises DataError naming `origin` for whatever is wrong with it."""
    try:
        stream = open_stream()
        if stream is None:
            return
        for table in stream.skip(start).with_format("arrow").iter(batch_size=ROWS_A_READ):
            yield from _documents(table, origin, text_field)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - pyarrow, zlib, json, fsspec: a broken file raises whatever they raise
        raise DataError(f"{origin}: cannot be read: {_first_line(error)}; remove or replace it") from None


def _documents(table: Any, origin: str, text_field: str) -> Iterator[Document | None]:
    if text_field in table.column_names:
        for text in table.column(text_field).to_pylist():
            if text is not None and not isinstance(text, str):
                raise DataError(
                    f"{origin}: field {text_field!r} holds {type(text).__name__}, not text (data.text_field)"
                )
            yield Document(text, origin=origin) if text else None
    elif TOKENS_FIELD in table.column_names:
        yield from (Document(ids, origin=origin) if len(ids) else None for ids in _token_rows(table))
    else:
        raise DataError(
            f"{origin}: no field {text_field!r} and no {TOKENS_FIELD!r}; it has {', '.join(table.column_names)}. "
            "data.text_field of the run spec names the field with the text"
        )


def _token_rows(table: Any) -> Iterator[np.ndarray]:
    """Token ids of each row; positions that an attention mask calls padding are left out."""
    masks = table.column(MASK_FIELD) if MASK_FIELD in table.column_names else None
    for row, scalar in enumerate(table.column(TOKENS_FIELD)):
        ids = _numbers(scalar)
        if masks is not None:
            ids = ids[_numbers(masks[row]) != 0]
        yield ids


def _numbers(scalar: Any) -> np.ndarray:
    values = scalar.values
    return np.zeros(0, np.int64) if values is None else values.to_numpy(zero_copy_only=False)


def _import_datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what it logs is in our DataError
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
