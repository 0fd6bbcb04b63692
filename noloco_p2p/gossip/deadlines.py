"""How long a peer waits for another one, phase by phase. The wait at a boundary is in the run spec instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines in seconds. The defaults are for the internet; tests use shorter ones."""

    dial_s: float = 5.0
    offer_s: float = 5.0  # from the offer to its answer
    status_s: float = 3.0  # for a question about the state of a swap
    progress_s: float = 10.0  # for one chunk: a sign of life; measured rates decide whether a slow partner is too slow
    farewell_s: float = 1.0  # for the Abort that gives the partner the reason


INTERNET = Deadlines()
