"""Simulates a pipeline, and formats the results as JSON and as a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.errors import SettingsError
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import num_rooms
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.replica import now_s
from noloco_p2p.simulate.result import SWAP_COLUMNS, Swaps
from noloco_p2p.simulate.staged import StagedPlan, StagedSwarm, StageNode
from noloco_p2p.telemetry.console import aligned, mib
from noloco_p2p.trainer.cut import link_tokens_per_s
from noloco_p2p.trainer.swarm_evaluation import spread

COLUMNS = (
    *("stage", "replicas", "parameters", "steps", "computing %", "up %", "down %", "late %", "lost %"),
    *("spread %", *SWAP_COLUMNS, "sent per peer", "of which swaps"),
)
NUM_PATHS = 8  # number of random paths over which the loss is averaged


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
        pace = _pace(swarm)
        busy = {node.name: node.busy_shares() for node in swarm.nodes.values()}
        await swarm.finish()
        weights = [[node.current_weights() for node in swarm.living(stage)] for stage in range(plan.num_stages)]
        for stage, own in enumerate(weights):
            if not own:
                raise SettingsError(f"every replica of stage {stage} is gone, so there is no result; reduce --churn")
        stages = tuple(_stage(swarm, stage, own, busy) for stage, own in enumerate(weights))
        heads = [node.flow for node in swarm.stages[0]]
        result = StagedResult(
            rule="noloco" if plan.gossips else "local",
            loss=_path_loss(swarm, weights),
            merged_loss=swarm.merged_loss(weights),
            predicted_tokens_per_s=min(stage.tokens_per_s for stage in stages),
            num_lost=sum(head.num_lost for head in heads),
            num_done=sum(head.num_done for head in heads),
            num_rooms=plan.window or num_rooms(swarm.spec),
            stages=stages,
            curve=tuple(swarm.curve),
            **pace,
        )
        await swarm.stop()
        return result

    return run_virtual(run())


def _pace(swarm: StagedSwarm) -> dict[str, Any]:
    """Return the fields of the result that describe the time in which the heads were training.

    The speed is that over the middle half of the tokens, when windows have grown and no head has finished yet.
    """
    each = swarm.spec.pipeline.microbatch * swarm.spec.data.sequence_length
    times = swarm.losses_s
    begin, end = len(times) // 4, 3 * len(times) // 4
    seconds = times[end] - times[begin] if end > begin else 0.0
    return {
        "virtual_s": now_s(),
        "tokens": each * len(times),
        "tokens_per_s": each * (end - begin) / seconds if seconds else 0.0,
        "latency_s": median(head.flow.deadlines.median_s for head in swarm.stages[0] if isinstance(head.flow, Head)),
    }


def _stage(
    swarm: StagedSwarm, stage: int, weights: Sequence[Tensor], busy: Mapping[str, tuple[float, ...]]
) -> StageResult:
    nodes, flows = swarm.living(stage), [node.flow for node in swarm.stages[stage]]
    counted = sum(flow.num_done for flow in flows)
    lost, late = sum(flow.num_lost for flow in flows), sum(flow.num_late for flow in flows)
    compute, up, down = map(fmean, zip(*(busy[node.name] for node in nodes), strict=True))
    return StageResult(
        stage=stage,
        num_replicas=len(nodes),
        num_parameters=weights[0].numel(),
        steps=fmean(node.steps for node in nodes),
        tokens_per_s=sum(_predicted_tokens_per_s(swarm, node) for node in nodes),
        compute_busy=compute,
        up_busy=up,
        down_busy=down,
        counted=counted,
        lost_share=lost / max(1, lost + counted),
        late_share=late / max(1, counted),
        spread=spread(weights, torch.stack(list(weights)).mean(0)),
        swaps=Swaps.mean(node.swap_figures() for node in nodes),
        sent_bytes=fmean(node.link.up.flow_bytes + node.link.up.swap_bytes for node in nodes),
        swap_bytes=fmean(node.link.up.swap_bytes for node in nodes),
    )


def _predicted_tokens_per_s(swarm: StagedSwarm, node: StageNode) -> float:
    """Return the lower of the speeds that the link and the compute of a replica allow."""
    profile = swarm.plan.link(node.stage, node.number)
    rate = min(profile.up_mbit_s, profile.down_mbit_s)
    carried = link_tokens_per_s(swarm.spec.pipeline, node.work.stage.hidden_size, mbit_s=rate)
    return min(carried, node.flops_per_s / sum(node.flops.values()))


def _path_loss(swarm: StagedSwarm, weights: Sequence[Sequence[Tensor]]) -> float:
    rng = random.Random(f"paths/{swarm.plan.seed}")
    paths = [[rng.choice(own) for own in weights] for _ in range(NUM_PATHS)]
    return fmean(swarm.loss(path) for path in paths)
