"""Measure how peers read data: packing waste, repeats across a swarm without coordination, and tokens per second.

    python benchmarks/data_feed.py [--quick] [--json FILE]

A document that another peer of the swarm has read before is a repeat. The figure is the share of repeats among all
documents read, averaged over several swarms. In the baseline, each peer draws documents at random, independently of the
others, but never the same one twice. A swarm with a coordinator would have no repeats in an epoch.
"""

from __future__ import annotations

import gzip
import json
import logging
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

import claims
import torch
from claims import Claim
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from noloco_p2p.data.documents import Document, Piece, Row
from noloco_p2p.data.prefetch import Prefetcher
from noloco_p2p.data.reader import Reader, Source
from noloco_p2p.data.sources import builtin_corpus
from noloco_p2p.data.stream import Corpus, TokenStream
from noloco_p2p.spec import DataSpec

NUM_PEERS = 16
NUM_SWARMS = 8  # peers read whole shards, so the repeats of one swarm vary much by chance
VOCABULARY = 8192
PAD, END = 0, 1


def measure(quick: bool) -> list[Claim]:
    logging.getLogger("noloco_p2p").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), num_documents=2_000 if quick else 20_000)
        return [*packing(files, num_blocks=3 if quick else 12), *repeats(quick), *speeds(files, quick)]


def write_files(folder: Path, *, num_documents: int) -> str:
    """Write documents in the format of C4, whose lengths vary widely (log-normal, about 350 words on average)."""
    rng = random.Random(7)
    words = [
        word for document in islice(Reader(builtin_corpus()).epoch(), 50) for word in str(document.content).split()
    ]
    for shard in range(8):
        with gzip.open(folder / f"c4-train.{shard:05d}-of-00008.json.gz", "wt", compresslevel=3) as file:
            for _ in range(num_documents // 8):
                start, length = rng.randrange(len(words)), int(rng.lognormvariate(5.4, 1.0)) + 1
                file.write(json.dumps({"text": " ".join(words[start : start + length])}) + "\n")
    return f"{folder}/*.json.gz"


def packing(files: str, *, num_blocks: int) -> list[Claim]:
    """Measure the share of tokens that are padding, or that are read from documents but reach no batch."""
    data = DataSpec(source="c4", sequence_length=1024)
    stream = TokenStream(Corpus(data, ByT5Tokenizer(), {"c4": files}), peer_id="a", batch_size=1)
    given = padding = blocks = lost = taken = 0
    while blocks < num_blocks:
        batch = next(stream)
        given += batch.numel()
        padding += int((batch == PAD).sum())
        at = stream.position
        if not len(at.rest):  # a whole block has been used up
            blocks, taken = blocks + 1, at.feeds[0]["taken_tokens"]
            lost = taken - len(at.carry) - given
    return [Claim("packing waste", 100 * (lost + padding) / taken, "%", "under 0.1 %", (lost + padding) / taken < 1e-3)]


def repeats(quick: bool) -> list[Claim]:
    found = []
    for name, num_files, num_rows, thin in (
        ("1,024 shards (hub)", 1024, 40 if quick else 200, False),
        ("4 files here", 4, 10_000 if quick else 50_000, True),
    ):
        for share in (0.1, 1.0):
            swarms = range(2 if quick else NUM_SWARMS)
            both = [repeats_of(num_files, num_rows, thin=thin, share=share, swarm=swarm) for swarm in swarms]
            measured, independent = fmean(one for one, _ in both), both[0][1]
            what = f"repeats, {NUM_PEERS} peers, {name}, {share:g} of the corpus read"
            target = f"at most independent draws' {100 * independent:.2f} % + 1"
            found.append(Claim(what, 100 * measured, "%", target, measured <= independent + 0.01))
    return found


def repeats_of(num_files: int, num_rows: int, *, thin: bool, share: float, swarm: int) -> tuple[float, float]:
    """Return the measured share of repeats, and the share expected from independent draws.

    `share` is the number of documents that are read by all peers in total, relative to the size of the corpus.
    """
    source = Source([_piece(str(index), num_rows) for index in range(num_files)], thin=thin)
    each = int(share * num_files * num_rows / NUM_PEERS)
    seen: set[str] = set()
    firsts = set()
    for peer in range(NUM_PEERS):
        read = [
            str(document.content) for document in islice(Reader(source, order=f"peer-{swarm}-{peer}").epoch(), each)
        ]
        firsts.add(tuple(read[:20]))
        seen.update(read)
    assert len(firsts) == NUM_PEERS, "two peers began alike"
    expected_unique = 1 - (1 - share / NUM_PEERS) ** NUM_PEERS
    return 1 - len(seen) / (each * NUM_PEERS), 1 - expected_unique / share


def _piece(name: str, num_rows: int) -> Piece:
    def rows(start: int) -> Iterator[Row]:
        return (Document(f"{name}/{row}", origin=name) for row in range(start, num_rows))

    return Piece(name, rows)


def speeds(files: str, quick: bool) -> list[Claim]:
    found = []
    for name, tokenizer in (("bytes", ByT5Tokenizer()), ("BPE", trained_tokenizer())):
        data = DataSpec(source="c4", sequence_length=1024, tokenizer=name)
        stream = TokenStream(Corpus(data, tokenizer, {"c4": files}), peer_id="a", batch_size=16)
        next(stream)
        began_s, num_tokens, seconds = time.monotonic(), 0, 2.0 if quick else 10.0
        while time.monotonic() - began_s < seconds:
            num_tokens += next(stream).numel()
        rate = num_tokens / (time.monotonic() - began_s)
        found.append(Claim(f"reads, tokenizes ({name}) and packs .json.gz", rate, "tokens/s"))
    data = DataSpec(source="c4", sequence_length=1024)
    stream = TokenStream(Corpus(data, ByT5Tokenizer(), {"c4": files}), peer_id="a", batch_size=4)
    ahead = Prefetcher(stream)
    next(ahead)
    before_s, began_s = ahead.waited_s, time.monotonic()
    for _ in range(150 if quick else 600):  # one inner step per 20 ms: 200,000 tokens per second
        time.sleep(0.02)
        next(ahead)
    waited = (ahead.waited_s - before_s) / (time.monotonic() - began_s)
    ahead.close()
    found.append(
        Claim("time that training at 200k tokens/s waits for the worker", 100 * waited, "%", "under 1 %", waited < 0.01)
    )
    return found


def trained_tokenizer(vocab_size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = (str(document.content) for document in islice(Reader(builtin_corpus()).epoch(), 200))
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<pad>", "</s>"], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", pad_token="<pad>")


if __name__ == "__main__":
    claims.run(measure, doc=__doc__)
