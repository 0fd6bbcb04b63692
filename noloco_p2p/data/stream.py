"""Turn documents into packed batches of token ids, in an order that is unique to each peer.

Tokens are processed in blocks. The documents of a block are concatenated in the peer's order, each with an end-of-text
token, and cut into sequences. The remaining tokens go to the next block, so no token is lost. The sequences of a block
are shuffled, so that a batch mixes many documents. A mixture takes its next documents from the source that is furthest
behind its share of the tokens.

If a source holds chats, a sequence holds whole samples instead (`samples.py`), and nothing is left for the next block.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from noloco_p2p.data.chats import Message, make_renderer
from noloco_p2p.data.documents import Document, Fault, Faults, is_held_out
from noloco_p2p.data.reader import Place, Reader, permutation
from noloco_p2p.data.samples import is_learned, mark, pack
from noloco_p2p.data.sources import has_own_validation, open_source, open_validation
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec
from noloco_p2p.telemetry.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BLOCK_TOKENS = 1 << 19  # 2 MB at most; about 30 files of the built-in corpus
SMALL_BLOCKS = 4  # at the start, each of them half as large as the next one
MAX_DOCUMENTS = 64  # documents encoded together
MAX_CHARS = 1 << 16
VALIDATION_POOL = 16  # sequences read for each evaluated one, so that they do not all come from one document
STATE_VERSION = 4
BYTE_OFFSET = 3  # ByT5: 0 pad, 1 end of text, 2 unknown, then the 256 bytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """The data of a run on this machine, which `bindings` names, its tokenizer, and where faults in it are reported."""

    data: DataSpec
    tokenizer: PreTrainedTokenizerBase
    bindings: Mapping[str, str]
    progress: Progress = field(default_factory=Progress)
    faults: Faults = field(default_factory=Faults)


@dataclass(slots=True)
class Feed:
    """A source of a stream."""

    name: str
    share: float  # of the tokens
    reader: Reader
    taken_tokens: int = 0
    has_documents: bool = False  # in this epoch of the source

    def state(self) -> dict[str, Any]:
        """Return the start of the next block, and from which pieces, as JSON values."""
        source = self.reader.source.fingerprint
        return {"place": self.reader.place.as_json(), "taken_tokens": self.taken_tokens, "source": source}


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
        corpus: Corpus,
        *,
        peer_id: str,
        batch_size: int,
        stop: threading.Event | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        data = corpus.data
        self.batch_size = batch_size
        self.sequence_length = data.sequence_length
        self.block_tokens = block_tokens
        self.faults = corpus.faults
        self.stop = stop or threading.Event()
        self._progress = corpus.progress
        self._peer_id = peer_id
        self._encode = make_encoder(data, corpus.tokenizer, self.faults)
        self._cut = make_cutter(data, corpus.tokenizer)
        self._feeds: list[Feed] = []
        for index, (part, share) in enumerate(data.parts()):
            reader = Reader(
                open_source(part, corpus.bindings),
                order=f"{peer_id}/{index}" if data.mix else peer_id,
                holdout=0.0 if has_own_validation(part) else data.holdout,
                faults=self.faults,
                stop=self.stop,
            )
            self._feeds.append(Feed(part.source, share, reader))
        self._block = 0
        self._carry = np.zeros(0, np.int32)
        self._rest = np.zeros((0, data.sequence_length), np.int32)

    @property
    def epoch(self) -> int:
        """The highest epoch that any of the sources has reached."""
        return max(feed.reader.place.epoch for feed in self._feeds)

    @property
    def position(self) -> Position:
        """The current position.

        It is packed only when it is saved, because every batch that is read ahead has a position, but few positions are
        saved.
        """
        return Position([feed.state() for feed in self._feeds], self._carry, self._block, self._rest)

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
            version, saved = state["version"], state["feeds"]
            if version != STATE_VERSION or len(saved) != len(self._feeds):
                raise ValueError(f"version {version}, {len(saved)} sources")
            tokens = zlib.decompress(base64.b64decode(state["rest"]))
            self._rest = np.frombuffer(tokens, "<i4").reshape(-1, self.sequence_length)
            self._carry, self._block = np.asarray(state["carry"], np.int32), int(state["block"])
            for feed, then in zip(self._feeds, saved, strict=True):
                feed.taken_tokens, place = int(then["taken_tokens"]), Place.from_json(then["place"])
                if then["source"] != feed.reader.source.fingerprint:
                    place = Place(place.epoch + (place != Place(place.epoch)))
                    log.warning(
                        "the files of data source %s have changed, so data epoch %d begins", feed.name, place.epoch
                    )
                feed.has_documents, feed.reader.place = place != Place(place.epoch), place
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise DataError(f"the data position in the checkpoint cannot be read ({error!r})") from None

    def _make_block(self) -> np.ndarray:
        """Return the next block in shuffled order, with the shape (number of sequences, sequence_length).

        If there is a single source, a block also ends with the epoch, unless it is still shorter than one sequence.
        The first blocks are smaller, because training waits for them.
        """
        enough = max(self.sequence_length, self.block_tokens >> max(0, SMALL_BLOCKS - self._block))
        order = f"{self._peer_id}/{self._feeds[0].reader.place.epoch}/{self._block}"
        arrays, num_tokens = [self._carry], len(self._carry)
        with self._progress.task("reading data", unit="tokens") as report:
            while num_tokens < enough:
                total = sum(feed.taken_tokens for feed in self._feeds)
                behind = [feed.share * total - feed.taken_tokens for feed in self._feeds]
                read, is_end = self._read_some(self._feeds[behind.index(max(behind))])
                arrays += read
                num_tokens += sum(map(len, read))
                report(min(num_tokens, enough), enough)
                if is_end and len(self._feeds) == 1 and num_tokens >= self.sequence_length:
                    break
        sequences, self._carry = self._cut(arrays)
        self._block += 1
        return sequences[permutation(order, len(sequences))]

    def _read_some(self, feed: Feed) -> tuple[list[np.ndarray], bool]:
        """Return the token ids of the next documents of a source, and whether they are the last of an epoch.

        Raises DataError if the epoch contained no document, or if no document could be read for a long time.
        """
        documents: list[Document] = []
        num_chars, is_end = 0, False
        while len(documents) < MAX_DOCUMENTS and num_chars < MAX_CHARS and not is_end:
            document = next(feed.reader)
            is_end = document is None
            if document:
                documents.append(document)
                num_chars += len(document.content)
        arrays = self._encode(documents)
        feed.taken_tokens += sum(map(len, arrays))
        if is_end and not (arrays or feed.has_documents):
            raise DataError(f"data source {feed.name!r} contains no document to train on{self.faults.summary()}")
        feed.has_documents = not is_end and (feed.has_documents or bool(arrays))
        return arrays, is_end


def validation_batches(corpus: Corpus, *, num_sequences: int, batch_size: int) -> list[Tensor]:
    """Return batches of held-out sequences, each of shape (batch_size or fewer, sequence_length).

    Peers with the same data get the same sequences. They are spread evenly over a pool that is 16 times as large, in
    the plain order of the source. Each source of a mixture contributes its share. If there are fewer than
    `num_sequences`, all of them are returned, with a warning. Raises DataError if there are none.
    """
    data, faults = corpus.data, corpus.faults
    encode, cut = make_encoder(data, corpus.tokenizer, faults), make_cutter(data, corpus.tokenizer)
    least_tokens = 1 if data.packs_samples else data.sequence_length
    chosen: list[np.ndarray] = []
    share_so_far, num_asked = 0.0, 0
    with corpus.progress.task("reading held-out data", unit="tokens") as report:
        for part, share in data.parts():
            share_so_far += share  # the rounding error goes to the next source
            wanted = max(1, round(share_so_far * num_sequences) - num_asked)
            num_asked += wanted
            source, all_held_out = open_validation(part, corpus.bindings)
            wanted_tokens = VALIDATION_POOL * wanted * data.sequence_length
            arrays, num_tokens = [np.zeros(0, np.int32)], 0
            for document in Reader(source, faults=faults).epoch():
                if all_held_out or is_held_out(document, data.holdout):
                    encoded = encode([document])
                    arrays += encoded
                    num_tokens += sum(map(len, encoded))
                    report(min(num_tokens, wanted_tokens), wanted_tokens)
                if num_tokens >= wanted_tokens:
                    break
            if num_tokens < least_tokens:
                raise DataError(
                    f"data source {part.source!r} has only {num_tokens} held-out tokens, but one sequence needs "
                    f"{least_tokens}; increase data.holdout, or use --data {part.source}.validation=GLOB"
                    f"{faults.summary()}"
                )
            pool, _ = cut(arrays)
            chosen.append(pool[np.linspace(0, len(pool) - 1, min(wanted, len(pool))).round().astype(int)])
    sequences = np.concatenate(chosen)[:num_sequences]
    if len(sequences) < num_sequences:
        log.warning(
            "validation uses only %d sequences, because fewer than evaluate.num_sequences = %d are available",
            len(sequences),
            num_sequences,
        )
    return list(torch.from_numpy(sequences.astype(np.int64)).split(batch_size))


def end_of_text(data: DataSpec, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the end-of-text token. Raises DataError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise DataError(
            f"tokenizer {data.tokenizer!r} has no end-of-text token; choose another tokenizer (data.tokenizer)"
        )
    return end


def make_cutter(
    data: DataSpec, tokenizer: PreTrainedTokenizerBase
) -> Callable[[list[np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Return a function that makes sequences of encoded documents, and returns them with the tokens left over."""
    length, end = data.sequence_length, end_of_text(data, tokenizer)
    if data.packs_samples:
        return lambda arrays: (pack(arrays, length, padding=end), np.zeros(0, np.int32))
    return lambda arrays: cut(arrays, length)


