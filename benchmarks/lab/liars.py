"""Measure in the lab what the update filter costs an honest swarm, and what it prevents when peers lie.

    python benchmarks/lab/liars.py run [--only noise] [--minutes 5]      adds cells to results/liars.jsonl
    python benchmarks/lab/liars.py table                                 what is done, as in results/liars.txt

The swarm is the first one of the ladder (0.12M parameters, Muon, a rate of 0.016, links of 100 Mbit/s for 125M
parameters), for half of its steps: 302, in which each number is mixed about seventy times. Losses are the validation
losses of the honest replicas at the end. The change is that of the mean over the seeds, relative to swarms without
liars, and for these relative to swarms without filter ("open"). `harness/hostile.py` describes the attacks. A liar gets
as many swaps as others; attacks.py has greedy ones. With "own texts", each replica has other packages of the standard
library.

`run` runs what the file lacks. Two processes can share the work. PYTHONPATH must contain `benchmarks`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

from attacks import ADAPTIVE, NO_LIMITS, OPEN, own_texts
from corpus import CACHE, make
from harness.hostile import Attack, Lies, propose_nothing
from ladder import CLAIMED, SIZES, STEP_S, Cell, ladder_spec
from rows import cell_of, command
from swarm import LabReplica, Swarm
from torch import Tensor

from noloco_p2p.gossip.coder import Coding
from noloco_p2p.gossip.units import Slice
from noloco_p2p.outer import update_filter
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.testing.links import IDEAL

OUT = Path(__file__).resolve().parents[1] / "results" / "liars.jsonl"
CELL, PART = Cell("0.1M", "muon", "ours", "100", 0, 0.016), 0.5  # of the steps
SEEDS = (0, 1)
ATTACKS = (Attack.CONSTANT, Attack.NOISE, *ADAPTIVE, Attack.FLIPPED, Attack.ECHO)


@dataclass(frozen=True, slots=True)
class Case:
    attack: str = ""
    num_honest: int = 8
    num_liars: int = 0
    limits: str = ""  # OPEN, or empty for the filter's own
    has_own_texts: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        num = self.num_honest + self.num_liars
        who = f"{self.num_liars} of {num}, {self.attack}" if self.attack else f"{num} honest"
        return ", ".join(filter(None, [who, "own texts" * self.has_own_texts, self.limits]))


def cases() -> Iterator[Case]:
    for seed in SEEDS:
        for limits in ("", OPEN):
            yield Case(limits=limits, seed=seed)
        for attack in ("", *reversed(ADAPTIVE)):
            yield Case(attack, num_honest=14, num_liars=3 * bool(attack), seed=seed)
        for attack in ATTACKS:
            yield Case(attack, num_liars=1, seed=seed)
    for limits in ("", OPEN):
        yield Case(has_own_texts=True, limits=limits)


class HostileSwarm(Swarm):
    """A swarm of the lab in which all replicas from `num_honest` on are liars."""

    def __init__(self, material: Material, plan: Plan, case: Case, *, limit_s: float) -> None:
        super().__init__(material, plan, limit_s=limit_s, claimed=CLAIMED)
        self._num_honest, self._attack = case.num_honest, case.attack
        self._lies: dict[str, Lies] = {}

    def _start(self, number: int, donor: LabReplica | None) -> None:
        super()._start(number, donor)
        if number >= self._num_honest:
            liar = self.live[number]
            liar.weights.add = lambda start, halves: None  # it takes nothing
            self._lies[liar.name] = Lies(Attack(self._attack), self.stack.flat[number].clone(), seed=self.plan.seed)

    def _coded(self, one: LabReplica, other: LabReplica, part: Slice) -> tuple[list[Coding], int]:
        liars = [replica for replica in (one, other) if replica.name in self._lies]
        if len(liars) != 1:
            return super()._coded(one, other, part)
        [liar], bounds = liars, one.weights.units.bounds(part)
        victim = other if liar is one else one
        honest, own = victim.weights.read(*bounds), liar.weights.read(*bounds)
        lie = self._lies[liar.name].tell(victim.name, own, honest, *bounds)

        def read_lie(start: int, stop: int) -> Tensor:
            return lie

        with patch.object(liar.weights, "read", read_lie), patch.object(liar.coder, "propose", propose_nothing):
            return super()._coded(one, other, part)

    def _close(self) -> None:
        super()._close()  # in which liars lie as before
        for number in [*self.live]:
            if number >= self._num_honest:
                del self.live[number]


def run(case: Case) -> dict[str, Any]:
    """Run a case, and return its row."""
    began_s, num = time.monotonic(), case.num_honest + case.num_liars
    spec, texts = ladder_spec(replace(CELL, seed=case.seed), 0), {"text": make(CACHE)}
    link = replace(IDEAL, name=CELL.link, up_mbit_s=float(CELL.link), down_mbit_s=float(CELL.link), delay_ms=5)
    plan = Plan(num, case.seed, STEP_S, (1.0,) * num, (link,), evaluations=1)
    with tempfile.TemporaryDirectory() as folder, patch.dict(vars(update_filter), NO_LIMITS if case.limits else {}):
        if case.has_own_texts:
            spec, texts = spec.with_changes({"data.source": "own"}), own_texts(Path(folder), case.num_honest)
        material = Material.of(spec, texts, seed=case.seed)
        lab = HostileSwarm(material, plan, case, limit_s=SIZES[CELL.size].steps * STEP_S * PART)
        result = run_virtual(lab.run())
    honest = lab.all[: case.num_honest]
    judged, clipped = (
        sum(getattr(each.metrics, name) for each in honest) for name in ("judged_pieces", "clipped_pieces")
    )
    return asdict(case) | {
        "loss": result.loss,
        "spread": result.spread,
        "clipped": clipped / judged,
        "swaps": fmean(len(each.swaps) for each in honest),
        "wall_s": time.monotonic() - began_s,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each case but for its seed."""
    found = {cell_of(Case, row): row for row in rows}
    lines = [f"{'':44}{'loss':>8} {'change':>8}  clipped  spread  loss of each seed"]
    for first in dict.fromkeys(replace(case, seed=0) for case in found):
        seeds = [case for case in found if replace(case, seed=0) == first]
        against = replace(first, attack="", num_liars=0) if first.attack else replace(first, limits=OPEN)
        rows_of = [found[case] for case in seeds]
        others = [row["loss"] for case, row in found.items() if replace(case, seed=0) == against]
        change = (
            ""
            if against == first or not others
            else f"{100 * (fmean(row['loss'] for row in rows_of) / fmean(others) - 1):+.1f} %"
        )
        means = {name: fmean(row[name] for row in rows_of) for name in ("loss", "clipped", "spread")}
        lines.append(
            f"{first.name:44}{means['loss']:8.4f} {change:>8}  {100 * means['clipped']:4.0f} %  "
            f"{100 * means['spread']:4.1f} %  " + " ".join(f"{row['loss']:.4f}" for row in rows_of)
        )
    honest = [
        row["loss"]
        for case, row in found.items()
        if not case.attack and case == Case(limits=case.limits, seed=case.seed)
    ]
    if len(honest) > 1:
        noise = 100 * stdev(honest) / fmean(honest)
        lines.append(
            f"noise: the losses of {len(honest)} honest swarms of 8 have a standard deviation of {noise:.1f} %"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    command(__doc__, OUT, lambda found: cases(), run, table, name=lambda case: case.name)
