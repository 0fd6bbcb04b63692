"""This module decides when an inner replica closes an inner step.

An inner replica follows the median mark of the heads, and a head follows its own batches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, replace

from noloco_p2p.flow.frames import MicrobatchTicket
from noloco_p2p.flow.limits import (
    LARGEST_STEP_BATCHES,
    MAX_HEADS,
    SHORTEST_VOTE_S,
    SMALLEST_STEP_BATCHES,
    VOTE_INTERVALS,
    VOTE_S,
)

FINAL_MARK = 1.0  # the mark of a head that has finished
SMOOTHING = 0.2  # weight of a new interval between two microbatches of a head


@dataclass(frozen=True, slots=True)
class _Vote:
    number: int
    mark: float
    heard_s: float
    usual_s: float | None = None  # smoothed interval between two of its microbatches
    is_away: bool = False  # whether the head announced with this number that it is away

    def after(self, number: int, mark: float, now_s: float) -> _Vote:
        """Return the next vote of the same head."""
        passed_s, usual_s = now_s - self.heard_s, self.usual_s
        if not self.is_away:
            usual_s = passed_s if usual_s is None else usual_s + SMOOTHING * (passed_s - usual_s)
        return _Vote(number, mark, now_s, usual_s)

    def counts(self, now_s: float) -> bool:
        if self.is_away:
            return False
        lasts_s = VOTE_S
        if self.usual_s is not None:
            lasts_s = min(max(VOTE_INTERVALS * self.usual_s, SHORTEST_VOTE_S), VOTE_S)
        return self.mark >= FINAL_MARK or now_s - self.heard_s <= lasts_s


class MedianSteps:
    """The progress of an inner replica: the lower median of the last marks of all live heads.

    `heads` contains the heads that the directory lists now. Anyone can make a key and sign marks with it, so only these
    heads vote, and no vote outlives the record of its head.

    Each live head has one vote. Each rise of the median closes at most one step, so a stage with few replicas takes
    larger steps instead of more steps. The median falls when slow heads are heard from again. The progress does not
    fall, and the next rise of the median closes a step.
    """

    def __init__(self, *, heads: Container[str], batch_tokens: int, progress: float = 0.0) -> None:
        self.heads = heads
        self.progress = progress
        self.num_tokens = 0  # tokens counted since the last step
        self._batch_tokens = batch_tokens
        self._last_median = progress
        self._has_ended = False  # whether the last median was 1
        self._votes: OrderedDict[str, _Vote] = OrderedDict()  # the most recent last

    def vote(self, ticket: MicrobatchTicket, now_s: float, *, is_away: bool = False) -> bool:
        """Record the vote of a head. Return True if the head is listed and has sent no newer ticket before.

        If `is_away` is true, the head has no vote until a newer ticket arrives.
        """
        if ticket.id.head not in self.heads:
            return False
        before = self._votes.get(ticket.id.head)
        if before is not None and ticket.id.number <= before.number:
            return False  # outdated, or repeated by a peer that wants to keep the vote of a dead head alive
        make = before.after if before else _Vote
        vote = make(ticket.id.number, ticket.mark, now_s)
        self._votes[ticket.id.head] = replace(vote, is_away=is_away)
        self._votes.move_to_end(ticket.id.head)
        if len(self._votes) > MAX_HEADS:
            self._votes.popitem(last=False)
        self.median(now_s)
        return True

    def count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def median(self, now_s: float) -> float | None:
        """Return the median mark, or None if no head votes.

        If no head votes after a median of 1, it stays 1, because heads that have finished leave the directory.
        """
        marks = sorted(vote.mark for vote in self._counting(now_s))
        if not marks:
            return FINAL_MARK if self._has_ended else None
        median = marks[(len(marks) - 1) // 2]
        self._has_ended = median >= FINAL_MARK
        return median

    def is_due(self, now_s: float) -> bool:
        """Return whether the median has risen since the last call, so that a step closes now.

        Except at the end of the run, a rise of the median does not close a step of less than half a batch.
        """
        before, median = self._last_median, self.median(now_s)
        if median is None:
            return False
        self._last_median, self.progress = median, max(median, self.progress)
        is_large = self.num_tokens >= SMALLEST_STEP_BATCHES * self._batch_tokens
        return median > before and self.num_tokens > 0 and (is_large or median >= FINAL_MARK)

    def take(self) -> int:
        """Return the number of tokens in the step that closes now, and begin the next step."""
        num_tokens, self.num_tokens = self.num_tokens, 0
        return num_tokens

    def is_ahead(self, head: str, now_s: float) -> bool:
        """Return whether a head must wait because the step has four batches and the head is ahead of the median.

        The other heads continue, because only they can move the median. Refusing all heads would deadlock a stage that
        has less than one replica for every four heads.
        """
        if self.num_tokens < LARGEST_STEP_BATCHES * self._batch_tokens or head not in self._votes:
            return False
        median = self.median(now_s)
        return median is not None and self._votes[head].mark > median

    def is_over(self, now_s: float) -> bool:
        """Return whether this replica and all live heads have finished."""
        return self.progress >= FINAL_MARK and all(vote.mark >= FINAL_MARK for vote in self._counting(now_s))

    def _counting(self, now_s: float) -> list[_Vote]:
        return [vote for head, vote in self._votes.items() if head in self.heads and vote.counts(now_s)]

    def __len__(self) -> int:
        return len(self._votes)
