"""Turn documents into packed batches of token ids, in an order that is unique to each peer.

Tokens are processed in blocks. The documents of a block are concatenated in the peer's order, each with an end-of-text
token, and cut into sequences. The remaining tokens go to the next block, so no token is lost. The sequences of a block
are shuffled, so that a batch mixes many documents. A mixture takes its next documents from the source that is furthest
behind its share of the tokens.

A restart continues in exactly the same order. The saved state consists of the rest of the block (at most half a million
tokens) and the start of the next block. A restart therefore reads nothing twice, and does not depend on which files
have failed in the meantime. `datasets` cannot do this. Its `interleave_datasets` counts documents instead of tokens.
The state of its `shuffle` does not include the buffer, so a restart continues with other documents
(benchmarks/results/data_library.txt).
"""

from __future__ import annotations

import base64
import logging
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from noloco_p2p.data.documents import Faults, is_held_out
from noloco_p2p.data.feed import Encode, Feed, make_encoder
from noloco_p2p.data.reader import permutation
from noloco_p2p.data.sources import has_own_validation, open_source, open_validation
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec, SourceSpec
from noloco_p2p.telemetry.progress import Progress, Report, ignore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BLOCK_TOKENS = 1 << 19  # 2 MB at most; about 30 files of the built-in corpus
VALIDATION_POOL = 16  # sequences read for each evaluated one, so that they do not all come from one document
STATE_VERSION = 3


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a stream."""

    feeds: list[dict[str, Any]]  # the start of the next block in each source
    carry: np.ndarray  # tokens for the next block
    block: int  # the number of the next block
    rest: np.ndarray  # the sequences of this block that were not returned yet, (num, sequence_length), int32

    def as_dict(self) -> dict[str, Any]:
        """Return the position as JSON values. For a whole block, this takes about 40 ms and returns 0.6 to 1.1 MB."""
        packed = base64.b64encode(zlib.compress(self.rest.astype("<i4").tobytes(), level=1)).decode()
        carry = self.carry.tolist()
        return {"version": STATE_VERSION, "feeds": self.feeds, "carry": carry, "block": self.block, "rest": packed}


class TokenStream:
    """An endless iterator over one peer's batches: LongTensors of shape (batch_size, sequence_length) on the CPU.

    Raises DataError if a source cannot be opened, at the start or later. The message names the flag or the file.
    Unusable rows of a file are skipped and reported to `faults`. If `stop` is set while the stream waits for the
    network, reading raises DataError.
    """

    def __init__(
        self,
        data: DataSpec,
        *,
        tokenizer: PreTrainedTokenizerBase,
        bindings: Mapping[str, str],
        peer_id: str,
        batch_size: int,
        progress: Progress | None = None,
        faults: Faults | None = None,
        stop: threading.Event | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.batch_size = batch_size
        self.sequence_length = data.sequence_length
        self.block_tokens = block_tokens
        self.faults = faults or Faults()
        self.stop = stop or threading.Event()
        self._data = data
        self._progress = progress or Progress()
        self._peer_id = peer_id
        encode = make_encoder(data, tokenizer, self.faults)
        self._shares = [share for _, share in data.parts()]
        self._feeds = [self._feed(part, bindings, encode, index) for index, (part, _) in enumerate(data.parts())]
        self._block = 0
        self._carry = np.zeros(0, np.int32)
        self._rest = np.zeros((0, data.sequence_length), np.int32)

    @property
    def epoch(self) -> int:
        """The highest epoch that any of the sources has reached."""
        return max(feed.epoch for feed in self._feeds)

    @property
    def position(self) -> Position:
        """The current position.

        It is packed only when it is saved, because every batch that is read ahead has a position, but few positions are
        saved.
        """
        return Position([feed.state_dict() for feed in self._feeds], self._carry, self._block, self._rest)

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Tensor:
        rows: list[np.ndarray] = []
        missing = self.batch_size
        while missing:
            if not len(self._rest):
                self._rest = self._make_block()
            rows.append(self._rest[:missing])
            self._rest = self._rest[missing:]
            missing -= len(rows[-1])
        return torch.from_numpy(np.concatenate(rows).astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values.

        A stream that loads them, even in another process, continues with the same batches as this one.
        """
        return self.position.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in `state`. Raises DataError if `state` belongs to another mixture.

        If files were added or removed since the state was saved, their order has changed. In that case, a new epoch
        begins after the current block, with a warning.
        """
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise DataError(f"the data position in the checkpoint cannot be read ({error!r})") from None

    def _load(self, state: Mapping[str, Any]) -> None:
        version, feeds = state["version"], state["feeds"]
        if version != STATE_VERSION or len(feeds) != len(self._feeds):
            raise ValueError(f"version {version}, {len(feeds)} sources")
        tokens = zlib.decompress(base64.b64decode(state["rest"]))
        self._rest = np.frombuffer(tokens, "<i4").reshape(-1, self.sequence_length)
        self._carry, self._block = np.asarray(state["carry"], np.int32), int(state["block"])
        for feed, own in zip(self._feeds, feeds, strict=True):
            feed.load_state_dict(own)

    def _feed(self, part: SourceSpec, bindings: Mapping[str, str], encode: Encode, index: int) -> Feed:
        return Feed(
            part,
            open_source(part, bindings),
            peer_id=f"{self._peer_id}/{index}" if self._data.mix else self._peer_id,
            encode=encode,
            holdout=0.0 if has_own_validation(part) else self._data.holdout,
            faults=self.faults,
            stop=self.stop,
        )

    def _make_block(self) -> np.ndarray:
        """Return the next block in shuffled order, with the shape (number of sequences, sequence_length)."""
        order = f"{self._peer_id}/{self._feeds[0].epoch}/{self._block}"
        with self._progress.task("reading data", unit="tokens") as report:
            sequences, self._carry = cut(self._read_tokens(report), self.sequence_length)
        self._block += 1
        return sequences[permutation(order, len(sequences))]

    def _read_tokens(self, report: Report = ignore) -> list[np.ndarray]:
        """Read documents until the block is full.

        If there is a single source, the block also ends with the epoch, unless it is still shorter than one sequence.
        """
        arrays, num_tokens = [self._carry], len(self._carry)
        while num_tokens < self.block_tokens:
            read = self._hungriest().read()
            arrays += read
            num_tokens += sum(map(len, read))
            report(min(num_tokens, self.block_tokens), self.block_tokens)
            if not read and len(self._feeds) == 1 and num_tokens >= self.sequence_length:
                break
        return arrays

    def _hungriest(self) -> Feed:
        total = sum(feed.taken_tokens for feed in self._feeds)
        behind = [share * total - feed.taken_tokens for share, feed in zip(self._shares, self._feeds, strict=True)]
        return self._feeds[behind.index(max(behind))]


def validation_batches(
    data: DataSpec,
    *,
    tokenizer: PreTrainedTokenizerBase,
    bindings: Mapping[str, str],
    num_sequences: int,
    batch_size: int,
    progress: Progress | None = None,
    faults: Faults | None = None,
) -> list[Tensor]:
    """Return batches of held-out sequences, each of shape (batch_size or fewer, sequence_length).

    Peers with the same data get the same sequences. They are spread evenly over a pool that is 16 times as large, in
    the plain order of the source. Each source of a mixture contributes its share. If there are fewer than
    `num_sequences`, all of them are returned, with a warning. Raises DataError if there are none.
    """
    faults = faults or Faults()
    encode = make_encoder(data, tokenizer, faults)
    chosen: list[np.ndarray] = []
    with (progress or Progress()).task("reading held-out data", unit="tokens") as report:
        share_so_far, num_asked = 0.0, 0
        for part, share in data.parts():
            share_so_far += share
            # the rounding error goes to the next source
            wanted = max(1, round(share_so_far * num_sequences) - num_asked)
            num_asked += wanted
            pool = _validation_pool(data, part, bindings, encode, wanted, report, faults)
            chosen.append(pool[np.linspace(0, len(pool) - 1, min(wanted, len(pool))).round().astype(int)])
    sequences = np.concatenate(chosen)[:num_sequences]
    if len(sequences) < num_sequences:
        log.warning(
            "validation uses only %d sequences, because fewer than evaluate.num_sequences = %d are available",
            len(sequences),
            num_sequences,
        )
    return list(torch.from_numpy(sequences.astype(np.int64)).split(batch_size))


def _validation_pool(
    data: DataSpec,
    part: SourceSpec,
    bindings: Mapping[str, str],
    encode: Encode,
    num_sequences: int,
    report: Report,
    faults: Faults,
) -> np.ndarray:
    source, all_held_out = open_validation(part, bindings)
    wanted_tokens = VALIDATION_POOL * num_sequences * data.sequence_length
    arrays: list[np.ndarray] = []
    num_tokens = 0
    for document in source.read(faults=faults):
        if all_held_out or is_held_out(document, data.holdout):
            encoded = encode([document])
            arrays += encoded
            num_tokens += sum(map(len, encoded))
            report(min(num_tokens, wanted_tokens), wanted_tokens)
        if num_tokens >= wanted_tokens:
            break
    if num_tokens < data.sequence_length:
        why = f" (lines and files skipped: {faults.count}; most recent reason: {faults.last})" if faults.last else ""
        raise DataError(
            f"data source {part.source!r} has only {num_tokens} held-out tokens, but one sequence needs "
            f"{data.sequence_length}; increase data.holdout, or use --data {part.source}.validation=GLOB{why}"
        )
    return cut(arrays, data.sequence_length)[0]


def cut(arrays: list[np.ndarray], sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens into sequences of `sequence_length`. Return the sequences and the tokens that are left over."""
    tokens = np.concatenate(arrays)
    num_used = len(tokens) // sequence_length * sequence_length
    return tokens[:num_used].reshape(-1, sequence_length), tokens[num_used:].copy()
