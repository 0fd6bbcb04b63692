"""Documents -> token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from noloco_p2p.data.faults import Fault
from noloco_p2p.data.reader import Document
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_OFFSET = 3  # ByT5: 0 pad, 1 end of text, 2 unknown, then the 256 bytes

Encode = Callable[[Sequence[Document]], "list[np.ndarray | Fault]"]


def make_encoder(data: DataSpec, tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from documents to the token ids (int32) of each, with the end-of-text token behind them.

    Several texts at once, as a tokenizer of the hub spreads them over the cores. Bytes are added up directly: the
    tokenizer's own path runs in Python, a letter at a time, and it would read a "</s>" in a text as the end of the
    text. Token ids that do not fit the tokenizer are a fault. Raises DataError for a tokenizer of no use.
    """
    end, num_ids = tokenizer.eos_token_id, len(tokenizer)
    if not isinstance(end, int):
        raise DataError(f"tokenizer {data.tokenizer!r} has no end-of-text token; choose another one (data.tokenizer)")

    def encode(documents: Sequence[Document]) -> list[np.ndarray | Fault]:
        texts = [document.content for document in documents if isinstance(document.content, str)]
        encoded = iter(map(_encode_bytes, texts) if data.tokenizer == "bytes" else encode_texts(texts))
        return [
            with_end(next(encoded)) if isinstance(document.content, str) else check_ids(document, document.content)
            for document in documents
        ]

    def encode_texts(texts: list[str]) -> Sequence[np.ndarray]:
        if not texts:
            return []
        clean = [text.encode("utf-8", "replace").decode() for text in texts]  # lone surrogates are refused
        rows = tokenizer(clean, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [np.asarray(ids, np.int32) for ids in rows]

    def check_ids(document: Document, ids: np.ndarray) -> np.ndarray | Fault:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
            reason = (
                f"token ids from {ids.min()} to {ids.max()} do not fit the {num_ids} of tokenizer "
                f"{data.tokenizer!r} (data.tokenizer)"
            )
            return Fault(document.origin, document.line, reason)
        return with_end(ids)

    def with_end(ids: np.ndarray) -> np.ndarray:
        ended = len(ids) > 0 and ids[-1] == end
        return np.append(ids, [] if ended else [end]).astype(np.int32)

    return encode


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32) + BYTE_OFFSET
