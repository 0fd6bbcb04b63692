"""Measure the throughput of a pipeline over real sockets, its cost, and how much throughput remains under churn.

    python benchmarks/flow.py [--quick] [--json FILE]

carried   3 stages of 2 replicas on lines of 20 and 100 Mbit/s (cubic) with a round trip of 50 ms. Each peer is a
          process in its own network namespace. Stages forward what they receive; a microbatch has 512 tokens of width
          4096 in int8. A batch has 32 or 64 microbatches, and a quarter of it may be in flight. The throughput is
          compared with the rate of a line divided by the bytes of activations and gradients per token. The
          measurement is repeated on loopback, which stands for 1 Gbit/s, but there the processors are the limit.
swaps     as above, on 100 Mbit/s, with a round of swaps within each stage at each inner step
churn     4 stages of 6 replicas on a virtual clock, on links of 100 Mbit/s with a one-way delay of 50 ms. A peer is
          killed every 20 s, and 20 s later a new one starts to fetch its state.

This takes about ten minutes on two idle cores (three minutes with --quick), and needs root (see netlab.py).
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from claims import Claim, run
from netlab import LabError, NetLab, home
from stage_peers import Bench, Counts, Pipeline, Place

from noloco_p2p.simulate.plan import Churn, Event
from noloco_p2p.simulate.run import simulate_stages
from noloco_p2p.simulate.stage_plan import StagedPlan
from noloco_p2p.simulate.stage_result import StagedResult
from noloco_p2p.simulate.stage_work import TaskFlops
from noloco_p2p.simulate.staged import staged
from noloco_p2p.spec import CodecSpec, DataSpec, ModelSpec, OuterSpec, PipelineSpec, TrainerSpec, TrainSpec
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.trainer.cut import link_bytes_per_token, link_tokens_per_s
from noloco_p2p.trainer.model import build_on_meta
from noloco_p2p.trainer.stage import measure as measure_parts

WIDTH, NUM_TOKENS = 4096, 512
BATCH, BATCHES = 32, (32, 64)  # microbatches
NUM_STAGES, NUM_REPLICAS = 3, 2
ROUND_TRIP_MS = 50.0
CARRIED, KEPT = 0.7, 0.6  # targets: shares of the arithmetic, and of the undisturbed rate
NEVER = 1_000_000  # inner steps: more than any run takes
MIB = 1 << 20
PRESSURE = Path("/proc/pressure/cpu")

TOY = Path(__file__).parent / "study" / "toy.toml"
HOP_S = 2048 * 4160 * 8 / 100e6  # of a microbatch on a link: 0.68 s, the time of 2,048 tokens in int8 at 100 Mbit/s
KILL_S, RETURN_S = 20.0, 20.0
FETCH_S = 150.0  # more than a newcomer takes to fetch a state, so that only peers that train are killed


def bench(*, batch: int = BATCH, inner_steps: int = NEVER) -> Bench:
    """Return a bench in which each stage swaps 12M parameters. `batch` is a number of microbatches."""
    spec = TrainerSpec(
        name="flow",
        model=ModelSpec(hidden_size=1024, num_layers=NUM_STAGES, num_heads=8, mlp_size=2816, parameter_seeds=True),
        data=DataSpec(sequence_length=NUM_TOKENS),
        train=TrainSpec(total_steps=NEVER, batch_size=batch, warmup_steps=1),
        outer=OuterSpec(inner_steps=inner_steps, max_wait_s=300.0, swap_momentum=False),
        codec=CodecSpec(slow_weights="int8", outer_gradient="int4"),
        pipeline=PipelineSpec(stages=NUM_STAGES, cut=(1,) * NUM_STAGES),
    )
    return Bench(spec, NUM_REPLICAS, WIDTH)


@dataclass(frozen=True, slots=True)
class Measured:
    """The difference between two readings of the counts of all peers of a pipeline."""

    seconds: float
    waited_s: float  # time in which a process of this machine waited for a core
    before: dict[Place, Counts]
    after: dict[Place, Counts]

    @property
    def num_tokens(self) -> int:
        return NUM_TOKENS * (sum(each.losses for each in self.after.values()) - self._sum_before("losses"))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def cpu_s(self) -> float:
        return sum(each.cpu_s for each in self.after.values()) - self._sum_before("cpu_s")

    @property
    def num_swaps(self) -> int:
        return sum(each.swaps for each in self.after.values()) - self._sum_before("swaps")

    @property
    def late_share(self) -> float:
        """The share of backward passes, over all stages, that are at least one inner step late."""
        counted = Counter[int]()
        for place, each in self.after.items():
            counted += each.lateness - self.before[place].lateness
        return 1 - counted[0] / counted.total()

    @property
    def lost_share(self) -> float:
        """The share of the heads' microbatches that were lost."""
        lost = self._of_heads("lost")
        return lost / (lost + self.num_tokens / NUM_TOKENS)

    @property
    def trip_s(self) -> float:
        """The median time from the forward pass of a microbatch at its head to its backward pass there."""
        heads = [place for place in self.after if place.stage == 0]
        return median(s for head in heads for s in self.after[head].trips_s[len(self.before[head].trips_s) :])

    @property
    def peak_bytes(self) -> int:
        return max(each.peak_bytes for each in self.after.values())

    def _sum_before(self, name: str) -> Any:
        return sum(getattr(each, name) for each in self.before.values())

    def _of_heads(self, name: str) -> int:
        heads = [place for place in self.after if place.stage == 0]
        return sum(getattr(self.after[head], name) - getattr(self.before[head], name) for head in heads)


