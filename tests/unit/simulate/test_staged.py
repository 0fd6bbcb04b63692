"""Whole simulations of a tiny Llama in stages: results, the effect of faults, and the load of links."""

from __future__ import annotations

import pytest
import torch
from staged_reference import FP32, assert_trained_as, material_of, spec_of, trained_alone

from noloco_p2p.errors import SettingsError
from noloco_p2p.simulate.plan import Churn, Event, parse_links
from noloco_p2p.simulate.stage_result import StagedResult, simulate_stages
from noloco_p2p.simulate.staged import StagedPlan, StageNode
from noloco_p2p.spec import TrainerSpec

SLOW = (parse_links(["1mbit-20ms"]),)


def run(spec: TrainerSpec, plan: StagedPlan) -> tuple[StagedResult, list[StageNode]]:
    made: list[StageNode] = []
    return simulate_stages(material_of(spec), plan, on_made=made.extend), made


@pytest.mark.parametrize("inner_optimizer", ["adamw", "muon"])
def test_one_path_with_one_microbatch_in_flight_is_a_single_machine(inner_optimizer: str) -> None:
    changes = {**FP32, "train.inner_optimizer": inner_optimizer, "train.clip_norm": 0.3}
    spec = spec_of(steps=20, **changes)
    alone = trained_alone(spec)
    result, nodes = run(spec, StagedPlan((1, 1, 1), window=1, links=SLOW))
    start = dict(material_of(spec).model().named_parameters())
    for node in nodes:
        assert node.steps == 20
        assert_trained_as(alone, start, node.model)
    assert [stage.late_share for stage in result.stages] == [0, 0, 0]


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not() -> None:
    churn = Churn((Event("crash", 0, 3.0, 1),), lose=0.2, absent=0.1)
    plans = [StagedPlan((2, 2, 1), seed=seed, links=SLOW, churn=churn) for seed in (1, 1, 2)]
    first, again, other = (run(spec_of(), plan) for plan in plans)
    assert first[0] == again[0]
    for one, two in zip(first[1], again[1], strict=True):
        assert torch.equal(one.current_weights(), two.current_weights())
    assert first[0] != other[0]


def test_a_clean_pipeline_learns_and_mixes() -> None:
    result, nodes = run(spec_of(steps=12), StagedPlan((3, 3, 3), links=SLOW, step_s=0.1))
    assert result.loss < result.curve[0][2]
    assert result.merged_loss == pytest.approx(result.loss, abs=0.1)
    assert result.num_lost == 0
    assert all(12 <= node.steps <= 13 for node in nodes if node.stage == 0), "heads meet on the schedule"
    assert all(stage.swaps.committed > 1 for stage in result.stages)
    assert all(stage.counted == result.num_done for stage in result.stages)


def test_gossip_pulls_the_replicas_of_a_stage_together() -> None:
    spec = spec_of(steps=12)
    mixed, _ = run(spec, StagedPlan((3, 3, 3), links=SLOW))
    apart, _ = run(spec, StagedPlan((3, 3, 3), links=SLOW, gossips=False))
    assert (apart.rule, mixed.rule) == ("local", "noloco")
    for one, other in zip(mixed.stages, apart.stages, strict=True):
        assert 0 < one.spread < other.spread / 2
        assert other.swap_bytes == other.swaps.committed == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_run_goes_on_when_a_replica_crashes(stage: int) -> None:
    events = (Event("crash", 1, 1.5, stage), Event("join", 2, 2.5, stage), Event("leave", 0, 4.0, (stage + 1) % 3))
    replicas = tuple(3 if index == stage else 2 for index in range(3))
    result, nodes = run(spec_of(steps=12), StagedPlan(replicas, links=SLOW, step_s=0.1, churn=Churn(events)))
    assert not next(node for node in nodes if (node.stage, node.number) == (stage, 1)).is_alive
    assert [each.num_replicas for each in result.stages] == [
        2 if index == stage else 1 if index == (stage + 1) % 3 else 2 for index in range(3)
    ]
    assert result.loss < result.curve[0][2]
    assert all(node.steps >= 12 for node in nodes if node.stage == 0 and node.is_alive)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_newcomer_that_comes_too_late_takes_no_part(stage: int) -> None:
    replicas = tuple(3 if index == stage else 2 for index in range(3))
    plain, _ = run(spec_of(), StagedPlan((2, 2, 2), links=SLOW, step_s=0.1))
    for share in (0.95, 1.0, 1.05):
        events = (Event("join", 2, share * plain.virtual_s, stage),)
        result, _ = run(spec_of(), StagedPlan(replicas, links=SLOW, step_s=0.1, churn=Churn(events)))
        assert all(2 <= each.num_replicas <= 3 for each in result.stages)
        assert result.virtual_s < 2 * plain.virtual_s


def test_a_pipeline_without_heads_cannot_be_judged() -> None:
    churn = Churn((Event("crash", 0, 1.0), Event("leave", 1, 2.0)))
    with pytest.raises(SettingsError, match="every replica of stage 0 is gone"):
        run(spec_of(), StagedPlan((2, 1, 1), links=SLOW, churn=churn))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_replica_on_a_far_slower_link_gets_less(stage: int) -> None:
    """A stage with half of its capacity left keeps more than half of the tokens."""
    even, uneven = parse_links(["0.4mbit-20ms"]), parse_links(["0.4mbit-20ms", "0.04mbit-20ms"])
    links = tuple(uneven if index == stage else even for index in range(3))
    spec = spec_of(steps=12, **{"pipeline.routing": "fast", "train.batch_size": 16})
    plain, _ = run(spec, StagedPlan((2, 2, 2), links=(even,), step_s=0.05))
    result, nodes = run(spec, StagedPlan((2, 2, 2), links=links, step_s=0.05))
    assert result.tokens_per_s > 0.7 * plain.tokens_per_s
    assert result.num_lost == 0
    assert all(node.steps >= 12 for node in nodes if node.stage == 0)
    fast, slow = (node.flow.num_done for node in nodes if node.stage == stage)
    assert slow < fast / 2


def test_links_bound_the_tokens_per_second() -> None:
    plan = StagedPlan((2, 2, 2), links=(parse_links(["0.1mbit-1ms"]),), step_s=0.01, gossips=False)
    result, _ = run(spec_of(**{"train.batch_size": 48}), plan)
    per_replica = 0.1e6 / 8 / (2 * (16 + 2))  # int8: a byte for each channel, and a scale of two bytes
    assert result.predicted_tokens_per_s == pytest.approx(2 * per_replica)
    assert 0.5 * result.predicted_tokens_per_s < result.tokens_per_s < result.predicted_tokens_per_s
    assert all(0.5 < stage.up_busy < 1 for stage in result.stages)
