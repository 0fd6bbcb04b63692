"""This module tracks the swap of a round: both partners' positions, the commit times, and estimates based on them.

It reads the swap's counters, but never a clock. Callers supply the current time as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.frames import Boundary, Part, SectionName
from noloco_p2p.gossip.outcome import Received
from noloco_p2p.gossip.rate_estimators import Goodput
from noloco_p2p.gossip.round_length import LinkMeasure, measure_link
from noloco_p2p.gossip.sections import SectionPair
from noloco_p2p.gossip.staleness import age_weight, rounds_apart, told_lengths
from noloco_p2p.optim.mixing import Agreement, agreed_inner_steps


class SwapHandle(Protocol):
    """The interface through which a round reads or abandons its swap. `gossip.swap.Swap` implements it."""

    bytes_sent: int
    bytes_received: int
    partner_staged_s: float | None

    @property
    def bytes_moved(self) -> int: ...

    def num_bytes(self, part: Part) -> int: ...

    def pair(self, name: SectionName) -> SectionPair: ...

    def pairs(self) -> dict[SectionName, SectionPair]: ...

    def abandon(self, reason: PeerError) -> None: ...


@dataclass(slots=True, eq=False)
class ActiveSwap:
    """A swap that a round has begun.

    `mine` and `theirs` are the positions of the two partners at `began_s`, when the swap began. `boundary_s` is the
    time at which this peer reached its boundary. `early_s` and `late_s` are the times at which the early and late parts
    were committed.
    """

    partner: str
    round: int
    total_steps: int  # inner steps in the whole run
    mine: Boundary  # as sent to the partner
    theirs: Boundary
    swap: SwapHandle
    began_s: float
    boundary_s: float | None = None
    early_s: float | None = None
    late_s: float | None = None

    @property
    def agreed(self) -> Agreement:
        own, other = told_lengths(self.mine, self.theirs)
        return Agreement(
            agreed_inner_steps(own, other),
            weight=age_weight(rounds_apart(self.mine, self.theirs, total_steps=self.total_steps)),
            partner_share=other / (own + other) if own + other else 0.5,
        )

    def committed(self, part: Part, now_s: float, goodput: Goodput) -> None:
        if part is Part.EARLY:
            self.early_s = now_s
            goodput.note(self.swap.num_bytes(part), now_s - self.began_s)
        else:
            self.late_s = now_s

    def broken_off(self, now_s: float, goodput: Goodput) -> None:
        """Record the transfer rate of a failed early part.

        Otherwise, a link that has become slow would go unnoticed.
        """
        if self.early_s is None:
            goodput.note(self.swap.bytes_moved, now_s - self.began_s)

    def link(self, now_s: float) -> LinkMeasure:
        """Return this swap's measurement of the link for `RoundLength`, assuming that the round ends now."""
        early_bytes, late_bytes = (self.swap.num_bytes(part) for part in Part)
        return measure_link(
            early_bytes=early_bytes,
            late_bytes=late_bytes,
            moved_bytes=self.swap.bytes_moved if self.early_s is None else early_bytes,
            elapsed_s=(now_s if self.early_s is None else self.early_s) - self.began_s,
            late_s=None if self.late_s is None else self.transfer_s(now_s),
            is_whole=self.early_s is not None,
        )

    def misses(self, boundary_s: float, now_s: float, goodput: Goodput) -> bool:
        """Return whether the early part will miss `boundary_s` while there is still time to find another partner.

        The result is true only if the early part has already taken longer than a complete early part usually takes.
        """
        total = self.swap.num_bytes(Part.EARLY)
        usual_s = goodput.seconds_for(total)
        elapsed_s, moved = now_s - self.began_s, self.swap.bytes_moved
        if usual_s is None or elapsed_s <= usual_s or now_s + usual_s > boundary_s:
            return False
        return moved == 0 or now_s + (total - moved) * elapsed_s / moved > boundary_s

    def expected_s(self, now_s: float, goodput: Goodput) -> float:
        """Return the estimated time at which the last part will arrive.

        The late part starts only after the early part has arrived and the partner has reached its boundary. Unknown
        durations count as 0.
        """
        early, late = (self.swap.num_bytes(part) for part in Part)
        early_left, late_left = max(0, early - self.swap.bytes_moved), min(late, early + late - self.swap.bytes_moved)
        early_s = now_s + (goodput.seconds_for(early_left) or 0.0)
        if not late:
            return early_s
        there_s = self.swap.partner_staged_s or self.began_s + (self.theirs.seconds_to_boundary or 0.0)
        ready_s = max(early_s, there_s)
        return ready_s + (goodput.seconds_for(max(0, late_left)) or 0.0)

    def lateness_s(self, now_s: float) -> float:
        """Return how many seconds this peer waited at its boundary before the partner's late part began to arrive."""
        if self.boundary_s is None or not self.swap.num_bytes(Part.LATE):
            return 0.0
        there_s = self.swap.partner_staged_s
        return max(0.0, (now_s if there_s is None else there_s) - self.boundary_s)

    def transfer_s(self, now_s: float) -> float:
        """Return the seconds from the later boundary to the commit of the late part, or to now if that is pending.

        The result is 0 until both partners have reached their boundaries.
        """
        there_s = self.swap.partner_staged_s
        if self.boundary_s is None or there_s is None:
            return 0.0
        return max(0.0, (now_s if self.late_s is None else self.late_s) - max(self.boundary_s, there_s))

    def received(self, now_s: float, *, num_live: int) -> Received:
        """Return the result of the swap for its round, which ends now. This removes the sections from the swap."""
        return Received(
            partner=self.partner,
            partner_round=self.theirs.round,
            partner_progress=self.theirs.progress,
            agreed=self.agreed,
            sections=self.swap.pairs(),
            link=self.link(now_s),
            bytes_sent=self.swap.bytes_sent,
            bytes_received=self.swap.bytes_received,
            seconds=now_s - self.began_s,
            lateness_s=self.lateness_s(now_s),
            transfer_s=self.transfer_s(now_s),
            num_live=num_live,
        )
