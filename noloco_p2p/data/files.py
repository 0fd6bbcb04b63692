"""Read local files row by row: text and JSON lines (plain or .gz), and Parquet.

A row is a document, a fault with its line and reason, or None if it is empty. Rows are numbered in file order, so that
reading can start at any row. Errors that may be temporary, for example on a network file system, raise Unavailable.

The builders of `datasets` cannot replace this module. Their errors do not name the file. They stop at the first line
that has other fields or is not JSON, at the first damaged row group, or at the end of a truncated file, and never read
the files that follow. They also use 330 MiB more memory per process, and read .json.gz at half the speed
(benchmarks/results/data_library.txt).
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from noloco_p2p.data.chats import FIELDS, check_fields, messages_of
from noloco_p2p.data.documents import Document, Fault, Piece, Row, Unavailable
from noloco_p2p.errors import DataError
from noloco_p2p.spec import SourceSpec

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

ROWS_A_READ = 256
MAX_LINE_BYTES = 64 << 20  # a longer line is a fault, and is never read as a whole
TEXT_PIECE_CHARS = 64 * 1024  # a longer text file becomes several documents, cut at a blank line if there is one
TOKENS_FIELD = "input_ids"
MASK_FIELD = "attention_mask"
GONE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def file_piece(path: Path, part: SourceSpec) -> Piece:
    """Return the piece for a file of a source. Raises DataError if the kind of file is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_packed = suffixes[-1:] == [".gz"]
    kind = "".join(suffixes[-2:-1] if is_packed else suffixes[-1:])
    if kind not in KINDS or (is_packed and kind == ".parquet"):
        raise DataError(f"{path}: unsupported file type; use .txt, .json or .jsonl (each also with .gz), or .parquet")
    read = KINDS[kind]
    if read is _texts and part.format != "text":
        raise DataError(
            f"{path}: a text file has no chats; data.format = {part.format!r} needs .json, .jsonl or .parquet"
        )

    def rows(start: int) -> Iterator[Row]:
        """Yield the rows of the file. If the rest of the file cannot be read, the last row yielded is a fault."""
        number = start
        try:
            for item in islice(read(path, part), start, None):
                number += 1
                yield row_of(item, str(path), number, part)
        except Exception as error:  # noqa: BLE001 - whatever a parser raises costs this file and not the source
            if isinstance(error, OSError) and error.errno and not isinstance(error, GONE):
                raise Unavailable(f"{path}: {first_line(error)}") from None
            line = number + 1 if number > start and read is not _texts else None  # a library's OSError has no number
            yield Fault(str(path), line, f"cannot be read: {first_line(error)}", rest=True)

    return Piece(path.name, rows)


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")  # pyright: ignore[reportReturnType]


