"""This module queues the microbatches that wait for a slot at a replica, and decides which one is next."""

from __future__ import annotations

from dataclasses import dataclass

from noloco_p2p.flow.frames import MicrobatchId, Want
from noloco_p2p.flow.limits import FAIR_SHARES, MAX_HEADS, MAX_WANTS_PER_PEER


@dataclass(frozen=True, slots=True)
class Waiting:
    want: Want
    peer: str  # upstream neighbour
    deadline_s: float


class Wants:
    """The queue of Wants at a replica. Waiting heads get slots in turn.

    A head that has had more than twice its fair share of slots in this step must wait for the others. `new_step` resets
    the counts.
    """

    def __init__(self) -> None:
        self._waiting: dict[MicrobatchId, Waiting] = {}  # in order of arrival
        self._num_served: dict[str, int] = {}  # slots per head, the most recently served head last

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting) -> bool:
        """Queue a Want. A repeated Want keeps its place.

        Return False if another neighbour is waiting with the same microbatch, or if this neighbour has too many
        microbatches waiting.
        """
        id = waiting.want.ticket.id
        before = self._waiting.get(id)
        if before is None:
            num_before = sum(other.peer == waiting.peer for other in self._waiting.values())
            if num_before >= MAX_WANTS_PER_PEER:
                return False
        elif before.peer != waiting.peer:
            return False
        self._waiting[id] = waiting
        return True

    def next(self, barred: set[str]) -> Waiting | None:
        """Remove and return the next Want. Heads in `barred` must wait."""
        heads = [head for head in self.heads if head not in barred]
        if not heads:
            return None
        num_heads = len(self._num_served.keys() | set(heads))
        most = FAIR_SHARES * sum(self._num_served.values()) / num_heads
        modest = [head for head in heads if self._num_served.get(head, 0) <= most]
        turns = {head: turn for turn, head in enumerate(self._num_served, 1)}
        head = min(modest or heads, key=lambda head: turns.get(head, 0))  # min returns the first of equal items
        self._num_served[head] = self._num_served.pop(head, 0) + 1
        if len(self._num_served) > MAX_HEADS:
            del self._num_served[next(iter(self._num_served))]
        return self._waiting.pop(next(id for id in self._waiting if id.head == head))

    def new_step(self) -> None:
        self._num_served.clear()

    def remove(self, id: MicrobatchId, peer: str) -> None:
        if id in self._waiting and self._waiting[id].peer == peer:
            del self._waiting[id]

    def remove_peer(self, peer: str) -> None:
        self._waiting = {id: waiting for id, waiting in self._waiting.items() if waiting.peer != peer}

    def expire(self, now_s: float) -> None:
        self._waiting = {id: waiting for id, waiting in self._waiting.items() if waiting.deadline_s > now_s}

    def take_all(self) -> list[Waiting]:
        taken, self._waiting = list(self._waiting.values()), {}
        return taken

    @property
    def heads(self) -> list[str]:
        """The waiting heads, in order of arrival."""
        return list(dict.fromkeys(id.head for id in self._waiting))
