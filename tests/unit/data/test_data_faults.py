"""Faulty data is named, counted and skipped without further loss; the reader waits while the network fails."""

from __future__ import annotations

import errno
import gzip
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from noloco_p2p.data import files
from noloco_p2p.data.documents import Document, Fault, Faults, Piece, Row, Unavailable
from noloco_p2p.data.reader import MAX_FAILURES, Place, Reader, Source
from noloco_p2p.data.sources import open_source
from noloco_p2p.data.stream import Corpus, TokenStream
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec, SourceSpec

MINE = DataSpec(source="mine", sequence_length=16, holdout=0.2)


class Instant(threading.Event):
    """An Event whose waits return at once and are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return self.is_set()


def read_all(path: Path) -> tuple[list[str], list[Fault]]:
    """Return the texts and the faults of one file."""
    found: list[Fault] = []
    source = open_source(MINE, {"mine": str(path)})
    texts = [str(document.content) for document in Reader(source, faults=Faults(found.append)).epoch()]
    return texts, found


# files


def write_truncated_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"text": "good"}\n' * 200) + gzip.compress(b'{"text": "cut"}\n')[:-12])


def write_damaged_group(path: Path) -> None:
    """Write three row groups of ten rows, and damage the second."""
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(30)]}), path, row_group_size=10, compression="zstd")
    place = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = place.dictionary_page_offset or place.data_page_offset
    content[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
    path.write_bytes(content)


def write_damaged_footer(path: Path) -> None:
    """Write a file whose footer pyarrow reports with an OSError, as it reports a disk that fails."""
    write_table(text=["a"] * 10)(path)
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[-8:-4], "little")
    content[-8 - size : -8] = bytes(255 for _ in range(size))
    path.write_bytes(content)


def write_lines(*lines: str | bytes) -> Callable[[Path], object]:
    encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
    return lambda path: path.write_bytes(b"".join(line + b"\n" for line in encoded))


def write_table(**columns: list[Any]) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pa.table(columns), path)


GOOD = '{"text": "good"}'
NO_FIELD = "the fields (body) include neither 'text' nor 'input_ids'"
CASES: list[tuple[str, Callable[[Path], object], int, list[str]]] = [
    ("bad.jsonl", write_lines(GOOD, '{"text": oops', GOOD), 2, ["line 2: not JSON: Expecting value"]),
    ("bytes.jsonl", write_lines(GOOD, b'{"text": "\xff"}', GOOD), 2, ["line 2: not JSON: 'utf-8' codec"]),
    ("list.jsonl", write_lines(GOOD, "", "5"), 1, ["line 3: expected a JSON object, got int"]),
    ("field.jsonl", write_lines('{"body": "a"}', GOOD), 1, [f"line 1: {NO_FIELD}"]),
    (
        "number.jsonl",
        write_lines('{"text": 5}', GOOD),
        1,
        ["field 'text' (data.text_field) has type int instead of str"],
    ),
    (
        "ids.jsonl",
        write_lines(*(f'{{"input_ids": {ids}}}' for ids in ("5", "[[1], [2, 3]]", '{"a": 1}', '["a"]')), GOOD),
        1,
        [f"line {number}: field 'input_ids' is not a list of integers" for number in (1, 2, 3, 4)],
    ),
    (
        "mask.jsonl",
        write_lines(*(f'{{"input_ids": [5, 6], "attention_mask": {mask}}}' for mask in ("1", "[1]", "[1, 1]"))),
        1,
        ["line 1: field 'attention_mask' is not a list", "line 2: attention_mask has 1 entries, but input_ids has 2"],
    ),
    ("deep.json", lambda path: path.write_text("[" * 100_000), 0, ["cannot be read: maximum recursion depth"]),
    ("ids.parquet", write_table(input_ids=[5]), 0, ["line 1: field 'input_ids' is not a list of integers"]),
    ("bad.jsonl.gz", write_lines("no gzip"), 0, ["cannot be read: Not a gzipped file"]),
    ("cut.jsonl.gz", write_truncated_gzip, 200, ["cannot be read: Compressed file ended before the end-of-stream"]),
    (
        "wide.txt",
        lambda path: path.write_text("a\n", encoding="utf-16"),
        0,
        ["the file is UTF-16; convert it to UTF-8"],
    ),
    ("wide.jsonl", lambda path: path.write_text(GOOD, encoding="utf-16"), 0, ["the file is UTF-16; convert it"]),
    ("bad.txt", write_lines("first", b"\xff\xfe", "last"), 1, ["line 2: not UTF-8 text"]),
    ("bad.parquet", write_lines("no parquet at all"), 0, ["cannot be read: Parquet magic bytes"]),
    ("footer.parquet", write_damaged_footer, 0, ["cannot be read: Couldn't deserialize thrift"]),
    ("group.parquet", write_damaged_group, 20, ["line 11: rows 11 to 20 cannot be read"]),
    ("field.parquet", write_table(body=["a"]), 0, [f"{NO_FIELD}; data.text_field"]),
]


@pytest.mark.parametrize(("name", "write", "num_good", "messages"), CASES, ids=[case[0] for case in CASES])
def test_a_fault_has_file_line_and_reason_and_the_rest_is_read(
    tmp_path: Path, name: str, write: Callable[[Path], object], num_good: int, messages: list[str]
) -> None:
    write(tmp_path / name)
    texts, faults = read_all(tmp_path / name)
    assert len(texts) == num_good
    assert len(faults) == len(messages)
    for fault, message in zip(faults, messages, strict=True):
        assert str(fault).startswith(f"{tmp_path / name}")
        assert message in str(fault)


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(OSError(errno.ESTALE, "stale"), True), (OSError("a library's"), False), (KeyError("a parser's"), False)],
)
def test_an_unexpected_error_costs_one_file_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_kept: bool
) -> None:
    """An error of the system may pass, so the file is tried again. Others stay."""

    def fail(path: Path, part: SourceSpec) -> Any:
        raise error

    monkeypatch.setitem(files.KINDS, ".txt", fail)
    piece = files.file_piece(tmp_path / "a.txt", MINE)
    if is_kept:
        with pytest.raises(Unavailable, match="stale"):
            list(piece.rows(0))
    else:
        [fault] = piece.rows(0)
        assert isinstance(fault, Fault)
        assert fault.rest


def test_reading_a_damaged_group_from_any_row_gives_the_same_rows(tmp_path: Path) -> None:
    write_damaged_group(tmp_path / "a.parquet")
    (piece,) = open_source(MINE, {"mine": f"{tmp_path}/a.parquet"}).pieces
    rows = [row if isinstance(row, Document) else None for row in piece.rows(0)]
    assert len(rows) == 30
    for start in (0, 5, 10, 14, 20, 29):
        again = [row if isinstance(row, Document) else None for row in piece.rows(start)]
        assert again == rows[start:], start


def test_faults_are_told_at_the_first_and_then_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="noloco_p2p.data.documents")  # `noloco data check` raises the level
    faults = Faults()
    for number in range(1, 1201):
        faults.note(Fault("f.jsonl", number, "not JSON"))
    assert faults.count == 1200
    with_line = [record.message for record in caplog.records if "line" in record.message]
    assert len(with_line) == 5 + 3
    assert "10 lines of f.jsonl" in caplog.text
    assert "1000 lines of f.jsonl" in caplog.text


def make_stream(pattern: str, *, faults: Faults | None = None, **options: object) -> TokenStream:
    corpus = Corpus(MINE, ByT5Tokenizer(), {"mine": pattern}, faults=faults or Faults())
    return TokenStream(corpus, peer_id="a", batch_size=2)


def test_training_goes_on_beside_bad_files_and_counts_them_once(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(100)))
    (tmp_path / "half.jsonl").write_text('{"text": "x"}\noops\n' * 50)
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    faults = Faults()
    stream = make_stream(f"{tmp_path}/*", faults=faults)
    next(stream)
    assert faults.count == 51
    while stream.epoch == 0:
        next(stream)
    assert faults.count == 51


def test_a_source_of_nothing_but_faults_is_an_error_that_names_the_last(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n' * 3000)
    with pytest.raises(
        DataError,
        match=r"no document to train on; lines and files skipped: 10\d\d; most recent reason: .*a\.jsonl, line",
    ):
        next(make_stream(f"{tmp_path}/*"))


# a network


class Flaky:
    """A source with pieces of `num_rows` documents; `fails` maps (piece, row) to the number of failed reads there."""

    def __init__(self, num_pieces: int, num_rows: int, fails: dict[tuple[int, int], int]) -> None:
        self.fails = Counter(fails)
        self.source = Source([self._piece(index, num_rows) for index in range(num_pieces)], thin=False)

    def _piece(self, index: int, num_rows: int) -> Piece:
        def rows(start: int) -> Iterator[Row]:
            for row in range(start, num_rows):
                if self.fails[index, row] > 0:
                    self.fails[index, row] -= 1
                    raise Unavailable(f"piece {index}: reset by peer")
                yield Document(f"{index}/{row}", origin=str(index))

        return Piece(str(index), rows)


FAILS = st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 6)), st.integers(1, 3), max_size=12)


@settings(max_examples=50)
@given(num_pieces=st.integers(1, 6), fails=FAILS, stop_at=st.integers(0, 45))
def test_whatever_fails_for_a_while_is_read_once_and_a_restart_goes_on(
    num_pieces: int, fails: dict[tuple[int, int], int], stop_at: int
) -> None:
    flaky = Flaky(num_pieces, 7, fails)
    reader, resumed = (Reader(flaky.source, order="a", stop=Instant()) for _ in range(2))
    head = [document.content for _, document in zip(range(min(stop_at, num_pieces * 7)), reader.epoch(), strict=False)]
    resumed.place = Place.from_json(reader.place.as_json())
    rest = [document.content for document in resumed.epoch()]
    everything = {f"{index}/{row}" for index in range(num_pieces) for row in range(7)}
    assert Counter(head + rest) == Counter(everything)


def test_another_piece_is_read_meanwhile_at_once_and_back_off_begins_with_the_second_failure() -> None:
    stop = Instant()
    flaky = Flaky(3, 2, {(index, 0): 3 for index in range(3)})
    read = [d.content for d in Reader(flaky.source, stop=stop).epoch()]
    assert len(read) == 6
    assert stop.waits[0] == 0.0
    assert stop.waits[1:4] == [1.0, 2.0, 4.0]
    assert max(stop.waits) <= 60.0
    stop = Instant()
    one_bad = Flaky(3, 2, {(0, 1): 1})
    assert [d.content for d in Reader(one_bad.source, stop=stop).epoch()] == [
        "0/0",
        "1/0",
        "1/1",
        "0/1",
        "2/0",
        "2/1",
    ]
    assert stop.waits == [0.0]


def test_a_piece_that_always_fails_while_others_do_not_is_left_out_and_told() -> None:
    found: list[Fault] = []
    flaky = Flaky(30, 2, {(3, 1): 1000})
    read = [d.content for d in Reader(flaky.source, stop=Instant(), faults=Faults(found.append)).epoch()]
    assert len(read) == 59
    assert flaky.fails[3, 1] == 1000 - MAX_FAILURES - 1
    (fault,) = found
    assert fault.rest
    assert "3, line 2: reading failed 8 times, although other files could be read" in str(fault)


def test_a_network_that_never_comes_back_is_an_error_and_a_wait_ends_when_it_is_told_to() -> None:
    flaky = Flaky(3, 2, {(index, 0): 1 << 30 for index in range(3)})
    stop = Instant()
    with pytest.raises(DataError, match=r"no data could be read for 36\d\d s: piece"):
        list(Reader(flaky.source, stop=stop).epoch())
    assert 60 < len(stop.waits) < 80
    told = threading.Event()
    told.set()
    with pytest.raises(DataError, match="no data could be read for 0 s"):
        list(Reader(flaky.source, stop=told).epoch())
