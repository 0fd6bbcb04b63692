"""Simulates a pipeline, and formats the results as JSON and as a table."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.errors import SettingsError
from noloco_p2p.flow.head import Head
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.result import SWAP_COLUMNS, Swaps
from noloco_p2p.simulate.stage_plan import StagedPlan
from noloco_p2p.simulate.staged import StagedSwarm, StageNode
from noloco_p2p.telemetry.console import aligned, mib
from noloco_p2p.trainer.cut import link_tokens_per_s
from noloco_p2p.trainer.swarm_evaluation import spread

COLUMNS = (
    *("stage", "replicas", "parameters", "steps", "computing %", "up %", "down %", "late %", "lost %"),
    *("spread %", *SWAP_COLUMNS, "sent per peer", "of which swaps"),
)
NUM_PATHS = 8  # number of random paths over which the loss is averaged


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds while the heads are training.

    `tokens_per_s` is the speed of the whole pipeline over the middle half of its tokens, when windows have grown and no
    head has finished yet. `busy` has, for each node, the shares of time in which its compute, up link and down link are
    busy.
    """

    virtual_s: float
    tokens: int
    tokens_per_s: float
    latency_s: float  # median, from the sending of a microbatch to the end of its backward pass
    busy: dict[str, tuple[float, float, float]]

    @classmethod
    def of(cls, swarm: StagedSwarm) -> Speed:
        now_s = asyncio.get_running_loop().time()
        each = swarm.spec.pipeline.microbatch * swarm.spec.data.sequence_length
        times = swarm.losses_s
        begin, end = len(times) // 4, 3 * len(times) // 4
        seconds = times[end] - times[begin] if end > begin else 0.0
        latencies = [head.flow.deadlines.median_s for head in swarm.stages[0] if isinstance(head.flow, Head)]
        return cls(
            now_s,
            each * len(times),
            each * (end - begin) / seconds if seconds else 0.0,
            median(latencies),
            {
                node.name: (node.busy_s / now_s, node.link.up.busy_s / now_s, node.link.down.busy_s / now_s)
                for node in swarm.nodes.values()
            },
        )


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of one stage. Means are over the replicas present at the end.

    Shares of time refer to the time in which the heads are training.
    """

    stage: int
    num_replicas: int
    num_parameters: int
    steps: float  # inner steps
    tokens_per_s: float  # limit, computed from the links and the compute of this stage
    compute_busy: float
    up_busy: float
    down_busy: float
    counted: int  # backward passes of all replicas; for a head, those of its front
    lost_share: float  # share of the microbatches that reached a stage without a backward pass there
    late_share: float  # share of the backward passes that are at least one inner step late
    spread: float
    swaps: Swaps
    sent_bytes: float  # over the link, by the pipeline and by swaps
    swap_bytes: float

    def row(self) -> tuple[str, ...]:
        shares = (self.compute_busy, self.up_busy, self.down_busy)
        return (
            *(str(self.stage), str(self.num_replicas), f"{self.num_parameters:,}", f"{self.steps:.0f}"),
            *(f"{100 * share:.0f}" for share in shares),
            *(f"{100 * self.late_share:.1f}", f"{100 * self.lost_share:.1f}"),
            *(f"{100 * self.spread:.3f}", *self.swaps.cells(), mib(self.sent_bytes), mib(self.swap_bytes)),
        )


@dataclass(frozen=True, slots=True)
class StagedResult:
    """The result of one rule. Losses are final validation losses in nats per token."""

    rule: str
    loss: float  # mean over random paths, which have one replica of each stage
    merged_loss: float  # loss of the model that consists of the mean of each stage
    tokens: int  # tokens that reached a loss, in all sequences
    virtual_s: float  # until the last head has finished
    tokens_per_s: float
    predicted_tokens_per_s: float  # of the slowest stage
    latency_s: float
    num_lost: int  # microbatches that a head gave up, or whose gradient for its front did not arrive
    num_done: int
    num_rooms: int
    stages: tuple[StageResult, ...]
    curve: tuple[tuple[float, float, float], ...]  # progress, virtual seconds, loss of the merged weights

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        share = self.tokens_per_s / self.predicted_tokens_per_s
        lost = self.num_lost / max(1, self.num_lost + self.num_done)
        return [
            f"loss {self.loss:.4f} over random paths, {self.merged_loss:.4f} for the merged stages",
            f"{self.tokens_per_s:,.0f} tokens/s, {100 * share:.0f} % of the {self.predicted_tokens_per_s:,.0f} that "
            f"links and compute allow; {self.tokens:,} tokens in {self.virtual_s:,.1f} s of virtual time",
            f"a microbatch takes {self.latency_s:.2f} s; "
            f"{100 * lost:.1f} % of the {self.num_lost + self.num_done:,} microbatches were lost; "
            f"each head has at most {self.num_rooms} in flight",
            *aligned([COLUMNS, *(stage.row() for stage in self.stages)], num_left=0),
        ]


def simulate_stages(
    material: Material, plan: StagedPlan, *, on_made: Callable[[list[StageNode]], None] | None = None
) -> StagedResult:
    """Run the simulation. `material` must belong to a spec from `staged`.

    `on_made` is called with the nodes before they run, so that the caller can inspect them afterwards.
    """

    async def run() -> StagedResult:
        swarm = StagedSwarm(material, plan)
        await swarm.train(on_made)
        speed = Speed.of(swarm)
        await swarm.finish()
        result = judge_stages(swarm, speed)
        await swarm.stop()
        return result

    return run_virtual(run())


def judge_stages(swarm: StagedSwarm, speed: Speed) -> StagedResult:
    weights = [[node.current_weights() for node in swarm.living(stage)] for stage in range(swarm.plan.num_stages)]
    for stage, own in enumerate(weights):
        if not own:
            raise SettingsError(f"every replica of stage {stage} is gone, so there is no result; reduce --churn")
    heads = [node.flow for node in swarm.stages[0]]
    stages = tuple(_stage(swarm, stage, own, speed) for stage, own in enumerate(weights))
    return StagedResult(
        rule="noloco" if swarm.plan.gossips else "local",
        loss=_path_loss(swarm, weights),
        merged_loss=swarm.merged_loss(weights),
        tokens=speed.tokens,
        virtual_s=speed.virtual_s,
        tokens_per_s=speed.tokens_per_s,
        predicted_tokens_per_s=min(stage.tokens_per_s for stage in stages),
        latency_s=speed.latency_s,
        num_lost=sum(head.num_lost for head in heads),
        num_done=sum(head.num_done for head in heads),
        num_rooms=swarm.plan.num_rooms(swarm.spec),
        stages=stages,
        curve=tuple(swarm.curve),
    )


def predicted_tokens_per_s(swarm: StagedSwarm, nodes: Iterable[StageNode]) -> float:
    """Predict the speed of a stage. Each replica contributes the lower of the rates that its link and its compute
    allow.
    """
    spec = swarm.spec
    total = 0.0
    for node in nodes:
        profile = swarm.plan.link(node.stage, node.number)
        rate = min(profile.up_mbit_s, profile.down_mbit_s)
        carried = link_tokens_per_s(spec.pipeline, node.work.stage.hidden_size, mbit_s=rate)
        total += min(carried, node.flops_per_s / sum(node.flops.values()))
    return total


def _stage(swarm: StagedSwarm, stage: int, weights: Sequence[Tensor], speed: Speed) -> StageResult:
    nodes = swarm.living(stage)
    counted, lost, late = (
        sum(getattr(node.flow, name) for node in swarm.stages[stage]) for name in ("num_done", "num_lost", "num_late")
    )
    busy = [speed.busy[node.name] for node in nodes]
    return StageResult(
        stage=stage,
        num_replicas=len(nodes),
        num_parameters=weights[0].numel(),
        steps=fmean(node.steps for node in nodes),
        tokens_per_s=predicted_tokens_per_s(swarm, nodes),
        compute_busy=fmean(each[0] for each in busy),
        up_busy=fmean(each[1] for each in busy),
        down_busy=fmean(each[2] for each in busy),
        counted=counted,
        lost_share=lost / max(1, lost + counted),
        late_share=late / max(1, counted),
        spread=spread(weights, torch.stack(list(weights)).mean(0)),
        swaps=Swaps.mean(node.swap_figures() for node in nodes),
        sent_bytes=fmean(node.link.up.flow_bytes + node.link.up.swap_bytes for node in nodes),
        swap_bytes=fmean(node.link.up.swap_bytes for node in nodes),
    )


def _path_loss(swarm: StagedSwarm, weights: Sequence[Sequence[Tensor]]) -> float:
    rng = random.Random(f"paths/{swarm.plan.seed}")
    paths = [[rng.choice(own) for own in weights] for _ in range(NUM_PATHS)]
    return fmean(swarm.loss(path) for path in paths)
