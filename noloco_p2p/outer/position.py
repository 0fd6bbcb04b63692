"""Keep a peer's progress, its position in the schedule of the run, close to the progress of its partners.

Progress is a fraction of the schedule. It grows with each inner step. After a swap, it moves towards the progress of
the partners, so that unequal peers train at the same point of the schedule.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from statistics import median

PARTNERS = 8  # whose claims are remembered
LEAST_PARTNERS = 3  # the number of partners needed to identify a majority
ROUNDING = 1e-9  # progress is a sum of fractions, and counts as 1 if it is this close to 1


@dataclass(frozen=True, slots=True)
class _Claim:
    progress: float
    trained: float  # what this peer had trained when its partner was there
    speed: float | None  # progress since the partner's previous claim, divided by what this peer trained meanwhile


class PartnerPositions:
    """The newest claims of the last `PARTNERS` different partners about their progress.

    A claim is only a partner's word. So each partner has one voice, and medians, which include this peer's own voice,
    decide. `trained` is always the fraction of the schedule that this peer has trained itself, which grows with each
    inner step and never jumps.
    """

    def __init__(self) -> None:
        self._claims: OrderedDict[str, _Claim] = OrderedDict()

    def note(self, partner: str, progress: float, *, trained: float) -> None:
        """Record that `partner` claims to have been at `progress` when this peer had trained `trained`."""
        old = self._claims.pop(partner, None)
        speed = (progress - old.progress) / (trained - old.trained) if old and trained > old.trained else None
        self._claims[partner] = _Claim(progress, trained, speed)
        if len(self._claims) > PARTNERS:
            self._claims.popitem(last=False)

    def move(self, progress: float, *, trained: float, share: float, num_live: int) -> float:
        """Return the progress of this peer after a swap of `share` of the weights.

        It moves towards the median position by half of this share, and not at all before this peer knows claims of
        `LEAST_PARTNERS` different partners, or of all others if fewer are live. `num_live` is the number of live peers,
        including this one. Since its claim, each partner is taken to have advanced at the median speed of the partners.
        """
        enough = max(1, min(LEAST_PARTNERS, num_live - 1))
        claims = self._claims.values()
        if len(claims) < enough:
            return progress
        speeds = [claim.speed for claim in claims if claim.speed is not None]
        speed = median([1.0, *speeds]) if len(speeds) >= enough else 1.0
        target = median([progress, *(claim.progress + speed * (trained - claim.trained) for claim in claims)])
        return _settled(max(0.0, progress + share / 2 * (target - progress)))


def next_progress(progress: float, total_steps: int) -> float:
    """Return the progress after one more inner step."""
    return _settled(progress + 1 / total_steps)


def _settled(progress: float) -> float:
    return 1.0 if abs(progress - 1) < ROUNDING else progress
