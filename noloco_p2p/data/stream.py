"""Documents -> token ids -> packed batches, in an order of each peer's own that a restart continues exactly.

Tokens are taken in blocks: documents in the peer's order, joined by the end-of-text token and cut into sequences; the
rest of a cut goes to the next block, so no token is lost. The sequences of a block are shuffled, so that a batch holds
many documents. A block can be made again from where it began: that place, the detours made in it (files that could not
be read just then), the rest of the block before it, and the number of sequences already given out are the whole state.

A mixture takes its next documents from the source that is furthest behind its share of the tokens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from noloco_p2p.data.corpus import is_held_out
from noloco_p2p.data.encode import Encode, make_encoder
from noloco_p2p.data.faults import Fault, Faults
from noloco_p2p.data.feed import Feed
from noloco_p2p.data.reader import Context, permutation
from noloco_p2p.data.sources import has_own_validation, open_source, open_validation
from noloco_p2p.errors import DataError
from noloco_p2p.spec import DataSpec, SourceSpec
from noloco_p2p.telemetry.progress import Progress, Report, ignore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BLOCK_TOKENS = 1 << 19  # 2 MB at most; about 30 files of the built-in corpus
VALIDATION_POOL = 16  # sequences read for each one evaluated: they should not all come from one document
STATE_VERSION = 2


class TokenStream:
    """Endless batches for one peer: LongTensor (batch_size, sequence_length), on the CPU.

    Raises DataError when a source cannot be opened, at the start or later; the message names flag or file. What cannot
    be used of a file is skipped, and told to `faults`. `stop` ends a wait for the network; reading then raises.
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
        self.block_tokens = block_tokens
        self.faults = faults or Faults()
        self.stop = stop or threading.Event()
        self._data = data
        self._progress = progress or Progress()
        self._peer_id = peer_id
        encode = make_encoder(data, tokenizer)
        self._shares = [share for _, share in data.parts()]
        self._feeds = [self._feed(part, bindings, encode, index) for index, (part, _) in enumerate(data.parts())]
        self._block = 0
        self._carry = np.zeros(0, np.int32)
        self._start = self._block_start()
        self._sequences: np.ndarray | None = None  # (number of sequences in the block, sequence_length)
        self._position = 0

    @property
    def epoch(self) -> int:
        """Of the source that was read most often."""
        return max(feed.epoch for feed in self._feeds)

    @property
    def sequence_length(self) -> int:
        return self._data.sequence_length

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Tensor:
        rows: list[np.ndarray] = []
        missing = self.batch_size
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
        detours = [[*feed.context.detours, *feed.context.script] for feed in self._feeds]
        return {**self._start, "position": self._position, "detours": detours, "version": STATE_VERSION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when it is no state of a TokenStream of this mixture.

        When files came or went since, their old order is gone: a new epoch starts there and a warning says so.
        """
        try:
            if state["version"] != STATE_VERSION or len(state["feeds"]) != len(self._feeds):
                raise ValueError(f"version {state['version']}, {len(state['feeds'])} sources")
            self._block, self._position = int(state["block"]), int(state["position"])
            self._carry = np.asarray(state["carry"], np.int32)
            known = [feed.load_state_dict(own) for feed, own in zip(self._feeds, state["feeds"], strict=True)]
            for feed, script in zip(self._feeds, state["detours"], strict=True):
                feed.context.script = [[int(number) for number in detour] for detour in script] if all(known) else []
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the data position in the checkpoint cannot be read ({error!r})") from None
        if not all(known):
            self._position = 0
        self._start = self._block_start()
        self._sequences = None

    def _feed(self, part: SourceSpec, bindings: Mapping[str, str], encode: Encode, index: int) -> Feed:
        peer_id = f"{self._peer_id}/{index}" if self._data.mix else self._peer_id
        holdout = 0.0 if has_own_validation(part) else self._data.holdout
        context = Context(faults=self.faults, stop=self.stop)
        source = open_source(part, bindings)
        return Feed(part, source, peer_id=peer_id, encode=encode, holdout=holdout, context=context)

    def _block_start(self) -> dict[str, Any]:
        feeds = [feed.state_dict() for feed in self._feeds]
        return {"feeds": feeds, "carry": self._carry.tolist(), "block": self._block}

    def _make_block(self) -> np.ndarray:
        """The next block; remembers where it began. One of which a part was given out comes out as it did before."""
        self._start = self._block_start()
        for feed in self._feeds:
            feed.context.detours.clear()
            feed.context.steadfast = self._position > 0
        order = f"{self._peer_id}/{self._feeds[0].epoch}/{self._block}"
        with self._progress.task("reading data", unit="tokens") as report:
            sequences, self._carry = cut(self._read_tokens(report), self._data.sequence_length)
        self._block += 1
        return sequences[permutation(order, len(sequences))]

    def _read_tokens(self, report: Report = ignore) -> list[np.ndarray]:
        """Documents until the block is full or the epoch ends, but for one sequence at least."""
        arrays, num_tokens = [self._carry], len(self._carry)
        while num_tokens < self.block_tokens:
            read = self._hungriest().read()
            arrays += read
            num_tokens += sum(map(len, read))
            report(min(num_tokens, self.block_tokens), self.block_tokens)
            if not read and len(self._feeds) == 1 and num_tokens >= self._data.sequence_length:
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
    """Held-out sequences, (batch_size or fewer, sequence_length) each: the same ones for every peer with the same data.

    They are spread evenly over 16 times as many, in the plain order of the source; of a mixture each source gives its
    share. Fewer than `num_sequences` come back, with a warning, when there are not more. Raises DataError when there
    is none.
    """
    encode = make_encoder(data, tokenizer)
    chosen: list[np.ndarray] = []
    with (progress or Progress()).task("reading held-out data", unit="tokens") as report:
        share_so_far, num_asked = 0.0, 0
        for part, share in data.parts():
            share_so_far += share
            wanted = max(1, round(share_so_far * num_sequences) - num_asked)  # what is rounded off goes to the next
            num_asked += wanted
            pool = _validation_pool(data, part, bindings, encode, wanted, report, faults or Faults())
            chosen.append(pool[np.linspace(0, len(pool) - 1, min(wanted, len(pool))).round().astype(int)])
    sequences = np.concatenate(chosen)[:num_sequences]
    if len(sequences) < num_sequences:
        log.warning(
            "validation uses %d sequences: evaluate.num_sequences = %d are not there", len(sequences), num_sequences
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
    for document in source.read(context=Context(faults=faults)):
        if all_held_out or is_held_out(document, data.holdout):
            (encoded,) = encode([document])
            if isinstance(encoded, Fault):
                faults.note(encoded)
                continue
            arrays.append(encoded)
            num_tokens += len(encoded)
            report(min(num_tokens, wanted_tokens), wanted_tokens)
        if num_tokens >= wanted_tokens:
            break
    if num_tokens < data.sequence_length:
        why = f" (the last fault of {faults.count}: {faults.last})" if faults.last else ""
        raise DataError(
            f"only {num_tokens} held-out tokens in data source {part.source!r}, and one sequence needs "
            f"{data.sequence_length}: raise data.holdout, or give --data {part.source}.validation=GLOB{why}"
        )
    return cut(arrays, data.sequence_length)[0]


def cut(arrays: list[np.ndarray], sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequences of `sequence_length`, the tokens that are left over)."""
    tokens = np.concatenate(arrays)
    num_used = len(tokens) // sequence_length * sequence_length
    return tokens[:num_used].reshape(-1, sequence_length), tokens[num_used:].copy()
