"""Mark and pack samples, such as chats, of which only some tokens count in the loss, and read the marks of a batch.

A sequence of text is a cut of a stream of documents. By contrast, a sequence of samples holds whole samples that must
not see each other. A batch stays a single tensor: two bits of a token, above all ids, hold its marks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

UNLEARNED = 1 << 29  # the token does not count in the loss
FIRST = 1 << 30  # a sample begins with the token
IDS = UNLEARNED - 1
IGNORED = -100  # the target of a token that does not count


def mark(ids: np.ndarray, is_learned: np.ndarray | None = None) -> np.ndarray:
    """Return the tokens of one sample with their marks (int32). By default, all but the first one are learned."""
    marked = ids.astype(np.int32)
    if is_learned is not None:
        marked[~is_learned] |= UNLEARNED
    marked[:1] |= FIRST | UNLEARNED  # no token of its sample predicts the first one
    return marked


def is_learned(tokens: np.ndarray) -> np.ndarray:
    return tokens & UNLEARNED == 0


def pack(samples: Sequence[np.ndarray], sequence_length: int, *, padding: int) -> np.ndarray:
    """Pack marked samples into sequences, of shape (number of sequences, sequence_length), int32.

    Best fit, the longest first: each sample goes where it leaves the least room. A sample must not be longer than a
    sequence. `padding` is the id of the tokens that fill up a sequence, which are not learned.
    """
    rows: list[list[np.ndarray]] = []
    rooms: list[tuple[int, int]] = []  # the number of free tokens and the index of each row, sorted
    for sample in sorted(filter(len, samples), key=len, reverse=True):
        at = bisect_left(rooms, (len(sample), 0))
        if at == len(rooms):
            rooms.append((sequence_length, len(rows)))
            rows.append([])
        room, row = rooms.pop(at)
        rows[row].append(sample)
        insort(rooms, (room - len(sample), row))
    packed = np.full((len(rows), sequence_length), padding | UNLEARNED, np.int32)
    for row, members in zip(packed, rows, strict=True):
        joined = np.concatenate(members)
        row[: len(joined)] = joined
    return packed


def read_marks(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids, the targets and the positions of a marked batch, each of the shape of the batch.

    Targets are ids or IGNORED. Positions begin again with each sample; models tell samples apart by them.
    """
    ids = batch & IDS
    place = torch.arange(batch.shape[1], device=batch.device).expand_as(batch)
    begins = torch.where(batch & FIRST != 0, place, 0).cummax(dim=1).values
    return ids, ids.masked_fill(batch & UNLEARNED != 0, IGNORED), place - begins


def num_targets(batch: Tensor) -> int:
    """Return how many tokens of a batch, marked or not, are predicted and count in the loss."""
    return int((batch[:, 1:] < UNLEARNED).sum())


def runs(tokens: np.ndarray) -> Iterator[tuple[bool, list[int]]]:
    """Yield the ids of one sample in runs of tokens that are all learned or all not learned."""
    borders = np.flatnonzero(np.diff(is_learned(tokens))) + 1
    for run in np.split(tokens, borders):
        yield bool(is_learned(run)[0]), (run & IDS).tolist()
