"""Documents -> token ids -> packed batches, in an order of each peer's own that a restart continues exactly.

Tokens are taken in blocks: documents in the peer's order, joined by the end-of-text token and cut into sequences; the
rest of a cut goes to the next block, so no token is lost. The sequences of a block are shuffled, so that a batch holds
many documents. A block can be made again from where it began: that place, the rest of the block before it, and the
number of sequences already given out are the whole state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec
from noloco_p2p.telemetry.progress import Progress, Report, ignore
from noloco_p2p.train.corpus import Document, Reader, is_held_out, permutation
from noloco_p2p.train.sources import has_own_validation, open_source, open_validation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BLOCK_TOKENS = 1 << 19  # 2 MB at most; about 30 files of the built-in corpus
VALIDATION_POOL = 16  # sequences read for each one evaluated: they should not all come from one document
BYTE_OFFSET = 3  # ByT5: 0 pad, 1 end of text, 2 unknown, then the 256 bytes
STATE_VERSION = 1

Encode = Callable[[Document], np.ndarray]


class TokenStream:
    """Endless batches for one peer: LongTensor (batch_size, sequence_length), on the CPU.

    Raises DataError when the source cannot be opened, at the start or later; the message names flag or file.
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
    ) -> None:
        self._data = data
        self._progress = progress or Progress()
        self._peer_id = peer_id
        self._batch_size = batch_size
        self._encode = make_encoder(data, tokenizer)
        self._source = open_source(data, bindings)
        self._filter_held_out = not has_own_validation(data)
        self._start: dict[str, Any] = {"epoch": 0, "place": None, "carry": [], "block": 0}
        self._epoch, self._block = 0, 0
        self._carry = np.zeros(0, np.int32)
        self._reader: Reader | None = None
        self._documents: Iterator[Document] = iter(())
        self._sequences: np.ndarray | None = None  # (number of sequences in the block, sequence_length)
        self._position = 0

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        rows: list[np.ndarray] = []
        missing = self._batch_size
        while missing:
            if self._sequences is None:
                self._sequences = self._make_block()
            taken = self._sequences[self._position : self._position + missing]
            self._position += len(taken)
            missing -= len(taken)
            rows.append(taken)
            if missing:
                self._sequences, self._position = None, 0
        return torch.from_numpy(np.concatenate(rows).astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. The batches after `load_state_dict` in another process equal those after this call."""
        fingerprint = self._source.fingerprint()
        return {**self._start, "position": self._position, "source": fingerprint, "version": STATE_VERSION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when it is no state of a TokenStream.

        When files came or went since, their old order is gone: the peer starts a new epoch and a warning says so.
        """
        try:
            if state["version"] != STATE_VERSION:
                raise ValueError(f"version {state['version']}")
            epoch, block, position = int(state["epoch"]), int(state["block"]), int(state["position"])
            place = None if state["place"] is None else (*map(int, state["place"]),)
            carry, source = np.asarray(state["carry"], np.int32), state["source"]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the data position in the checkpoint cannot be read ({error!r})") from None
        if source != self._source.fingerprint():
            log.warning("the files of %s are not those of before: data epoch %d starts", self._data.source, epoch + 1)
            epoch, place, position = epoch + 1, None, 0
        self._epoch, self._block, self._position, self._carry = epoch, block, position, carry
        self._open_reader(place)
        self._start = {"epoch": epoch, "place": place, "carry": carry.tolist(), "block": block}
        self._sequences = None

    def _make_block(self) -> np.ndarray:
        """The next block; remembers where it began."""
        if self._reader is None:
            self._open_reader(None)
        assert self._reader is not None
        place = self._reader.place
        self._start = {"epoch": self._epoch, "place": place, "carry": self._carry.tolist(), "block": self._block}
        order = f"{self._peer_id}/{self._epoch}/{self._block}"
        with self._progress.task("reading data", unit="tokens") as report:
            sequences, self._carry = cut(self._read_tokens(report), self._data.sequence_length)
        self._block += 1
        return sequences[permutation(order, len(sequences))]

    def _read_tokens(self, report: Report = ignore) -> list[np.ndarray]:
        """Documents until the block is full or the epoch ends, but for one sequence at least."""
        arrays, num_tokens = [self._carry], len(self._carry)
        num_before_epoch = -1  # -1: the epoch began in an earlier block, it may have nothing left
        while num_tokens < BLOCK_TOKENS:
            document = next(self._documents, None)
            if document is not None:
                if self._filter_held_out and is_held_out(document, self._data.holdout):
                    continue
                arrays.append(self._encode(document))
                num_tokens += len(arrays[-1])
                report(min(num_tokens, BLOCK_TOKENS), BLOCK_TOKENS)
                continue
            if num_tokens == num_before_epoch:
                raise DataError(f"data source {self._data.source!r} holds no document to train on")
            num_before_epoch = num_tokens
            self._epoch += 1
            self._open_reader(None)
            if num_tokens >= self._data.sequence_length:
                break
        return arrays

    def _open_reader(self, place: Any) -> None:
        self._reader = self._source.read(order=f"{self._peer_id}/{self._epoch}", place=place)
        self._documents = iter(self._reader)


def validation_batches(
    data: DataSpec,
    *,
    tokenizer: PreTrainedTokenizerBase,
    bindings: Mapping[str, str],
    num_sequences: int,
    batch_size: int,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Held-out sequences, (batch_size or fewer, sequence_length) each: the same ones for every peer with the same data.

    They are spread evenly over 16 times as many, in the plain order of the source. Fewer than `num_sequences` come
    back, with a warning, when there are not more. Raises DataError when there is none.
    """
    encode = make_encoder(data, tokenizer)
    source, all_held_out = open_validation(data, bindings)
    wanted_tokens = VALIDATION_POOL * num_sequences * data.sequence_length
    arrays: list[np.ndarray] = []
    num_tokens = 0
    with (progress or Progress()).task("reading held-out data", unit="tokens") as report:
        for document in source.read():
            if all_held_out or is_held_out(document, data.holdout):
                arrays.append(encode(document))
                num_tokens += len(arrays[-1])
                report(min(num_tokens, wanted_tokens), wanted_tokens)
            if num_tokens >= wanted_tokens:
                break
    if num_tokens < data.sequence_length:
        raise DataError(
            f"only {num_tokens} held-out tokens in data source {data.source!r}, and one sequence needs "
            f"{data.sequence_length}: raise data.holdout, or give --data {data.source}.validation=GLOB"
        )
    pool, _ = cut(arrays, data.sequence_length)
    if len(pool) < num_sequences:
        log.warning("validation uses %d sequences: evaluate.num_sequences = %d are not there", len(pool), num_sequences)
    chosen = pool[np.linspace(0, len(pool) - 1, min(num_sequences, len(pool))).round().astype(int)]
    return list(torch.from_numpy(chosen.astype(np.int64)).split(batch_size))


def cut(arrays: list[np.ndarray], sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequences of `sequence_length`, the tokens that are left over)."""
    tokens = np.concatenate(arrays)
    num_used = len(tokens) // sequence_length * sequence_length
    return tokens[:num_used].reshape(-1, sequence_length), tokens[num_used:].copy()


def make_encoder(data: DataSpec, tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from a document to its token ids (int32) with the end-of-text token behind them.

    Bytes are added up directly: the tokenizer's own path runs in Python, a letter at a time, and it would read a
    "</s>" in a text as the end of the text.
    """
    end, num_ids = tokenizer.eos_token_id, len(tokenizer)
    if not isinstance(end, int):
        raise DataError(f"tokenizer {data.tokenizer!r} has no end-of-text token; choose another one (data.tokenizer)")

    def encode(document: Document) -> np.ndarray:
        if isinstance(document.content, str):
            ids = _encode_bytes(document.content) if data.tokenizer == "bytes" else _encode_text(document.content)
        else:
            ids = document.content
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
                raise DataError(
                    f"{document.origin}: token ids from {ids.min()} to {ids.max()} do not fit the {num_ids} of "
                    f"tokenizer {data.tokenizer!r} (data.tokenizer)"
                )
        ended = len(ids) > 0 and ids[-1] == end
        return np.append(ids, [] if ended else [end]).astype(np.int32)

    def _encode_text(text: str) -> np.ndarray:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, np.int32)

    return encode


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32) + BYTE_OFFSET
