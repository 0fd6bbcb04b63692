"""Compares rules by simulating each of them with the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from noloco_p2p.errors import SettingsError
from noloco_p2p.simulate.lockstep import RULES, simulate_lockstep
from noloco_p2p.simulate.material import CPU, Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.stage_plan import StagedPlan
from noloco_p2p.simulate.stage_result import StagedResult
from noloco_p2p.simulate.stage_result import simulate_stages as run_pipeline
from noloco_p2p.simulate.staged import staged
from noloco_p2p.simulate.swarm import NOLOCO, simulate_swarm
from noloco_p2p.spec import TrainerSpec

RULE_NAMES = (NOLOCO, *RULES)
STAGED_RULES = (NOLOCO, "local")


def check_rules(rules: Sequence[str], plan: Plan) -> None:
    """Raise SettingsError if a rule does not exist or does not support the plan."""
    for rule in rules:
        if rule not in RULE_NAMES:
            raise SettingsError(f"--rules {rule}: no such rule; choose from {', '.join(RULE_NAMES)}")
        if rule != NOLOCO and plan.churn.events:
            raise SettingsError(
                f"--churn: with the rule {rule}, replicas cannot join, leave or crash; simulate this rule separately"
            )


def simulate(
    spec: TrainerSpec,
    plan: Plan,
    *,
    rules: Sequence[str] = (NOLOCO,),
    bindings: Mapping[str, str] | None = None,
    device: torch.device = CPU,
) -> Iterator[Result]:
    """Yield the result of each rule as soon as it is available. On a CPU, results are reproducible bit for bit."""
    material = Material.of(seeded(spec, plan.seed), bindings or {}, device=device)
    for rule in rules:
        yield simulate_swarm(material, plan) if rule == NOLOCO else simulate_lockstep(material, plan, rule=rule)


def check_stages(rules: Sequence[str], spec: TrainerSpec) -> None:
    """Raise SettingsError if a pipeline cannot be simulated with these rules and settings."""
    for rule in rules:
        if rule not in STAGED_RULES:
            raise SettingsError(f"--rules {rule} cannot be used with stages; choose from {', '.join(STAGED_RULES)}")
    if spec.train.batch_size % spec.pipeline.microbatch:
        raise SettingsError(
            f"train.batch_size ({spec.train.batch_size}) must be a multiple of pipeline.microbatch "
            f"({spec.pipeline.microbatch}); otherwise, the heads would take larger steps than the spec says"
        )


def simulate_stages(
    spec: TrainerSpec,
    plan: StagedPlan,
    *,
    rules: Sequence[str] = (NOLOCO,),
    bindings: Mapping[str, str] | None = None,
) -> Iterator[StagedResult]:
    """Yield the result of each rule for a model cut into the stages of the plan. With `local`, replicas never mix."""
    material = Material.of(seeded(staged(spec, plan.num_stages), plan.seed), bindings or {})
    for rule in rules:
        yield run_pipeline(material, replace(plan, gossips=rule == NOLOCO))


def seeded(spec: TrainerSpec, seed: int) -> TrainerSpec:
    """Return a spec whose initial weights also depend on the seed. With seed 0, the spec is unchanged."""
    if not seed:
        return spec
    return spec.with_changes({"model.seed": spec.model.seed + seed}, origin="--seed")
