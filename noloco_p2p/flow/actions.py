"""`replica.py` and `head.py` return these actions to their driver, which performs them in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from noloco_p2p.flow.frames import Frame, MicrobatchId


class Kind(IntEnum):
    """The tasks of the only thread that touches the weights, in order of urgency.

    Backward passes come first because they free slots.
    """

    CLOSE_STEP = 0
    BACKWARD = 1
    LOSS = 2  # at a head, from the returned activations to their gradient
    FORWARD = 3


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame to a neighbour, over a stream that is opened on demand.

    If the peer cannot be reached, the driver calls `stream_closed`. The driver reduces `remaining_s` by the time that
    the frame waits in its queue, and it sends Backward frames first.
    """

    to: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send a frame over all open streams except the stream to peer `but`."""

    frame: Frame
    but: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Run this task, and report `computed` or `compute_failed`. At most one task runs at a time, including `CloseStep`.

    `data` is the encoded input of a replica, or the microbatch that the head launched. `received` is the encoded
    gradient for BACKWARD and the encoded activations for LOSS. The result is the payload of the next frame, except for
    BACKWARD at the head, which has no result. If a task fails, the driver must discard the gradients of that task and
    no others.
    """

    kind: Kind
    id: MicrobatchId
    data: object
    received: object = None
    is_training: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class CloseStep:
    """Divide the accumulated gradients by `num_tokens`, take an inner step, and report `step_closed`.

    `progress` is the median mark, to which this step advances an inner replica. It is None at a head, which determines
    its progress itself.
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
