"""One call for a whole comparison: every rule on the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from noloco_p2p.errors import SettingsError
from noloco_p2p.optim.rules import NOLOCO, RULE_NAMES
from noloco_p2p.simulate.lockstep import simulate_lockstep
from noloco_p2p.simulate.material import CPU, Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.result import Result
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import RunSpec


def check_rules(rules: Sequence[str], plan: Plan) -> None:
    """Raises SettingsError for a rule that does not exist, or a plan that it cannot follow."""
    for rule in rules:
        if rule not in RULE_NAMES:
            raise SettingsError(f"--rules {rule}: must be one of {', '.join(RULE_NAMES)}")
        if rule != NOLOCO and plan.churn.events:
            raise SettingsError(f"--churn: replicas of {rule} cannot join, leave or crash; simulate it by itself")


def simulate(
    spec: RunSpec,
    plan: Plan,
    *,
    rules: Sequence[str] = (NOLOCO,),
    bindings: Mapping[str, str] | None = None,
    device: torch.device = CPU,
) -> Iterator[Result]:
    """One Result a rule, as each is done. Same spec, plan and number of threads, same bits (on a CPU)."""
    material = Material.of(seeded(spec, plan.seed), bindings or {}, device=device)
    for rule in rules:
        yield simulate_swarm(material, plan) if rule == NOLOCO else simulate_lockstep(material, plan, rule=rule)


def seeded(spec: RunSpec, seed: int) -> RunSpec:
    """Another seed starts from other weights, too; 0 is the spec's own start."""
    if not seed:
        return spec
    return spec.with_changes({"model.seed": spec.model.seed + seed}, origin="--seed")
