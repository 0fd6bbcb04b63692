"""Try changes to the swap that send no more bytes: which partner to draw, what to share, and when to swap.

    python benchmarks/study/leads.py [--seeds 0,1,2] [--json FILE]

Each such change is a lead. The script prints one line per case. With --json, the file is written after every case, and
cases that it already contains are skipped.

**Setting.** The toy with Muon at 24e-3, 0 1 1, modulo8 and int4, 80 rounds of 5 steps, waiting, closing rounds, 8
replicas, 400 steps. With the same seed, a lead and today's swap have the same start and the same data.

**Budget.** Stated before the first run. Every lead has three seeds and at most five runs of 8 replicas: a lead with a
setting has two values on seed 0, and the better of them runs on the other seeds. `draw` also runs with 4 replicas,
where the gain should be largest. This takes about 13 minutes on one core.

**Decision.** Stated before the first run. A lead is kept if it ends lower than today's swap in each of the three seeds,
each time by more than the standard deviation of today's losses over the three seeds. Anything less is "no gain".

draw: `Pairing` draws uniformly from all live peers; the lead draws from the half that it met longest ago. As today, a
    peer that waits for this one goes first. If no peer of that half has time, the lead draws from all peers.
align A: an inner step is (1 - A) times the peer's own step plus A times the mean step of the pair in its last round
    (after arXiv 2510.27403, which mixes directions before the step). Both partners know that mean when a round begins.
quasi-global A: at the end of a round, Muon's momentum of each matrix is turned towards the mean outer gradient of the
    pair: (1 - A) times itself plus A times the other, negated and scaled to the norm of the momentum (after 2102.04761,
    whose momentum consists of differences of weights alone). Parameters of AdamW keep their moments.
rounds by the square of the rate: their length grows as the learning rate falls, by its inverse square, from 2 to 20
    steps (QSR, 2310.14423). As there, the warm-up counts as the peak.
rounds by the rate: by its inverse. The distance of partners at a swap grows with the rate and with the number of steps,
    so this keeps it about constant.
late swaps: the lengths of "by the square of the rate" in reverse order, with most swaps at the end (2507.06542).
The last three have 80 rounds, so they send as many bytes as today.

Left out: a second slow momentum beside the fast one (MT-DAO, 2510.05361), because it needs a separate search over two
time constants, and inner moments at a third of the frequency (DES-LOC), because averaged moments gained nothing
(docs/results.md).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import torch
from study import CLOSED, MODULO, TOY, averaging, machine, muon, show
from torch import Tensor

from noloco_p2p.gossip.pairing import Pairing
from noloco_p2p.gossip.round_length import RoundLength
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.optim.muon import Muon
from noloco_p2p.optim.schedule import learning_rate
from noloco_p2p.outer import outer_state
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.run import seeded
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec, TrainSpec

STEPS, ROUNDS = 400, 80
SHORTEST, LONGEST = 2, 20

Watcher = Callable[[Tensor], None]  # receives the mean outer gradient of each round of a replica
Change = Callable[[SimulatedReplica], Watcher | None]  # applies a lead to a replica before it runs


class LongestAgo(Pairing):
    def choose(self, live: Sequence[Candidate], now_s: float, *, latest_s: float) -> Candidate | None:
        met = {peer_id: index for index, peer_id in enumerate(self._partners)}  # the most recent partner comes last
        half = sorted(live, key=lambda peer: met.get(peer.peer_id, -1))[: ceil(len(live) / 2)]
        if not any(self._in_time(peer, now_s, latest_s) for peer in self._eligible(half)):
            return super().choose(live, now_s, latest_s=latest_s)
        first = [peer for peer in live if peer.peer_id == self._target or peer.peer_id in self._waiting]
        return super().choose([*half, *(peer for peer in first if peer not in half)], now_s, latest_s=latest_s)


def draw_longest_ago(replica: SimulatedReplica) -> None:
    pairing = replica.driver.round._pairing
    replica.driver.round._pairing = LongestAgo(pairing._rng)


class Aligned:
    """An `InnerStep` whose steps are aligned with the last mean step of the pair."""

    def __init__(self, replica: SimulatedReplica, share: float) -> None:
        self.restore = replica.inner.restore
        self._inner = replica.inner
        self._weights = replica.state.parameters
        self._share = share
        self._rates = 0.0  # sum of the learning rates of the round
        self._mean: Tensor | None = None  # mean step of the pair in its last round, per unit of learning rate

    def __call__(self, batch: Tensor, *, progress: float) -> Tensor:
        before = self._weights.read(0, self._weights.num_elements)
        loss = self._inner(batch, progress=progress)
        rate = learning_rate(self._inner.train, progress)
        self._rates += rate
        if self._mean is not None:
            own = self._weights.read(0, self._weights.num_elements) - before
            self._weights.write(0, before + (1 - self._share) * own + self._share * rate * self._mean)
        return loss

    def watch(self, gradient: Tensor) -> None:
        if self._rates:  # closing rounds have no steps
            self._mean, self._rates = gradient / self._rates, 0.0


def align(share: float) -> Change:
    def change(replica: SimulatedReplica) -> Watcher:
        aligned = Aligned(replica, share)
        replica.inner = aligned  # pyright: ignore[reportAttributeAccessIssue]
        return aligned.watch

    return change


def quasi_global(share: float) -> Change:
    def change(replica: SimulatedReplica) -> Watcher:
        (optimizer,) = (each for each in replica.inner.optimizers if isinstance(each, Muon))

        def watch(gradient: Tensor) -> None:
            for name, towards in replica.state.parameters.by_name(gradient).items():
                momentum = optimizer.state.get(replica.inner.trainable[name], {}).get("momentum_buffer")
                if momentum is not None and (length := towards.norm()):
                    momentum.mul_(1 - share).sub_(towards, alpha=float(share * momentum.norm() / length))

        return watch

    return change


class Planned(RoundLength):
    """Round lengths that are fixed in advance. Closing rounds use the last of these lengths."""

    def __init__(self, replica: SimulatedReplica, lengths: Sequence[int]) -> None:
        super().__init__(replica._spec.outer)
        self._lengths = iter(lengths)

    def next(self, seconds_per_step: float | None, *, others_s: Sequence[float] = ()) -> int:
        self.inner_steps = next(self._lengths, self.inner_steps)
        return self.inner_steps


def planned(power: float, *, is_reversed: bool = False) -> Change:
    def change(replica: SimulatedReplica) -> None:
        lengths = planned_lengths(replica._spec.train, power)
        replica._rounds.length = Planned(replica, lengths[::-1] if is_reversed else lengths)

    return change


def planned_lengths(train: TrainSpec, power: float) -> list[int]:
    """Return ROUNDS lengths with the sum STEPS, proportional to the learning rate to the power of -`power`."""
    warmup = train.warmup_steps / train.total_steps
    rates = [learning_rate(train, max(warmup, step / STEPS)) / train.learning_rate for step in range(STEPS)]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(_swaps(rates, power, middle)) < ROUNDS:
            low = middle
        else:
            high = middle
    ends, total = [0], 0.0
    for step, swaps in enumerate(_swaps(rates, power, high), start=1):
        total += swaps
        if total >= len(ends) - 1e-6:
            ends.append(step)
    assert (ends[-1], len(ends)) == (STEPS, ROUNDS + 1), "lengths do not fit"
    return [stop - start for start, stop in pairwise(ends)]


def _swaps(rates: Sequence[float], power: float, at_peak: float) -> list[float]:
    """Return the number of swaps at each step."""
    return [min(1 / SHORTEST, max(1 / LONGEST, at_peak * rate**power)) for rate in rates]


@dataclass(frozen=True, slots=True)
class Lead:
    """A lead. `longest` is the maximum number of inner steps in a round; partners refuse longer rounds.

    Of the leads with the same `family`, only the best one on the first seed runs on the other seeds.
    """

    name: str
    change: Change = lambda replica: None
    family: str = ""
    num_replicas: int = 8
    longest: int = 5


LEADS = [
    Lead("today"),
    Lead("draw", draw_longest_ago),
    *(Lead(f"align {share:g}", align(share), "align") for share in (0.1, 0.3)),
    *(Lead(f"quasi-global {share:g}", quasi_global(share), "quasi-global") for share in (0.3, 0.6)),
    Lead("rounds by the square of the rate", planned(2), longest=LONGEST),
    Lead("rounds by the rate", planned(1), longest=LONGEST),
    Lead("late swaps", planned(2, is_reversed=True), longest=LONGEST),
    Lead("4 replicas: today", num_replicas=4),
    Lead("4 replicas: draw", draw_longest_ago, num_replicas=4),
]


def run_lead(lead: Lead, seed: int) -> dict[str, Any]:
    changes = {"train.total_steps": STEPS, **muon(24e-3), **averaging(lead.longest), **MODULO, **CLOSED}
    spec = TrainerSpec.load(TOY).with_changes(changes, origin=lead.name)
    watchers: dict[int, Watcher] = {}
    step = outer_state.outer_step

    def on_made(replicas: Sequence[SimulatedReplica]) -> None:
        for replica in replicas:
            if watcher := lead.change(replica):
                watchers[replica.state.slow_weights.data_ptr()] = watcher

    def watched(slow: Tensor, momentum: Tensor | None, mean: Tensor, offset: Tensor | None, **settings: float) -> None:
        step(slow, momentum, mean, offset, **settings)
        if watcher := watchers.get(slow.data_ptr()):  # the toy has one chunk, so the first address identifies a replica
            watcher(mean)

    outer_state.outer_step = watched
    began_s = time.process_time()
    try:
        result = simulate_swarm(
            Material.of(seeded(spec, seed), {}), Plan(lead.num_replicas, seed=seed), on_made=on_made
        )
    finally:
        outer_state.outer_step = step
    cpu_s = round(time.process_time() - began_s, 1)
    return {"case": lead.name, "seed": seed, "cpu_s": cpu_s, "num_replicas": lead.num_replicas, **result.as_dict()}


def missing(seeds: Sequence[int], rows: Sequence[dict[str, Any]]) -> Iterator[tuple[Lead, int]]:
    """Yield the missing runs. Reads the rows again after every run, because the first seed selects leads."""
    for seed in seeds:
        for lead in LEADS:
            losses = {row["case"]: row["loss"] for row in rows if row["seed"] == seeds[0]}
            family = [other.name for other in LEADS if lead.family and other.family == lead.family]
            goes_on = seed == seeds[0] or not family or lead.name == min(family, key=losses.__getitem__)
            if goes_on and (lead.name, seed) not in {(row["case"], row["seed"]) for row in rows}:
                yield lead, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"machine": machine(), "steps": STEPS, "rows": []}
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
    rows = report["rows"]
    for lead, seed in missing([int(seed) for seed in args.seeds.split(",")], rows):
        rows.append(run_lead(lead, seed))
        print(show(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
