"""How long a peer waits for another one, phase by phase. The wait at a boundary is not here: it is in the run spec."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """All in seconds. The defaults are for the internet; tests take shorter ones."""

    dial_s: float = 5.0
    offer_s: float = 5.0  # from the offer to its answer
    status_s: float = 3.0  # what became of a swap?
    progress_s: float = 10.0  # for one chunk: sign of life; a partner that is merely slow is judged by measured rates
    farewell_s: float = 1.0  # for the Abort that tells the partner why


INTERNET = Deadlines()
