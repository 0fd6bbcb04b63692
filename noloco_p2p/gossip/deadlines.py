"""The deadlines for the answers of a partner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines in seconds. The defaults suit the internet; tests use shorter deadlines."""

    dial_s: float = 5.0
    offer_s: float = 5.0  # from the offer to its answer
    status_s: float = 3.0  # for a request for the state of a swap
    progress_s: float = 10.0  # for one chunk; detects dead partners (slow ones are detected by their rates)
    farewell_s: float = 1.0  # for sending the partner an Abort with the reason


INTERNET = Deadlines()
