"""The actions that `replica.py` and `head.py` return for their driver, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from noloco_p2p.flow.frames import Frame, MicrobatchId


class Kind(IntEnum):
    """Tasks of the one thread that touches weights, the most urgent first. Backwards free room."""

    CLOSE_STEP = 0
    BACKWARD = 1
    LOSS = 2  # on a head: from the returned activations to their gradient
    FORWARD = 3


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to a neighbour, over a stream that is opened on demand.

    A peer that cannot be reached is reported with `stream_closed`. The driver subtracts the time that the frame waits
    in its own queue from `remaining_s`, and sends backwards first.
    """

    to: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a frame over all open streams except the one to `but`."""

    frame: Frame
    but: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Run this task, and report `computed` or `compute_failed`. At most one task is running, including `CloseStep`.

    data: encoded input of a replica, or the microbatch as a head received it. received: the encoded gradient
    (BACKWARD) or
    activations (LOSS). The result is the payload of the next frame; BACKWARD at the head has none. The driver must
    discard
    the gradients of a task that is reported with `compute_failed`, and no others.
    """

    kind: Kind
    id: MicrobatchId
    data: object
    received: object = None
    is_training: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class CloseStep:
    """Divide the accumulated gradients by `num_tokens`, take an inner step, and report `step_closed`.

    progress: the median mark, to which this step advances an inner replica; None at a head, which advances by itself.
    """

    num_tokens: int
    progress: float | None = None


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A microbatch of this head ended without a loss. Its data may be launched again."""

    id: MicrobatchId
    microbatch: object
    is_training: bool = True


Action = Send | Broadcast | Compute | CloseStep | GaveUp
