"""The endless token ids of one source for one peer: epoch after epoch, without the held-out documents."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from noloco_p2p.data.corpus import Source, is_held_out
from noloco_p2p.data.encode import Encode
from noloco_p2p.data.faults import Fault
from noloco_p2p.data.reader import START, Context, Document, Place, Reader
from noloco_p2p.errors import DataError
from noloco_p2p.spec import SourceSpec

log = logging.getLogger(__name__)

MAX_DOCUMENTS = 64  # encoded at once
MAX_CHARS = 1 << 16


class Feed:
    """`read` gives a few documents at a time. `state_dict` is where the next one stands."""

    def __init__(
        self, part: SourceSpec, source: Source, *, peer_id: str, encode: Encode, holdout: float, context: Context
    ) -> None:
        """`holdout`: the share of documents to leave out; 0 = the source has none that others validate on."""
        self.name = part.source
        self.taken_tokens = 0
        self.epoch = 0
        self.context = context
        self._source = source
        self._peer_id = peer_id
        self._encode = encode
        self._holdout = holdout
        self._found = False  # a document in this epoch
        self._reader: Reader
        self._documents: Iterator[Document]
        self._open(START)

    def read(self) -> list[np.ndarray]:
        """Token ids of the next documents, one array each; none at the end of an epoch, and then the next one begins.

        Raises DataError when a whole epoch held no document, or none could be read for long.
        """
        arrays = self._encoded(self._next_documents())
        while not arrays and (documents := self._next_documents()):
            arrays = self._encoded(documents)
        if arrays:
            self._found = True
            self.taken_tokens += sum(map(len, arrays))
            return arrays
        if not self._found:
            last = self.context.faults.last
            why = f"; the last fault of {self.context.faults.count}: {last}" if last else ""
            raise DataError(f"data source {self.name!r} holds no document to train on{why}")
        self.epoch += 1
        self._found = False
        self._open(START)
        return []

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "epoch": self.epoch,
            "place": self._reader.place.as_list(),
            "taken_tokens": self.taken_tokens,
            "source": self._source.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """False, with a warning, when files came or went since: their old order is gone, and a new epoch begins.

        Raises KeyError, TypeError or ValueError for what `state_dict` did not give.
        """
        self.epoch, self.taken_tokens = int(state["epoch"]), int(state["taken_tokens"])
        place, known = Place.from_list(state["place"]), state["source"] == self._source.fingerprint
        if not known:
            log.warning("the files of %s are not those of before: data epoch %d starts", self.name, self.epoch + 1)
            self.epoch, place = self.epoch + 1, START
        self._found = known and place != START
        self._open(place)
        return known

    def _open(self, place: Place) -> None:
        self._reader = self._source.read(order=f"{self._peer_id}/{self.epoch}", place=place, context=self.context)
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

    def _encoded(self, documents: Sequence[Document]) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        for encoded in self._encode(documents):
            if isinstance(encoded, Fault):
                self.context.faults.note(encoded)
            else:
                arrays.append(encoded)
        return arrays
