"""Provide a peer with the token ids of one source, epoch after epoch, without the held-out documents."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from noloco_p2p.data.documents import Document, Fault, Faults, is_held_out
from noloco_p2p.data.reader import START, Place, Reader, Source
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec, SourceSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BYTE_OFFSET = 3  # ByT5: 0 pad, 1 end of text, 2 unknown, then the 256 bytes
MAX_DOCUMENTS = 64  # documents encoded together
MAX_CHARS = 1 << 16

Encode = Callable[[Sequence[Document]], list[np.ndarray]]


class Feed:
    """An endless stream of the documents of one source.

    `read` returns a few documents at a time, and `state_dict` returns the position of the next one.
    """

    def __init__(
        self,
        part: SourceSpec,
        source: Source,
        *,
        peer_id: str,
        encode: Encode,
        holdout: float,
        faults: Faults,
        stop: threading.Event,
    ) -> None:
        """Open the source at its start. `holdout` is the share of documents to leave out, or 0 to use all of them."""
        self.name = part.source
        self.taken_tokens = 0
        self.epoch = 0
        self._source = source
        self._peer_id = peer_id
        self._encode = encode
        self._holdout = holdout
        self._faults = faults
        self._stop = stop
        self._found = False  # whether this epoch has had a document
        self._reader: Reader
        self._documents: Iterator[Document]
        self._open(START)

    def read(self) -> list[np.ndarray]:
        """Return the token ids of the next documents, one array each. An empty list marks the end of an epoch.

        After an empty list, the next call begins a new epoch. Raises DataError if a whole epoch contained no document,
        or if no document could be read for a long time.
        """
        while documents := self._next_documents():
            if arrays := self._encode(documents):
                self._found = True
                self.taken_tokens += sum(map(len, arrays))
                return arrays
        if not self._found:
            last = self._faults.last
            why = f"; lines and files skipped: {self._faults.count}; most recent reason: {last}" if last else ""
            raise DataError(f"data source {self.name!r} contains no document to train on{why}")
        self.epoch += 1
        self._found = False
        self._open(START)
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {
            "epoch": self.epoch,
            "place": self._reader.place.as_list(),
            "taken_tokens": self.taken_tokens,
            "source": self._source.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in `state`.

        If files were added or removed, their order has changed, so a new epoch begins, with a warning. Raises KeyError,
        TypeError or ValueError for a state that `state_dict` cannot have returned.
        """
        self.epoch, self.taken_tokens = int(state["epoch"]), int(state["taken_tokens"])
        place, known = Place.from_list(state["place"]), state["source"] == self._source.fingerprint
        if not known:
            self.epoch, place = self.epoch + (place != START), START
            log.warning("the files of data source %s have changed, so data epoch %d begins", self.name, self.epoch)
        self._found = known and place != START
        self._open(place)

    def _open(self, place: Place) -> None:
        order = f"{self._peer_id}/{self.epoch}"
        self._reader = self._source.read(order=order, place=place, faults=self._faults, stop=self._stop)
        self._documents = iter(self._reader)

    def _next_documents(self) -> list[Document]:
        documents: list[Document] = []
        num_chars = 0
        while len(documents) < MAX_DOCUMENTS and num_chars < MAX_CHARS:
            document = next(self._documents, None)
            if document is None:
                break
            if not (self._holdout and is_held_out(document, self._holdout)):
                documents.append(document)
                num_chars += len(document.content)
        return documents


def make_encoder(data: DataSpec, tokenizer: PreTrainedTokenizerBase, faults: Faults) -> Encode:
    """Return a function that turns documents into token ids (int32), each document ending with the end-of-text token.

    The function encodes several texts at once, because a hub tokenizer spreads them over the cores. For the tokenizer
    `bytes`, it computes the ids directly. The tokenizer's own code would process one letter at a time in Python, and
    would treat a "</s>" in a text as the end of the text.

    If a document contains token ids that the tokenizer does not have, the document is reported as a fault and left out.
    Raises DataError if the tokenizer has no end-of-text token.
    """
    end, num_ids = tokenizer.eos_token_id, len(tokenizer)
    if not isinstance(end, int):
        raise DataError(
            f"tokenizer {data.tokenizer!r} has no end-of-text token; choose another tokenizer (data.tokenizer)"
        )

    def encode(documents: Sequence[Document]) -> list[np.ndarray]:
        texts = [document.content for document in documents if isinstance(document.content, str)]
        encoded = iter(map(_encode_bytes, texts) if data.tokenizer == "bytes" else encode_texts(texts))
        contents = (
            next(encoded) if isinstance(document.content, str) else fitting_ids(document, document.content)
            for document in documents
        )
        return [with_end(ids) for ids in contents if ids is not None]

    def encode_texts(texts: list[str]) -> Sequence[np.ndarray]:
        if not texts:
            return []
        clean = [text.encode("utf-8", "replace").decode() for text in texts]  # the tokenizer refuses lone surrogates
        rows = tokenizer(clean, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [np.asarray(ids, np.int32) for ids in rows]

    def fitting_ids(document: Document, ids: np.ndarray) -> np.ndarray | None:
        if not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
            return ids
        reason = (
            f"token ids range from {ids.min()} to {ids.max()}, but tokenizer {data.tokenizer!r} (data.tokenizer) has "
            f"only the ids 0 to {num_ids - 1}"
        )
        faults.note(Fault(document.origin, document.line, reason))
        return None

    def with_end(ids: np.ndarray) -> np.ndarray:
        ended = len(ids) > 0 and ids[-1] == end
        return np.append(ids, [] if ended else [end]).astype(np.int32)

    return encode


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32) + BYTE_OFFSET