def cut(arrays: list[np.ndarray], sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens into sequences of `sequence_length`. Return the sequences and the tokens that are left over."""
    tokens = np.concatenate(arrays)
    num_used = len(tokens) // sequence_length * sequence_length
    return tokens[:num_used].reshape(-1, sequence_length), tokens[num_used:].copy()


def make_encoder(
    data: DataSpec, tokenizer: PreTrainedTokenizerBase, faults: Faults
) -> Callable[[Sequence[Document]], list[np.ndarray]]:
    """Return a function that turns documents into token ids (int32), each text ending with the end-of-text token.

    The function encodes several texts at once, because a hub tokenizer spreads them over the cores. For the tokenizer
    `bytes`, it computes the ids directly, because the tokenizer's own code processes one letter at a time in Python.
    Control tokens in a text, such as "</s>", are encoded as text.

    If a source of the data holds chats, all documents become marked samples (`samples.py`) of at most one sequence: a
    longer chat is truncated, and a longer text becomes several samples.

    If a document contains token ids that the tokenizer does not have, or if a chat cannot be rendered, the document is
    reported as a fault and left out. Raises DataError if the tokenizer has no end-of-text token, or no chat template
    although there are chats.
    """
    end, num_ids, length = end_of_text(data, tokenizer), len(tokenizer), data.sequence_length
    render = make_renderer(tokenizer, data.tokenizer) if data.packs_samples else None

    def sample_of(document: Document, messages: list[Message]) -> np.ndarray:
        assert render
        ids, is_said = render(messages)
        sample = mark(ids[:length], is_said[:length])
        if not is_learned(sample).any():
            raise ValueError(f"its first {length} tokens (data.sequence_length) contain none of the assistant's")
        if len(ids) > length:
            faults.note_truncated(document, len(ids), length)
        return sample

    def encode(documents: Sequence[Document]) -> list[np.ndarray]:
        # lone surrogates, which tokenizers refuse, are replaced
        texts = [each.content.encode("utf-8", "replace") for each in documents if isinstance(each.content, str)]
        if data.tokenizer == "bytes":
            encoded = iter([np.frombuffer(text, np.uint8).astype(np.int32) + BYTE_OFFSET for text in texts])
        elif texts:
            plain = [text.decode() for text in texts]
            options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            rows = tokenizer(plain, split_special_tokens=True, **options)["input_ids"]
            encoded = iter([np.asarray(ids, np.int32) for ids in rows])
        else:
            encoded = iter(())
        arrays: list[np.ndarray] = []
        for document in documents:
            if isinstance(document.content, list):
                try:
                    arrays.append(sample_of(document, document.content))
                except ValueError as error:
                    faults.note(Fault(document.origin, document.line, str(error)))
                continue
            ids = next(encoded) if isinstance(document.content, str) else document.content
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
                reason = (
                    f"token ids range from {ids.min()} to {ids.max()}, but tokenizer {data.tokenizer!r} "
                    f"(data.tokenizer) has only the ids 0 to {num_ids - 1}"
                )
                faults.note(Fault(document.origin, document.line, reason))
                continue
            has_end = len(ids) > 0 and ids[-1] == end
            ids = np.append(ids, [] if has_end else [end]).astype(np.int32)
            if data.packs_samples:  # the end of a text that would be a sample of its own has nothing to learn
                arrays += [mark(ids[at : at + length]) for at in range(0, len(ids) - 1, length)]
            else:
                arrays.append(ids)
        return arrays

    return encode
