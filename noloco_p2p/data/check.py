"""Check the data of a run on this machine: files, samples, speed, and faults."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import islice

from noloco_p2p.data.documents import Document, Fault, Faults, Unavailable
from noloco_p2p.data.reader import Source
from noloco_p2p.data.sources import open_source
from noloco_p2p.data.stream import Corpus, TokenStream, validation_batches
from noloco_p2p.spec import SourceSpec
from noloco_p2p.telemetry.progress import Progress

ROWS_OF_A_FILE = 200  # rows read from each file, unless all of them are requested
HUB_SHARDS = 3  # shards read from a hub data set, because each one is downloaded
SAMPLES = 3
READ_TOKENS = 1 << 20
READ_S = 20.0
KEPT_FAULTS = 1000


@dataclass(slots=True)
class SourceReport:
    name: str
    num_files: int
    num_looked_at: int
    num_rows: int = 0
    num_documents: int = 0


@dataclass(slots=True)
class DataReport:
    sources: list[SourceReport] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    num_held_out: int = 0
    num_faults: int = 0
    faults: list[Fault] = field(default_factory=list)  # the first ones


def check_data(corpus: Corpus, *, num_sequences: int, full: bool = False) -> DataReport:
    """Read the start of every file, pack some batches as a peer would, and read the held-out sequences.

    If `full` is true, all rows of all files are read. Otherwise, only a few shards of a hub data set are read. Raises
    DataError if the run could not train on this machine at all.
    """
    report = DataReport()
    faults = Faults(lambda fault: report.faults.extend([fault] if len(report.faults) < KEPT_FAULTS else []))
    corpus = replace(corpus, faults=faults)
    for part, _ in corpus.data.parts():
        source = open_source(part, corpus.bindings)
        report.sources.append(_look(part, source, faults, full=full, progress=corpus.progress))
    stream = TokenStream(corpus, peer_id="check", batch_size=1)
    began_s = time.monotonic()
    while report.num_tokens < READ_TOKENS and stream.epoch == 0 and time.monotonic() - began_s < READ_S:
        batch = next(stream)
        report.num_tokens += batch.numel()
        report.samples.extend(str(corpus.tokenizer.decode(row)) for row in batch[: SAMPLES - len(report.samples)])
    report.tokens_per_s = report.num_tokens / (time.monotonic() - began_s)
    held_out = validation_batches(corpus, num_sequences=num_sequences, batch_size=8)
    report.num_held_out, report.num_faults = sum(map(len, held_out)), faults.count
    return report


def _look(part: SourceSpec, source: Source, faults: Faults, *, full: bool, progress: Progress) -> SourceReport:
    pieces = source.pieces if full or not part.source.startswith("hub:") else source.pieces[:HUB_SHARDS]
    found = SourceReport(part.source, len(source.pieces), len(pieces))
    with progress.task(f"inspecting {part.source}", unit="files") as tell:
        for number, piece in enumerate(pieces):
            tell(number, len(pieces))
            try:
                for row in islice(piece.rows(0), None if full else ROWS_OF_A_FILE):
                    found.num_rows += 1
                    found.num_documents += isinstance(row, Document)
                    if isinstance(row, Fault):
                        faults.note(row)
            except Unavailable as error:
                faults.note(Fault(piece.name, None, f"cannot be read at the moment: {error}"))
    return found
