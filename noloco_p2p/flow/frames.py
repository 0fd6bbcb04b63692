"""Neighbours in the pipeline exchange these frames. `Forward` and `Backward` carry payloads.

upstream, stage s                downstream, stage s + 1
Want(ticket, ...)       ->                                asks for a slot for this microbatch
                        <-     Credit(id, has_room)       a slot is reserved, or the Want is queued
Lost(id)                ->                                the Want or the reserved slot is no longer needed
Forward(id, payload)    ->
                        <-     Answer(id, is_taken)       TAKEN: the sender may forget it; DROP: try another peer
                        <-     Backward(id, payload)      has no answer, because nothing depends on one
                        <-     Lost(id)                   there will be no Backward
Mark(ticket)           <-->    Mark(ticket)               a head has stopped launching; peers forward each Mark once

The last stage returns its Forward to the head without a Want, because the head reserved a slot for it at launch. The
reply to a Want is a Credit or a DROP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class MicrobatchId(NamedTuple):
    """The identifier of a microbatch. `number` increases with each microbatch of a head, even across restarts."""

    head: str  # peer id
    number: int


@dataclass(frozen=True, slots=True)
class MicrobatchTicket:
    """The description of a microbatch, signed by its head. No replica on the path can change it.

    `mark` is the head's progress at launch, from 0 to 1. `num_tokens` is the number of tokens in the loss, and
    gradients are sums over these tokens. If `is_training` is false, the microbatch is an evaluation: nothing is
    kept for a backward pass, and the mark does not count. `signature` is the head's signature of all other fields. The
    driver signs and verifies it.
    """

    id: MicrobatchId
    mark: float
    num_tokens: int
    is_training: bool = True
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Want:
    """A request for a slot for one microbatch.

    `sinks` lists the replicas of the last stage to which the head has streams. A replica of the second-to-last stage
    picks one of them at random. `remaining_s` is the time until the deadline of the microbatch. Wall clocks differ, so
    each hop subtracts the time for which it held the microbatch.
    """

    ticket: MicrobatchTicket
    remaining_s: float
    sinks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Credit:
    """The reservation of a slot for one microbatch.

    If no slot is free, the Want is queued, and a second Credit may follow.
    """

    id: MicrobatchId
    has_room: bool


@dataclass(frozen=True, slots=True)
class Forward:
    """The encoded activations of a microbatch. `payload` is None if a gate refused them."""

    id: MicrobatchId
    remaining_s: float
    payload: object


@dataclass(frozen=True, slots=True)
class Backward:
    """The encoded gradient of the loss, summed over tokens.

    `payload` is None if a gate refused it.
    """

    id: MicrobatchId
    payload: object


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a Forward: TAKEN if `is_taken` is true, and DROP otherwise.

    As an answer to a Want, it is always DROP.
    """

    id: MicrobatchId
    is_taken: bool


@dataclass(frozen=True, slots=True)
class Lost:
    id: MicrobatchId


@dataclass(frozen=True, slots=True)
class Mark:
    """A notice that the head of this ticket has stopped launching microbatches.

    A mark of 1 means that the head has finished. A lower mark with 0 tokens means that the head has paused or left, and
    that it has no vote until it launches again.
    """

    ticket: MicrobatchTicket


Frame = Want | Credit | Forward | Backward | Answer | Lost | Mark
