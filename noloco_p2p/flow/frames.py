"""The frames that neighbours in the pipeline exchange about microbatches. `Forward` and `Backward` carry payloads.

upstream, stage s                downstream, stage s + 1
Want(ticket, ...)       ->                                this microbatch waits for room with you
                        <-     Credit(id, has_room)       room is reserved; or it is not, and the want is queued
Lost(id)                ->                                the want, or the room reserved for it, is not needed
Forward(id, payload)    ->
                        <-     Answer(id, is_taken)       TAKEN: the sender may forget it; DROP: try another peer
                        <-     Backward(id, payload)      there is no answer: nothing would depend on it
                        <-     Lost(id)                   the Backward will not come
Mark(ticket)           <-->    Mark(ticket)               a head launches no more; each peer forwards it once

The last stage returns its Forward to the head without a Want: the head reserved room for it at launch. The answer to a
Want is a Credit, or DROP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class MicrobatchId(NamedTuple):
    """`number` increases with each microbatch of a head, also across restarts of the head."""

    head: str  # peer id
    number: int


@dataclass(frozen=True, slots=True)
class MicrobatchTicket:
    """What a head states about one of its microbatches, under its signature. No replica on the path can change it.

    mark: progress of the head at launch, 0 to 1. num_tokens: in the loss; gradients are of the sum over them.
    is_training:
    False = evaluation: nothing is kept for a backward, and the mark does not count. signature: by the head over all
    other
    fields; the driver signs and verifies.
    """

    id: MicrobatchId
    mark: float
    num_tokens: int
    is_training: bool = True
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Want:
    """sinks: the replicas of the last stage to which the head has streams. The stage before the last draws among them.

    remaining_s: until the deadline of the microbatch. Wall clocks differ, so each hop subtracts the time it held it.
    """

    ticket: MicrobatchTicket
    remaining_s: float
    sinks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Credit:
    """A reservation for one microbatch. Without room it is queued, and a second Credit may follow."""

    id: MicrobatchId
    has_room: bool


@dataclass(frozen=True, slots=True)
class Forward:
    """payload: encoded activations, as received. None = they arrived damaged, or a gate refused them."""

    id: MicrobatchId
    remaining_s: float
    payload: object


@dataclass(frozen=True, slots=True)
class Backward:
    """payload: encoded gradient of the sum over tokens. None = it arrived damaged, or a gate refused it."""

    id: MicrobatchId
    payload: object


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a Forward: True = TAKEN, False = DROP. To a Want it is always False."""

    id: MicrobatchId
    is_taken: bool


@dataclass(frozen=True, slots=True)
class Lost:
    id: MicrobatchId


@dataclass(frozen=True, slots=True)
class Mark:
    """The head of this ticket launches nothing any more.

    At the mark 1 it has finished. Below 1, with 0 tokens, it pauses or leaves, and has no vote until it launches again.
    """

    ticket: MicrobatchTicket


Frame = Want | Credit | Forward | Backward | Answer | Lost | Mark
