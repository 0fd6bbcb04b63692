"""Turn documents into token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from noloco_p2p.data.documents import Document, Fault, Faults
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_OFFSET = 3  # ByT5: 0 pad, 1 end of text, 2 unknown, then the 256 bytes

Encode = Callable[[Sequence[Document]], list[np.ndarray]]


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
        # lone surrogates, which tokenizers refuse, are replaced
        texts = [each.content.encode("utf-8", "replace") for each in documents if isinstance(each.content, str)]
        if data.tokenizer == "bytes":
            encoded = iter([np.frombuffer(text, np.uint8).astype(np.int32) + BYTE_OFFSET for text in texts])
        elif texts:
            plain = [text.decode() for text in texts]
            rows = tokenizer(plain, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            encoded = iter([np.asarray(ids, np.int32) for ids in rows])
        else:
            encoded = iter(())
        arrays: list[np.ndarray] = []
        for document in documents:
            ids = next(encoded) if isinstance(document.content, str) else document.content
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_ids:
                reason = (
                    f"token ids range from {ids.min()} to {ids.max()}, but tokenizer {data.tokenizer!r} "
                    f"(data.tokenizer) has only the ids 0 to {num_ids - 1}"
                )
                faults.note(Fault(document.origin, document.line, reason))
                continue
            has_end = len(ids) > 0 and ids[-1] == end
            arrays.append(np.append(ids, [] if has_end else [end]).astype(np.int32))
        return arrays

    return encode
