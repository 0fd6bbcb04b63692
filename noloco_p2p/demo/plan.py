"""Plans a demo: its spec, and the number of inner steps that this machine can take in a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noloco_p2p.errors import SettingsError
from noloco_p2p.flow.limits import IN_FLIGHT_SHARE
from noloco_p2p.presets import PRESETS
from noloco_p2p.spec import TrainerSpec

MEASURED_S, MEASURED_STEPS = 3.0, 8  # minimum seconds and inner steps of a measurement, after the first step
FEWEST_STEPS = 60
MANY_STEPS = 10_000  # total steps of the spec that is checked and measured before the number of steps is known
UPKEEP = 1.35  # time of a step with swaps, evaluation and the network thread, relative to the time of a bare step
START_AND_END_S = 12.0  # for joining, closing swaps, leaving and merging, not counting the steps below
START_AND_END_STEPS = (
    30  # these steps take as long as the evaluations at start and end and the measurements of each peer
)
MICROBATCH = 2  # sequences; with 1, the streams would cost as much as the compute; with 4, stages would wait
PIPELINE_UPKEEP = 2.4  # the UPKEEP of a pipeline, which also has codecs and streams between stages


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The plan of a demo.

    `folder` holds the spec, a folder for each peer with its log, and the exported model. If `num_steps` is None, the
    demo takes as many steps as this machine can take in `minutes` minutes.
    """

    folder: Path
    num_peers: int = 4
    num_steps: int | None = None
    minutes: float = 4.0
    port_base: int = 0  # peer i listens on port_base + 2 i; 0 = free ports
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted fields of the spec
    chaos_seed: int | None = None  # determines which peers are killed and restarted, and when
    num_stages: int = 1

    def check(self) -> None:
        """Check the plan before anything starts. Raises SettingsError or SpecError if the plan is invalid."""
        spec, stages = self.spec(self.num_steps or MANY_STEPS), self.num_stages
        if spec.pipeline.stages != stages:
            raise SettingsError(
                f"--set pipeline.stages={spec.pipeline.stages} is not allowed in the demo; use --stages instead"
            )
        if not spec.model.pretrained and spec.model.num_layers < stages:
            raise SettingsError(
                f"--stages {stages}: the model has {spec.model.num_layers} blocks, and each stage needs at least one; "
                f"add blocks with --set model.num_layers={stages}"
            )
        if self.num_peers < stages:
            raise SettingsError(
                f"--peers {self.num_peers} is too few: each of the {stages} stages needs at least one peer"
            )
        if stages > 1 and self.chaos_seed is not None and self.num_peers < 2 * stages:
            raise SettingsError(
                f"--chaos with --peers {self.num_peers}: {stages} stages need {2 * stages} peers (two per stage), "
                "because a stage loses its weights if its only peer is killed"
            )

    def stage(self, index: int) -> int | None:
        """Return the stage of peer `index`, or None in a run without stages."""
        return index % self.num_stages if self.num_stages > 1 else None

    def spec(self, num_steps: int) -> TrainerSpec:
        """Return the preset `tiny` with a schedule of `num_steps`."""
        tiny = PRESETS["tiny"]
        changes = {
            "name": "demo",
            "train.total_steps": num_steps,
            "train.warmup_steps": min(tiny.train.warmup_steps, num_steps // 4),
        }
        if self.num_stages > 1:
            changes |= {
                "model.parameter_seeds": True,
                "pipeline.stages": self.num_stages,
                "pipeline.microbatch": MICROBATCH,
            }
        return tiny.with_changes(changes, origin="--steps").with_changes(dict(self.changes), origin="--set")


def step_s_of_all(plan: DemoPlan, spec: TrainerSpec, *, step_s: float, num_cores: int) -> float:
    """Return the seconds that each peer, or each head of a pipeline, needs for one inner step.

    `step_s` is the time of an inner step with one thread while every core is busy. For a pipeline, it is the sum over
    the stages.
    """
    if plan.num_stages == 1:
        return step_s * UPKEEP * max(1.0, plan.num_peers / num_cores)
    num_heads = -(-plan.num_peers // plan.num_stages)
    in_flight = max(1, int(IN_FLIGHT_SHARE * spec.train.batch_size / spec.pipeline.microbatch))
    return step_s * PIPELINE_UPKEEP * max(num_heads / num_cores, 1 / min(in_flight, plan.num_stages))


def steps_that_fit(seconds: float, *, each_s: float) -> int:
    """Return the number of inner steps per peer that fit into `seconds`, as a multiple of 10 and at least 60."""
    fitting = (seconds - START_AND_END_S) / each_s - START_AND_END_STEPS
    return max(FEWEST_STEPS, int(fitting) // 10 * 10)


def measure_step_s(spec: TrainerSpec) -> float:
    """Measure how many seconds an inner step takes on random tokens with one thread. Call it in a separate process."""
    import torch

    from noloco_p2p.trainer.inner_step import InnerStep
    from noloco_p2p.trainer.model import build_model

    torch.set_num_threads(1)
    size = (spec.train.batch_size, spec.data.sequence_length)
    step = InnerStep(build_model(spec.model, sequence_length=spec.data.sequence_length), spec.train)
    batch = torch.randint(0, min(256, spec.model.vocab_size or 256), size)

    def timed() -> float:
        began_s = time.monotonic()
        step(batch, progress=0.0)
        return time.monotonic() - began_s

    timed()
    return _lower_quartile_s(timed)


def measure_pipeline_s(spec: TrainerSpec) -> float:
    """Measure how many seconds one head's batch takes, summed over all stages. Call it in a separate process."""
    import torch

    from noloco_p2p.trainer.cut import cut_of
    from noloco_p2p.trainer.stage import build_stage
    from noloco_p2p.trainer.stage_work import StageWork

    torch.set_num_threads(1)
    length, cut = spec.data.sequence_length, cut_of(spec)
    works = [
        StageWork(build_stage(spec.model, cut, index=stage, sequence_length=length), spec) for stage in range(len(cut))
    ]
    microbatch_s = _lower_quartile_s(lambda: sum(work.probe() for work in works))
    return microbatch_s * spec.train.batch_size / spec.pipeline.microbatch


def _lower_quartile_s(measure: Callable[[], float]) -> float:
    """Return the lower quartile of many measurements, because other programs may slow down some of them."""
    durations_s: list[float] = []
    while sum(durations_s) < MEASURED_S or len(durations_s) < MEASURED_STEPS:
        durations_s.append(measure())
    return sorted(durations_s)[len(durations_s) // 4]


def cut_model(spec: TrainerSpec) -> tuple[int, ...]:
    """Return the number of blocks in each stage. Call it in a process that has imported torch.

    Raises SpecError if there are more stages than blocks.
    """
    from noloco_p2p.trainer.cut import cut_of
    from noloco_p2p.trainer.stage_needs import StageNeeds

    return cut_of(StageNeeds.of(spec, spec.pipeline.stages).spec)
