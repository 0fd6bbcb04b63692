"""Check the data of a run on this machine: files, samples, speed, and faults."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from noloco_p2p.data.documents import Document, Fault, Faults, Unavailable
from noloco_p2p.data.reader import Source
from noloco_p2p.data.samples import FIRST, UNLEARNED, num_targets, runs
from noloco_p2p.data.sources import open_source
from noloco_p2p.data.stream import Corpus, TokenStream, end_of_text, validation_batches
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
    marked: list[tuple[bool, str]] = field(default_factory=list)  # a chat in parts, and whether the loss counts each
    tokens_per_s: float = 0.0
    num_tokens: int = 0
    num_learned: int = 0  # tokens that count in the loss
    num_truncated: int = 0  # samples longer than a sequence
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
        report.num_learned += num_targets(batch)
        if corpus.data.packs_samples:
            report.marked = report.marked or _first_sample(batch[0].numpy(), corpus)
        else:
            report.samples.extend(str(corpus.tokenizer.decode(row)) for row in batch[: SAMPLES - len(report.samples)])
    report.tokens_per_s = report.num_tokens / (time.monotonic() - began_s)
    held_out = validation_batches(corpus, num_sequences=num_sequences, batch_size=8)
    report.num_held_out, report.num_faults = sum(map(len, held_out)), faults.count
    report.num_truncated = faults.num_truncated
    return report


def _first_sample(row: np.ndarray, corpus: Corpus) -> list[tuple[bool, str]]:
    """Return the parts of the first sample of a sequence."""
    is_padding = row == end_of_text(corpus.data, corpus.tokenizer) | UNLEARNED
    end = min([*np.flatnonzero(row & FIRST)[1:], np.flatnonzero(~is_padding)[-1] + 1])
    return [(is_learned, str(corpus.tokenizer.decode(ids))) for is_learned, ids in runs(row[:end])]


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