def _lines(path: Path) -> Iterator[bytes | Fault]:
    """Yield the lines of a file, with a fault in place of a line that is longer than the limit."""
    with _opened(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if number == 1:
                line = _unmarked(line)
            if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
                yield line
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield Fault(str(path), number, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")


def _unmarked(begin: bytes) -> bytes:
    """Return the beginning of a file without the mark of UTF-8. Raises ValueError for the mark of UTF-16."""
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("the file is UTF-16; convert it to UTF-8")
    return begin.removeprefix(codecs.BOM_UTF8)


def _texts(path: Path, part: SourceSpec) -> Iterator[Row]:
    """Yield documents of about 64 Ki characters each. A damaged line is left out of its document."""
    text = ""
    for number, line in enumerate(_lines(path), start=1):
        if isinstance(line, Fault):
            yield line
            continue
        try:
            decoded = line.decode()
        except ValueError as error:
            yield Fault(str(path), number, f"not UTF-8 text: {first_line(error)}")
            continue
        for start in range(0, len(decoded), TEXT_PIECE_CHARS):
            added = decoded[start : start + TEXT_PIECE_CHARS]
            text += added
            if len(text) >= (TEXT_PIECE_CHARS if added.strip() else TEXT_PIECE_CHARS // 2):
                yield Document(text, origin=str(path), line=number)
                text = ""
    if text:
        yield Document(text, origin=str(path))


def _json_items(path: Path, part: SourceSpec) -> Iterator[Any]:
    """Yield the lines of a file, or the items of its one JSON array, which is read as a whole."""
    with _opened(path) as file:
        if _unmarked(file.read(64)).lstrip()[:1] == b"[":
            file.seek(0)
            yield from json.load(file)
            return
    yield from _lines(path)


def _parquet_items(path: Path, part: SourceSpec) -> Iterator[Any]:
    """Yield the rows of all row groups in order.

    A damaged group is reported as a fault, and reading continues with the next group.
    """
    import pyarrow.parquet as pq

    if not path.stat().st_size:
        return
    with pq.ParquetFile(path) as file:
        columns = _used_columns(file.schema_arrow.names, part)
        first = 0
        for group in range(file.num_row_groups):
            number, last = first, first + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(batch_size=ROWS_A_READ, row_groups=[group], columns=columns):
                    for item in table_items(batch, part):
                        number += 1
                        yield item
            except GONE:
                raise
            except (OSError, ValueError, NotImplementedError) as error:  # pyarrow raises OSError for damaged pages, too
                yield Fault(str(path), number + 1, f"rows {number + 1} to {last} cannot be read: {first_line(error)}")
                yield from [None] * (last - number - 1)  # so that rows keep their numbers in the file
            first = last


def _used_columns(names: list[str], part: SourceSpec) -> list[str]:
    """Return the columns of a table to read. Raises ValueError if it has none of them."""
    if part.format != "text":
        check_fields(names, part.format)
        return [name for name in FIELDS[part.format] if name in names]
    if not {part.text_field, TOKENS_FIELD}.intersection(names):
        raise ValueError(_no_field(part.text_field, names))
    return [name for name in (part.text_field, TOKENS_FIELD, MASK_FIELD) if name in names]


def table_items(table: Table | RecordBatch, part: SourceSpec) -> Iterator[dict[str, Any] | ValueError]:
    """Yield the used fields of each row of a table, or the error for a row that is not UTF-8.

    Raises ValueError if the table has no text.
    """
    table = table.select(_used_columns(table.schema.names, part))
    try:
        yield from table.to_pylist()
    except ValueError:  # before the first row
        for index in range(table.num_rows):
            try:
                yield table.slice(index, 1).to_pylist()[0]
            except ValueError as error:
                yield error


def row_of(item: Any, origin: str, number: int, part: SourceSpec) -> Row:
    """Return the row for a line of JSON or for the fields of a document. A row is returned as it is."""
    if item is None or isinstance(item, Document | Fault):
        return item
    if isinstance(item, bytes):
        if not item.strip():
            return None
        try:
            item = json.loads(item)
        except (ValueError, RecursionError) as error:
            return Fault(origin, number, f"not JSON: {first_line(error)}")
    if isinstance(item, ValueError):
        return Fault(origin, number, f"not UTF-8: {first_line(item)}")
    if not isinstance(item, dict):
        return Fault(origin, number, f"expected a JSON object, got {type(item).__name__}")
    if part.format != "text":
        try:
            messages = messages_of(item, part.format)
        except ValueError as error:
            return Fault(origin, number, str(error))
        return Document(messages, origin=origin, line=number) if messages else None
    text_field = part.text_field
    if text_field in item:
        text = item[text_field]
        if text is None or text == "":
            return None
        if isinstance(text, str):
            return Document(text, origin=origin, line=number)
        what = type(text).__name__
        return Fault(origin, number, f"field {text_field!r} (data.text_field) has type {what} instead of str")
    if TOKENS_FIELD not in item:
        return Fault(origin, number, _no_field(text_field, list(item)))
    ids, mask = item[TOKENS_FIELD], item.get(MASK_FIELD)
    if ids is None:
        return None
    ids = _integers(ids)
    if ids is None:
        return Fault(origin, number, f"field {TOKENS_FIELD!r} is not a list of integers")
    if mask is not None:
        mask = _integers(mask, kinds="iub")
        if mask is None:
            return Fault(origin, number, f"field {MASK_FIELD!r} is not a list of zeros and ones")
        if len(mask) != len(ids):
            return Fault(origin, number, f"{MASK_FIELD} has {len(mask)} entries, but {TOKENS_FIELD} has {len(ids)}")
        ids = ids[mask != 0]  # without the padding
    return Document(ids, origin=origin, line=number) if len(ids) else None


def _integers(values: Any, *, kinds: str = "iu") -> np.ndarray | None:
    """Convert a list of integers, which may be empty, to an array. Return None for anything else."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths
        return None
    is_list = array.ndim == 1 and (array.dtype.kind in kinds or not array.size)
    return array if is_list else None


def _no_field(text_field: str, fields: list[str]) -> str:
    return (
        f"the fields ({', '.join(fields)[:200]}) include neither {text_field!r} nor {TOKENS_FIELD!r}; "
        "data.text_field in the run spec must name the field that contains the text"
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


KINDS: dict[str, Callable[[Path, SourceSpec], Iterator[Any]]] = {
    **dict.fromkeys((".txt", ".text"), _texts),
    **dict.fromkeys((".json", ".jsonl"), _json_items),
    ".parquet": _parquet_items,
}
