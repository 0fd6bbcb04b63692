"""Read local files row by row: text and JSON lines (plain or .gz), and Parquet.

A row is a document, a fault with its line and reason, or None if it is empty. Rows are numbered in file order, so that
reading can start at any row. Errors that may be temporary, for example on a network file system, raise Unavailable.

The builders of `datasets` cannot replace this module. Their errors do not name the file. They stop at the first line
that has other fields or is not JSON, at the first damaged row group, or at the end of a truncated file, and never read
the files that follow. They also use 330 MiB more memory per process, and read .json.gz at half the speed
(benchmarks/results/data_library.txt).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from noloco_p2p.data.documents import Document, Fault, Piece, Row, Unavailable
from noloco_p2p.errors import DataError

if TYPE_CHECKING:
    from pyarrow import Table

ROWS_A_READ = 256
MAX_LINE_BYTES = 64 << 20  # a longer line is a fault, and is never read as a whole
TEXT_PIECE_CHARS = 64 * 1024  # a longer text file becomes several documents, cut at a blank line if there is one
TOKENS_FIELD = "input_ids"
MASK_FIELD = "attention_mask"
Read = Callable[[Path, int, str], Iterator[Row]]  # path, first row, text field
GONE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, gzip.BadGzipFile)


def file_piece(path: Path, text_field: str) -> Piece:
    """Return the piece for a file. Raises DataError if the kind of file is not supported."""
    packed = path.suffix == ".gz"
    read = KINDS.get((path.with_suffix("").suffix if packed else path.suffix).lower())
    if read is None or (packed and read is _parquet_rows):
        raise DataError(f"{path}: unsupported file type; use .txt, .json or .jsonl (each also with .gz), or .parquet")
    return Piece(path.name, lambda start: _guarded(path, read, start, text_field))


def _guarded(path: Path, read: Read, start: int, text_field: str) -> Iterator[Row]:
    """Yield the rows of a file. If the rest of the file cannot be read, the last row yielded is a fault."""
    number = start
    try:
        for row in read(path, start, text_field):
            number += 1
            yield row
    except (EOFError, zlib.error, ValueError, NotImplementedError, RecursionError, *GONE) as error:
        line = number + 1 if number > start and read is not _text_rows else None
        yield Fault(str(path), line, f"cannot be read: {first_line(error)}", rest=True)
    except OSError as error:
        raise Unavailable(f"{path}: {first_line(error)}") from None


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # pyright: ignore[reportReturnType]


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a file, with None in place of a line that is longer than the limit."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield None


# text


def _text_rows(path: Path, start: int, text_field: str) -> Iterator[Row]:
    return islice(_text_documents(path), start, None)


def _text_documents(path: Path) -> Iterator[Row]:
    """Yield documents of about 64 Ki characters each. A damaged line is left out of its document."""
    lines: list[str] = []
    num_chars = 0
    with _opened(path) as file:
        for number, line in enumerate(_lines(file), start=1):
            try:
                if line is None:
                    raise ValueError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                text = line.decode()
            except ValueError as error:
                yield Fault(str(path), number, f"not UTF-8 text: {first_line(error)}")
                continue
            for start in range(0, len(text), TEXT_PIECE_CHARS):
                part = text[start : start + TEXT_PIECE_CHARS]
                lines.append(part)
                num_chars += len(part)
                if num_chars >= (TEXT_PIECE_CHARS if part.strip() else TEXT_PIECE_CHARS // 2):
                    yield Document("".join(lines), origin=str(path), line=number)
                    lines, num_chars = [], 0
    if lines:
        yield Document("".join(lines), origin=str(path))


# JSON lines


def _json_rows(path: Path, start: int, text_field: str) -> Iterator[Row]:
    with _opened(path) as file:
        is_array = file.read(64).lstrip()[:1] == b"["
        file.seek(0)
        if is_array:  # one JSON array, read as a whole
            for number, item in enumerate(json.load(file), start=1):
                if number > start:
                    yield _document(item, str(path), number, text_field)
            return
        for number, line in enumerate(_lines(file), start=1):
            if number > start:
                yield _json_row(line, str(path), number, text_field)


def _json_row(line: bytes | None, file: str, number: int, text_field: str) -> Row:
    if line is None:
        return Fault(file, number, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    if not line.strip():
        return None
    try:
        item = json.loads(line)
    except ValueError as error:
        return Fault(file, number, f"not JSON: {first_line(error)}")
    except RecursionError:
        return Fault(file, number, "not JSON: nested too deeply")
    return _document(item, file, number, text_field)


def _document(item: Any, file: str, number: int, text_field: str) -> Row:
    if not isinstance(item, dict):
        return Fault(file, number, f"expected a JSON object, got {type(item).__name__}")
    if text_field in item:
        return _text_document(item[text_field], file, number, text_field)
    if TOKENS_FIELD in item:
        return _ids_document(item[TOKENS_FIELD], item.get(MASK_FIELD), file, number)
    return Fault(file, number, _no_field(text_field, list(item)))


def _text_document(text: Any, file: str, number: int, text_field: str) -> Row:
    if text is None or text == "":
        return None
    if not isinstance(text, str):
        return Fault(
            file, number, f"field {text_field!r} (data.text_field) has type {type(text).__name__} instead of str"
        )
    return Document(text, origin=file, line=number)


def _ids_document(ids: Any, mask: Any, file: str, number: int) -> Row:
    """Return a document from token ids, without the positions that the attention mask marks as padding."""
    if ids is None:
        return None
    ids = _integers(ids)
    if ids is None:
        return Fault(file, number, f"field {TOKENS_FIELD!r} is not a list of integers")
    if mask is not None:
        mask = _integers(mask, kinds="iub")
        if mask is None:
            return Fault(file, number, f"field {MASK_FIELD!r} is not a list of zeros and ones")
        if len(mask) != len(ids):
            return Fault(file, number, f"{MASK_FIELD} has {len(mask)} entries, but {TOKENS_FIELD} has {len(ids)}")
        ids = ids[mask != 0]
    return Document(ids, origin=file, line=number) if len(ids) else None


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


# tables


def _parquet_rows(path: Path, start: int, text_field: str) -> Iterator[Row]:
    """Yield the rows of all row groups in order.

    A damaged group is reported as a fault, and reading continues with the next group.
    """
    import pyarrow.parquet as pq

    if not path.stat().st_size:
        return
    with pq.ParquetFile(path) as file:
        columns = [name for name in (text_field, TOKENS_FIELD, MASK_FIELD) if name in file.schema_arrow.names]
        if not columns:
            yield Fault(str(path), None, _no_field(text_field, file.schema_arrow.names), rest=True)
            return
        first = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if start < first + num_rows:
                batches = file.iter_batches(batch_size=ROWS_A_READ, row_groups=[group], columns=columns)
                rows = _group_rows(batches, str(path), first, num_rows, text_field)
                yield from islice(rows, max(0, start - first), None)
            first += num_rows


def _group_rows(batches: Iterator[Any], path: str, first: int, num_rows: int, text_field: str) -> Iterator[Row]:
    """Yield the `num_rows` rows of one group. `first` is the number of its first row in the file, counted from 0."""
    number = 0
    try:
        for table in batches:
            for row in table_rows(table, path, first + number, text_field):
                number += 1
                yield row
    except GONE:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow also raises OSError for damaged pages
        reason = f"rows {first + number + 1} to {first + num_rows} cannot be read: {first_line(error)}"
        yield Fault(path, first + number + 1, reason)
        yield from [None] * (num_rows - number - 1)  # so that rows keep their numbers in the file


def table_rows(table: Table, origin: str, first: int, text_field: str) -> Iterator[Row]:
    """Yield one item per row. `first` is the number of the first row, counted from 0."""
    names = table.schema.names
    if text_field in names:
        for number, scalar in enumerate(table.column(text_field), start=first + 1):
            try:
                yield _text_document(scalar.as_py(), origin, number, text_field)
            except ValueError as error:
                yield Fault(origin, number, f"field {text_field!r} is not UTF-8: {first_line(error)}")
    elif TOKENS_FIELD in names:
        masks = table.column(MASK_FIELD) if MASK_FIELD in names else None
        for row, scalar in enumerate(table.column(TOKENS_FIELD)):
            mask = None if masks is None else _numbers(masks[row])
            yield _ids_document(_numbers(scalar), mask, origin, first + row + 1)
    else:
        yield Fault(origin, None, _no_field(text_field, names), rest=True)


def _numbers(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    values = getattr(scalar, "values", None)
    return scalar.as_py() if values is None else values.to_numpy(zero_copy_only=False)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


KINDS: dict[str, Read] = {
    **dict.fromkeys((".txt", ".text"), _text_rows),
    **dict.fromkeys((".json", ".jsonl"), _json_rows),
    ".parquet": _parquet_rows,
}
