"""Compare noloco_p2p/data/ with `datasets`: damaged files, held-out documents, mixtures, restarts, speed and memory.

    python benchmarks/data_library.py [--quick] [--json FILE]

Figures come in pairs: the first is for this package, the second for the library. Where the library is as good, code of
this package can be removed.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import claims
import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from claims import Claim
from transformers import ByT5Tokenizer

from noloco_p2p.data.documents import Document, is_held_out
from noloco_p2p.data.reader import Reader
from noloco_p2p.data.sources import open_source
from noloco_p2p.data.stream import TokenStream
from noloco_p2p.spec import DataSpec, MixSpec

MINE = DataSpec(source="mine")
NUM_ROWS = 1000
HELD_OUT = 0.1


def measure(quick: bool) -> list[Claim]:
    logging.getLogger("noloco_p2p").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    parts: list[Callable[[Path], Iterator[Claim]]] = [faults, hold_out, mixture, restart]
    with tempfile.TemporaryDirectory() as name:
        found = [claim for part in parts for claim in part(_folder(name, part.__name__))]
        return [*found, *costs(_folder(name, "costs"), num_rows=20_000 if quick else 150_000)]


def faults(folder: Path) -> Iterator[Claim]:
    """Count the documents that are read from three files if the second one is damaged in the middle."""
    lines = [json.dumps({"text": f"document {number}"}) for number in range(NUM_ROWS)]
    half = NUM_ROWS // 2
    good, table = _text(lines), _parquet()
    for what, suffix, whole, damaged in (
        ("a line that is no JSON", ".jsonl", good, _text([*lines[:half], "{oops", *lines[half:]])),
        ("a line without the field", ".jsonl", good, _text([*lines[:half], '{"body": "x"}', *lines[half:]])),
        ("a .gz that breaks off", ".jsonl.gz", gzip.compress(good), gzip.compress(good)[:-1000]),
        ("a damaged group of rows", ".parquet", table, _damaged(table)),
    ):
        place = _folder(folder, what)
        for name, content in (("a", whole), ("b", damaged), ("c", whole)):
            (place / f"{name}{suffix}").write_bytes(content)
        kind, options = ("parquet", {"on_bad_files": "skip"}) if suffix == ".parquet" else ("json", {})
        ours, library = _count(_read(place)), _count(_library(kind, place, **options))
        yield from _pair(f"documents of 3 files of {NUM_ROWS}, one has {what}", ours, library, "documents")


def hold_out(folder: Path) -> Iterator[Claim]:
    """Measure the share of held-out documents that are also held out on a machine with one more document."""
    texts = [f"document {number}" for number in range(NUM_ROWS)]

    def ours(texts: list[str]) -> set[str]:
        return {text for text in texts if is_held_out(Document(text, origin=""), HELD_OUT)}

    def library(texts: list[str]) -> set[str]:
        split = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=HELD_OUT, seed=1)
        return set(split["test"]["text"])

    def share(held_out: Callable[[list[str]], set[str]]) -> float:
        return 100 * len(held_out(texts) & held_out(["one more", *texts])) / len(held_out(texts))

    yield from _pair("held out on a machine with one document more, too", share(ours), share(library), "%")


def mixture(folder: Path) -> Iterator[Claim]:
    """Measure the share of tokens from a source with half of the weight, whose documents are ten times as long."""
    for name, length in (("a", 1000), ("b", 100)):
        (folder / f"{name}.jsonl").write_bytes(_text(json.dumps({"text": name * length}) for _ in range(NUM_ROWS)))
    data = DataSpec(source="mix", mix=(MixSpec(source="a"), MixSpec(source="b")), sequence_length=64)
    bindings = {name: str(folder / f"{name}.jsonl") for name in "ab"}
    stream = TokenStream(data, tokenizer=ByT5Tokenizer(), bindings=bindings, peer_id="a", batch_size=1000)
    tokens = torch.cat(list(islice(stream, 32)))
    ours = float((tokens == ord("a") + 3).sum() / tokens.numel())
    sources = [_library("json", folder, pattern=f"{name}.jsonl") for name in "ab"]
    rows = islice(datasets.interleave_datasets(sources, probabilities=[0.5, 0.5], seed=1), NUM_ROWS)
    text = "".join(row["text"] for row in rows)
    yield from _pair("tokens of a source with a weight of 50 %", 100 * ours, 100 * text.count("a") / len(text), "%")


def restart(folder: Path) -> Iterator[Claim]:
    """Count how many of 100 documents in shuffled order are the same after a restart."""
    for number in range(4):
        lines = (json.dumps({"text": f"{number}/{row}"}) for row in range(NUM_ROWS))
        (folder / f"{number}.jsonl").write_bytes(_text(lines))
    reader = _reader(folder, order="a")
    documents = reader.epoch()
    list(islice(documents, 500))
    resumed = _reader(folder, order="a")
    resumed.place = reader.place
    ours = _equal((document.content for document in documents), (document.content for document in resumed.epoch()))

    def shuffled() -> datasets.IterableDataset:
        return _library("json", folder).shuffle(seed=1, buffer_size=100)

    stream, again = shuffled(), shuffled()
    rows = iter(stream)
    list(islice(rows, 500))
    again.load_state_dict(stream.state_dict())
    library = _equal((row["text"] for row in rows), (row["text"] for row in again))
    yield from _pair("documents after a restart that are those without it, of 100", ours, library, "documents")


def costs(folder: Path, *, num_rows: int) -> Iterator[Claim]:
    """Compare the costs of reading .json.gz row by row."""
    rng = random.Random(1)
    words = [f"word{number}" for number in range(5000)]
    lines = (json.dumps({"text": " ".join(rng.choices(words, k=120))}) for _ in range(num_rows))
    (folder / "a.json.gz").write_bytes(gzip.compress(_text(lines), compresslevel=3))
    yield from _pair("rows of .json.gz", _rate(_read(folder)), _rate(_library("json", folder)), "rows/s")
    ours = f"next(iter(Reader(open_source(DataSpec(source='mine'), {{'mine': {str(folder / '*')!r}}}))))"
    imports = "; ".join(
        (
            "from noloco_p2p.data.reader import Reader",
            "from noloco_p2p.data.sources import open_source",
            "from noloco_p2p.spec import DataSpec",
        )
    )
    library = f"next(iter(datasets.load_dataset('json', data_files={str(folder / '*')!r}, streaming=True)['train']))"
    memory = _memory_mib(imports, ours), _memory_mib("import datasets", library)
    yield from _pair("memory of a process that reads .json.gz", *memory, "MiB")


def _pair(what: str, ours: float, library: float, unit: str) -> Iterator[Claim]:
    yield Claim(what, ours, unit)
    yield Claim(f"  datasets {datasets.__version__}", library, unit)


def _reader(folder: Path, *, order: str = "") -> Reader:
    return Reader(open_source(MINE, {"mine": f"{folder}/*"}), order=order)


def _read(folder: Path) -> Iterator[Document]:
    return _reader(folder).epoch()


def _library(kind: str, folder: Path, *, pattern: str = "*", **options: Any) -> datasets.IterableDataset:
    files = sorted(str(path) for path in folder.glob(pattern))
    return datasets.load_dataset(kind, data_files=files, split="train", streaming=True, **options)


def _count(rows: Iterable[object]) -> int:
    """Return the number of rows read before an error."""
    number = 0
    try:
        for _ in rows:
            number += 1
    except Exception as error:  # noqa: BLE001 - errors of pyarrow, gzip and the library have no common base
        print(f"datasets: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    return number


def _equal(left: Iterable[object], right: Iterable[object]) -> int:
    return sum(one == two for one, two in islice(zip(left, right, strict=False), 100))


def _rate(rows: Iterable[object]) -> float:
    began_s = time.monotonic()
    return sum(1 for _ in rows) / (time.monotonic() - began_s)


def _memory_mib(imports: str, code: str) -> float:
    """Run the code in a process of its own, and return its peak resident memory."""
    measured = f"{imports}; {code}; print(*[line for line in open('/proc/self/status') if 'VmHWM' in line])"
    done = subprocess.run([sys.executable, "-c", measured], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[1]) / 1024


def _text(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _folder(parent: Path | str, name: str) -> Path:
    folder = Path(parent, name)
    folder.mkdir()
    return folder


def _parquet() -> bytes:
    """Return a Parquet file with ten row groups."""
    table = pa.table({"text": [f"document {number}" for number in range(NUM_ROWS)]})
    pq.write_table(table, file := io.BytesIO(), row_group_size=NUM_ROWS // 10, compression="zstd")
    return file.getvalue()


def _damaged(table: bytes) -> bytes:
    """Overwrite the sixth row group with zeros."""
    column = pq.ParquetFile(io.BytesIO(table)).metadata.row_group(5).column(0)
    start, size = column.dictionary_page_offset or column.data_page_offset, column.total_compressed_size
    return table[:start] + bytes(size) + table[start + size :]


if __name__ == "__main__":
    claims.run(measure, doc=__doc__)