def carry(bench: Bench, *, mbit_s: float, warm_s: float, seconds: float) -> Measured:
    """Measure a pipeline for `seconds`, after `warm_s` in which the heads' windows grow. `mbit_s=0` means loopback."""
    with contextlib.ExitStack() as stack:
        lab = None
        if mbit_s:
            line = home(rate_mbit_s=mbit_s, round_trip_ms=ROUND_TRIP_MS)
            lab = stack.enter_context(NetLab([line] * len(bench.places), congestion_control="cubic"))
        pipeline = stack.enter_context(Pipeline(bench, lab))
        time.sleep(warm_s)
        before, began_s, waited_s = pipeline.counts(), time.monotonic(), pressure_s()
        time.sleep(seconds)
        return Measured(time.monotonic() - began_s, pressure_s() - waited_s, before, pipeline.counts())


def pressure_s() -> float:
    """Return for how many seconds since boot some process waited for a core, or 0 if the kernel does not count them."""
    if not PRESSURE.exists():
        return 0.0
    return int(PRESSURE.read_text().split("\n")[0].rpartition("total=")[2]) / 1e6


def predicted(mbit_s: float) -> float:
    """Compute how many tokens/s the links can carry. Each microbatch passes through one replica of each stage."""
    return NUM_REPLICAS * link_tokens_per_s(bench().spec.pipeline, WIDTH, mbit_s=mbit_s)


def costs(name: str, found: Measured) -> list[Claim]:
    return [
        Claim(f"{name}: a microbatch, there and back", found.trip_s, "s"),
        Claim(f"{name}: at least an inner step late", 100 * found.late_share, "% of backwards"),
        Claim(f"{name}: lost", 100 * found.lost_share, "% of microb."),
        Claim(f"{name}: CPU, all peers", found.cpu_s / found.num_tokens * 1e6, "s/M tokens"),
        Claim(f"{name}: peak memory above the start", found.peak_bytes / MIB, "MiB/process"),
        Claim(f"{name}: some process waited for a core", 100 * found.waited_s / found.seconds, "% of the time"),
    ]


def carried(name: str, mbit_s: float, found: Measured) -> list[Claim]:
    share = found.tokens_per_s / predicted(mbit_s)
    return [
        Claim(f"{name}: tokens", found.tokens_per_s, "tokens/s"),
        Claim(f"{name}: tokens / arithmetic", share, "ratio", f">= {CARRIED}", share >= CARRIED),
        *costs(name, found),
    ]


def measure_carried(quick: bool) -> list[Claim]:
    slow, fast = ((25.0, 30.0), (15.0, 15.0)) if quick else ((50.0, 90.0), (25.0, 50.0))
    loopback = carry(bench(), mbit_s=0, warm_s=10.0, seconds=fast[1] / 2)
    claims = [Claim("loopback: tokens", loopback.tokens_per_s, "tokens/s"), *costs("loopback", loopback)]
    found: dict[tuple[int, int], Measured] = {}
    for batch in BATCHES:
        of_batch = bench(batch=batch)
        for mbit_s, (warm_s, seconds) in ((20, slow), (100, fast)):
            found[mbit_s, batch] = carry(of_batch, mbit_s=mbit_s, warm_s=warm_s, seconds=seconds)
            name = f"{mbit_s} Mbit/s, {of_batch.num_rooms} in flight"
            claims += carried(name, mbit_s, found[mbit_s, batch])
    swapping = carry(bench(inner_steps=1), mbit_s=100, warm_s=fast[0], seconds=fast[1])
    kept = swapping.tokens_per_s / found[100, BATCH].tokens_per_s
    claims += [
        Claim("100 Mbit/s with swaps: swaps, all peers", swapping.num_swaps, "swaps"),
        Claim("100 Mbit/s with swaps: tokens / without", kept, "ratio"),
    ]
    return claims + costs("100 Mbit/s with swaps", swapping)


