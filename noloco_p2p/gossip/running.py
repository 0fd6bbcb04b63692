"""A swap on its way, and when what happened: whether it will be in time, and what it cost. All times on one clock."""

from __future__ import annotations

from dataclasses import dataclass

from noloco_p2p.gossip.frames import Boundary, Part
from noloco_p2p.gossip.goodput import Goodput
from noloco_p2p.gossip.round_length import LinkMeasure, measure_link
from noloco_p2p.gossip.staleness import age_weight, rounds_apart, told_lengths
from noloco_p2p.gossip.swap import Swap
from noloco_p2p.optim.mixing import Agreement, agreed_inner_steps


@dataclass(slots=True)
class Running:
    """mine, partner: where both stood at `began_s`. boundary_s: when this peer came to its boundary.

    early_s, late_s: when the part was committed.
    """

    swap: Swap
    round: int
    total_steps: int  # of the run
    mine: Boundary  # as it was told to the partner
    partner: Boundary
    began_s: float
    boundary_s: float | None = None
    early_s: float | None = None
    late_s: float | None = None

    @property
    def agreed(self) -> Agreement:
        own, other = told_lengths(self.mine, self.partner)
        return Agreement(
            agreed_inner_steps(own, other),
            weight=age_weight(rounds_apart(self.mine, self.partner, total_steps=self.total_steps)),
            partner_share=other / (own + other) if own + other else 0.5,
        )

    def committed(self, part: Part, now_s: float, goodput: Goodput) -> None:
        if part is Part.EARLY:
            self.early_s = now_s
            goodput.note(self.swap.num_bytes(part), now_s - self.began_s)
        else:
            self.late_s = now_s

    def broken_off(self, now_s: float, goodput: Goodput) -> None:
        """An early part that did not get here is a measurement, too: else a link that has become slow is never seen."""
        if self.early_s is None:
            goodput.note(self.swap.bytes_moved, now_s - self.began_s)

    def link(self, now_s: float) -> LinkMeasure:
        """What the controller of the round length is told of a swap whose round ends now."""
        early_bytes, late_bytes = (self.swap.num_bytes(part) for part in Part)
        return measure_link(
            round_bytes=early_bytes + late_bytes,
            late_bytes=late_bytes,
            moved_bytes=self.swap.bytes_moved if self.early_s is None else early_bytes,
            elapsed_s=(now_s if self.early_s is None else self.early_s) - self.began_s,
            late_s=None if self.late_s is None else self.transfer_s(now_s),
            is_whole=self.early_s is not None,
        )

    def misses(self, boundary_s: float, now_s: float, goodput: Goodput) -> bool:
        """The early part will not be here at `boundary_s`, and one with another partner would.

        Said only of one that already took longer than a whole one may, by what was measured before.
        """
        total = self.swap.num_bytes(Part.EARLY)
        usual_s = goodput.seconds_for(total)
        elapsed_s, moved = now_s - self.began_s, self.swap.bytes_moved
        if usual_s is None or elapsed_s <= usual_s or now_s + usual_s > boundary_s:
            return False
        return moved == 0 or now_s + (total - moved) * elapsed_s / moved > boundary_s

    def expected_s(self, now_s: float, goodput: Goodput) -> float:
        """When the late part will be here: after the rest of the early part, the partner's boundary, and its transfer.

        `now_s` for what is not known.
        """
        early, late = (self.swap.num_bytes(part) for part in Part)
        early_left, late_left = max(0, early - self.swap.bytes_moved), min(late, early + late - self.swap.bytes_moved)
        there_s = self.swap.partner_staged_s or self.began_s + (self.partner.seconds_to_boundary or 0.0)
        ready_s = max(now_s + (goodput.seconds_for(early_left) or 0.0), there_s)
        return ready_s + (goodput.seconds_for(max(0, late_left)) or 0.0)

    def lateness_s(self, now_s: float) -> float:
        """How long this peer stood at its boundary before the partner's late part began to arrive."""
        if self.boundary_s is None:
            return 0.0
        there_s = self.swap.partner_staged_s
        return max(0.0, (now_s if there_s is None else there_s) - self.boundary_s)

    def transfer_s(self, now_s: float) -> float:
        """From when both were at their boundaries to the commit of the late part, or to now."""
        there_s = self.swap.partner_staged_s
        if self.boundary_s is None or there_s is None:
            return 0.0
        return max(0.0, (now_s if self.late_s is None else self.late_s) - max(self.boundary_s, there_s))
