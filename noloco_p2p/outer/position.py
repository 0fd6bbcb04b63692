"""Keep a peer's progress, its position in the schedule of the run, close to the progress of its partners.

Progress is a fraction of the schedule. It grows with each inner step. After a swap, it moves towards the progress of
the partners, so that unequal peers train at the same point of the schedule.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from statistics import median

from noloco_p2p.gossip.outcome import Received
from noloco_p2p.optim.gates import HISTORY_ROUNDS, LEAST_PARTNERS
from noloco_p2p.spec import Spec

ROUNDING = 1e-9  # progress is a sum of fractions, and counts as 1 if it is this close to 1


@dataclass(frozen=True, slots=True)
class _Claim:
    progress: float
    trained: float  # what this peer had trained when its partner was there
    speed: float | None  # progress since the partner's previous claim, divided by what this peer trained meanwhile


class PartnerPositions:
    """The newest claims of the last `HISTORY_ROUNDS` different partners about their progress.

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
        if len(self._claims) > HISTORY_ROUNDS:
            self._claims.popitem(last=False)

    def move(self, progress: float, *, trained: float, at_most: float, num_live: int) -> float:
        """Return the progress of this peer after it has moved from `progress` towards the median position.

        It moves by `at_most` at most, and not at all before it knows claims of `LEAST_PARTNERS` different partners, or
        of all others if fewer are live. `num_live` is the number of live peers, including this one. Since its claim,
        each partner is taken to have advanced at the median speed of the partners.
        """
        enough = max(1, min(LEAST_PARTNERS, num_live - 1))
        claims = self._claims.values()
        if len(claims) < enough:
            return progress
        speeds = [claim.speed for claim in claims if claim.speed is not None]
        speed = median([1.0, *speeds]) if len(speeds) >= enough else 1.0
        target = median([progress, *(claim.progress + speed * (trained - claim.trained) for claim in claims)])
        return _settled(max(progress - at_most, min(progress + at_most, target)))


def next_progress(progress: float, total_steps: int) -> float:
    """Return the progress after one more inner step."""
    return _settled(progress + 1 / total_steps)


def swap_progress(progress: float, received: Received, *, inner_steps: int, spec: Spec) -> float:
    """Return the progress of a swap, which is the same number for both partners.

    `progress` is this peer's progress at the end of a round of `inner_steps` steps. The result is the midpoint between
    the points at which the partners opened their rounds, plus one round of the agreed length. If the partners are too
    far apart, the midpoint is limited to one round from this peer's own opening.
    """
    total = spec.schedule_steps
    agreed = received.agreed.inner_steps / total
    opened = progress - inner_steps / total
    apart = (received.partner_progress - opened) / 2
    return opened + max(-agreed, min(agreed, apart)) + agreed


def _settled(progress: float) -> float:
    return 1.0 if abs(progress - 1) < ROUNDING else progress