# churn, on a virtual clock


def churn_spec(num_stages: int, steps: int) -> TrainerSpec:
    changes = {
        "model.num_layers": num_stages,
        "train.total_steps": steps,
        "train.batch_size": BATCH,
        "train.warmup_steps": 1,
        "outer.inner_steps": 5,
        "outer.swap_momentum": False,
        "codec.slow_weights": "modulo8",
        "codec.outer_momentum": "modulo8",
        "codec.outer_gradient": "int4",
    }
    return staged(TrainerSpec.load(TOY).with_changes(changes, origin="flow"), num_stages)


def churn_plan(spec: TrainerSpec, num_replicas: int) -> StagedPlan:
    """Return a plan in which a microbatch takes HOP_S to pass over a link, whatever its size.

    The busiest stage computes for half of that time in each direction.
    """
    tokens = spec.pipeline.microbatch * spec.data.sequence_length
    rate = tokens * link_bytes_per_token(spec.pipeline, spec.model.hidden_size) / 2 * 8 / 1e6 / HOP_S
    link = LinkProfile("flow", down_mbit_s=rate, up_mbit_s=rate, delay_ms=25, jitter_ms=0)
    model = build_on_meta(spec.model, sequence_length=spec.data.sequence_length)
    sizes = measure_parts(model, sequence_length=spec.data.sequence_length)
    stages, cut = spec.pipeline.stages, spec.pipeline.cut
    assert cut != "auto"
    busiest = max(TaskFlops.of(sizes, cut, stage).total for stage in range(stages))
    whole = 0.75 * sizes.num_blocks * sizes.block.flops + sizes.vocabulary.flops
    step_s = whole * spec.train.batch_size / spec.pipeline.microbatch / busiest * HOP_S
    return StagedPlan((num_replicas,) * stages, links=((link,),), step_s=step_s)


def with_kills(plan: StagedPlan, until_s: float) -> StagedPlan:
    """Return the plan with a kill every KILL_S. A seed picks a peer that trains, and a new peer replaces it."""
    rng = random.Random(0)
    there_from_s = {(stage, number): 0.0 for stage, most in enumerate(plan.num_replicas) for number in range(most)}
    numbers = list(plan.num_replicas)
    events: list[Event] = []
    for kill in range(1, int(until_s / KILL_S)):
        at_s = kill * KILL_S
        stage, victim = rng.choice([peer for peer, since_s in there_from_s.items() if since_s <= at_s])
        del there_from_s[stage, victim]
        there_from_s[stage, numbers[stage]] = at_s + RETURN_S + FETCH_S
        events.append(Event("crash", victim, at_s, stage))
        events.append(Event("join", numbers[stage], at_s + RETURN_S, stage))
        numbers[stage] += 1
    return replace(plan, num_replicas=tuple(numbers), churn=Churn(tuple(events)))


def simulated(spec: TrainerSpec, plan: StagedPlan) -> StagedResult:
    (result,) = simulate_stages(spec, plan)
    return result


def measure_churn(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    num_stages, num_replicas, steps = 4, 6, 3 if quick else 6
    spec = churn_spec(num_stages, steps)
    plan = churn_plan(spec, num_replicas)
    calm = simulated(spec, plan)
    disturbed = simulated(spec, with_kills(plan, 2 * calm.virtual_s))
    kept = disturbed.tokens_per_s / calm.tokens_per_s
    lost = disturbed.num_lost / (disturbed.num_lost + disturbed.num_done)
    name = f"churn, {num_stages} stages x {num_replicas}"
    return [
        Claim(f"{name}: undisturbed / arithmetic", calm.tokens_per_s / calm.predicted_tokens_per_s, "ratio"),
        Claim(f"{name}: kills", int(disturbed.virtual_s / KILL_S), f"in {disturbed.virtual_s:.0f} s"),
        Claim(f"{name}: lost at their heads", 100 * lost, "% of microb."),
        Claim(f"{name}: tokens/s / undisturbed", kept, "ratio", f">= {KEPT}", kept >= KEPT),
    ]


def measure(quick: bool) -> list[Claim]:
    return [*measure_carried(quick), *measure_churn(quick)]


if __name__ == "__main__":
    try:
        run(measure, doc=__doc__)
    except LabError as failure:
        sys.exit(f"flow: {failure}")
