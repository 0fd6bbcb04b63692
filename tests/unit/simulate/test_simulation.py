"""Whole simulations of a tiny Llama: reproducible bits, and the effect of faults, links and rules on rounds."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from harness.specs import FP32, published, tiny_llama
from torch import Tensor

from noloco_p2p.codec import get_codec, section_bytes
from noloco_p2p.errors import SettingsError
from noloco_p2p.gossip.round_length import FILL
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.optim.rules import RULES
from noloco_p2p.simulate.lockstep import simulate_lockstep
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.network import IDEAL
from noloco_p2p.simulate.plan import Churn, Event, Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.result import Result, table
from noloco_p2p.simulate.run import check_rules, seeded
from noloco_p2p.simulate.swarm import peer_name, simulate_swarm
from noloco_p2p.spec import TrainerSpec, TrainSpec
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.trainer.inner_step import InnerStep

SPEC = tiny_llama(
    "simulated",
    train=TrainSpec(total_steps=12, batch_size=2, warmup_steps=2),
    outer=published(inner_steps=3, max_wait_s=100.0, closing_rounds=0),
)


def material(spec: TrainerSpec = SPEC) -> Material:
    return _material(spec.canonical_json(), spec.digest())


@functools.cache
def _material(canonical: bytes, digest: str) -> Material:
    return Material.of(TrainerSpec.from_json(canonical, expected_digest=digest, origin="test"), {})


def weights_after(spec: TrainerSpec, plan: Plan) -> tuple[Result, list[Tensor]]:
    made: list[SimulatedReplica] = []
    result = simulate_swarm(material(spec), plan, on_made=made.extend)
    return result, [replica.state.slow_weights for replica in made]


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not() -> None:
    modulo = SPEC.with_changes({"codec.slow_weights": "modulo", "codec.outer_gradient": "int4"})
    links = (LinkProfile("some", down_mbit_s=1, up_mbit_s=1, delay_ms=20, jitter_ms=50),)
    plans = [Plan(4, seed=seed, links=links, churn=Churn(lose=0.2, absent=0.1)) for seed in (1, 1, 2)]
    first, again, other = (weights_after(modulo, plan) for plan in plans)
    assert first[0] == again[0]
    assert all(torch.equal(one, two) for one, two in zip(first[1], again[1], strict=True))
    assert first[0] != other[0]


def test_a_clean_swarm_learns_and_swaps_every_round() -> None:
    result, _ = weights_after(SPEC, Plan(4))
    assert (result.swapped, result.half, result.alone) == (16, 0, 0)
    assert result.loss < result.curve[0].loss
    assert result.merged_loss == pytest.approx(result.loss, abs=0.1)
    assert 0 < result.spread < 0.1
    plans = section_plans(FP32, swap_momentum=True, num_elements=result.num_parameters)
    a_round = sum(section_bytes(plan.codec, plan.num_elements) for plan in plans)
    assert result.sent_bytes == 4 * a_round
    assert result.sent_per_parameter_step == pytest.approx(12 / 3)
    assert len(table([result])) == 2


def test_two_replicas_of_noloco_are_diloco() -> None:
    """A pair that starts equal has nothing to mix, so the production path must match the collective rule."""
    _, ours = weights_after(SPEC, Plan(2))
    reference = simulate_lockstep(material(), Plan(2), rule="diloco")
    made = material().model()
    assert material().loss_of(ours[0], made) == pytest.approx(reference.loss, abs=1e-4)
    assert torch.allclose(ours[0], ours[1], atol=1e-5)


def test_an_eager_swarm_on_a_slow_link_gets_gradients_late() -> None:
    eager = SPEC.with_changes({"outer.max_wait_s": 0.0, "outer.inner_steps": 6})
    rate = 8 * section_bytes(get_codec("fp32"), 20_000) / 1e6  # a section takes about a second of uplink
    link = LinkProfile("slow", down_mbit_s=10 * rate, up_mbit_s=rate, delay_ms=10, jitter_ms=0)
    result, _ = weights_after(eager, Plan(2, links=(link,)))
    assert result.half == 4
    assert result.late == 2, "those of the first round; nobody trains after the second"


def slow_link(seconds: float) -> LinkProfile:
    """Return a link that carries one section of the tiny Llama, uncoded and in one chunk, in this time."""
    num_elements = SPEC.model.num_parameters()
    mbit_s = section_bytes(get_codec("fp32"), num_elements) * 8 / 1e6 / seconds
    return LinkProfile("slow", down_mbit_s=float("inf"), up_mbit_s=mbit_s, delay_ms=0, jitter_ms=0)


def test_a_chunk_that_takes_long_on_a_slow_link_breaks_no_swap() -> None:
    """With a real model, many chunks together take this long."""
    result, _ = weights_after(SPEC, Plan(2, step_s=100.0, links=(slow_link(30.0),)))
    assert result.alone == 0


def test_auto_settles_where_the_early_part_takes_its_share_of_a_round() -> None:
    auto = {"inner_steps": "auto", "alpha": 0.0, "beta": 1.0, "gamma": 1.0, "min_inner_steps": 1, "max_inner_steps": 25}
    changes = {f"outer.{name}": value for name, value in auto.items()}
    spec = SPEC.with_changes({**changes, "train.total_steps": 200, "codec.outer_gradient": "int4"})
    made: list[SimulatedReplica] = []
    simulate_swarm(material(spec), Plan(2, links=(slow_link(4.0),)), on_made=made.extend)
    assert all(4 / FILL <= replica.driver.step_rate.inner_steps <= 1.2 * 4 / FILL for replica in made)


def test_absent_replicas_step_alone() -> None:
    result, _ = weights_after(SPEC, Plan(2, churn=Churn(absent=1.0)))
    assert (result.swapped, result.half, result.alone, result.sent_bytes) == (0, 0, 8, 0.0)


def test_broken_calls_never_stop_anybody() -> None:
    result, _ = weights_after(SPEC, Plan(4, churn=Churn(lose=0.5)))
    assert result.swapped + result.half + result.alone == 16
    assert result.steps == 12


def test_who_joins_stands_where_its_donor_stands_and_who_crashes_is_missing() -> None:
    events = (Event("crash", 0, 5.5), Event("join", 3, 4.5), Event("leave", 2, 8.5))
    result, _ = weights_after(SPEC, Plan(4, churn=Churn(events)))
    assert result.num_replicas == 3
    assert result.steps < 12
    assert result.spread < 0.2, "the newcomer is near the others"


def test_closing_rounds_bring_replicas_together() -> None:
    spreads = [
        weights_after(SPEC.with_changes({"outer.closing_rounds": rounds}), Plan(4))[0].spread for rounds in (0, 6)
    ]
    assert spreads[1] < spreads[0] / 5, spreads


def test_faster_replicas_take_as_many_steps_in_less_time() -> None:
    result, _ = weights_after(SPEC.with_changes({"outer.max_wait_s": 0.0}), Plan(2, speeds=(1.0, 2.0)))
    assert result.steps == pytest.approx(12, abs=3)  # partners meet on the schedule
    assert result.virtual_s <= 16


@pytest.mark.parametrize(("num_peers", "at_most_s"), [(2, 155.0), (3, 150.0), (6, 145.0)])
def test_a_slow_peer_ends_the_schedule_with_the_others(num_peers: int, at_most_s: float) -> None:
    """Alone, it would take 185 s. Of two peers, each goes half of the way. In a larger swarm, it joins after 30 s."""
    outer = published(inner_steps=4, max_wait_s=0.0, closing_rounds=0)
    spec = SPEC.with_changes({"train.total_steps": 120, "train.batch_size": 1, "outer": outer.model_dump()})
    last = num_peers - 1
    churn = Churn((Event("join", last, 30.5),) if num_peers > 2 else ())
    result, _ = weights_after(spec, Plan(num_peers, speeds=(*[1.0] * last, 0.65), churn=churn, evaluations=1))
    assert result.num_replicas == num_peers
    assert 120 <= result.virtual_s <= at_most_s


@pytest.mark.parametrize("rule", RULES)
def test_other_rules_learn(rule: str) -> None:
    """A rule learns more than half as much as local training; one that ignored the fast weights would learn little."""
    result, alone = (simulate_lockstep(material(), Plan(4), rule=name) for name in (rule, "local"))
    assert result.loss < result.curve[0].loss
    assert result.curve[0].loss - result.loss > 0.5 * (alone.curve[0].loss - alone.loss)
    assert (result.spread == 0.0) == (rule != "local"), "everybody mixes"
    assert result.virtual_s == pytest.approx(12.0)


def test_data_parallel_replicas_are_one_model_with_the_batches_of_all() -> None:
    result = simulate_lockstep(material(), Plan(4), rule="ddp")
    model = material().model()
    inner = InnerStep(model, SPEC.train)
    streams = [material().batches(peer_name(number), replica=number) for number in range(4)]
    for step in range(SPEC.train.total_steps):
        inner(torch.cat([next(stream) for stream in streams]), progress=step / SPEC.train.total_steps)
    assert result.loss == pytest.approx(material().loss(model), rel=1e-5)


def test_a_collective_rule_is_as_fast_as_its_slowest_replica() -> None:
    result = simulate_lockstep(material(), Plan(2, speeds=(1.0, 0.25)), rule="diloco")
    assert result.virtual_s == pytest.approx(4 * 12.0)


def test_collective_rules_pay_for_the_slowest_link() -> None:
    slow = LinkProfile("slow", down_mbit_s=8, up_mbit_s=0.8, delay_ms=50, jitter_ms=0)
    result = simulate_lockstep(material(), Plan(4, links=(IDEAL, slow)), rule="diloco")
    per_round_s = 1.5 * 4 * result.num_parameters / 1e5 + 6 * 0.1
    assert result.virtual_s == pytest.approx(12 + 4 * per_round_s)


@pytest.mark.parametrize("rule", ["ddp", "diloco"])
def test_absent_replicas_of_a_collective_rule_take_the_mean_of_the_others(rule: str) -> None:
    """All replicas stay equal, fewer gradients count, and each sends 2 (n - 1) / N vectors and one per absentee."""
    clean, churned, lost = (
        simulate_lockstep(material(), Plan(4, churn=Churn(absent=absent)), rule=rule) for absent in (0.0, 0.4, 1.0)
    )
    assert churned.spread == 0.0
    assert churned.loss != clean.loss
    assert churned.loss < churned.curve[0].loss
    vector = 4 * clean.num_parameters
    exchanges = 12 if rule == "ddp" else 4
    assert clean.sent_bytes == exchanges * 1.5 * vector
    sends = {n: (2 * (n - 1) + 4 - n) / 4 * vector if n else 0 for n in range(5)}
    rounds = [sum(rng.random() >= 0.4 for rng in rngs) for rngs in [absences(4)] for _ in range(4)]
    assert churned.sent_bytes == pytest.approx(exchanges / 4 * sum(sends[n] for n in rounds))
    assert (lost.sent_bytes, lost.spread) == (0, 0), "every round is lost, and nobody moves"


def absences(num_replicas: int) -> list[random.Random]:
    return [random.Random(f"absent/0/replica-{number}") for number in range(num_replicas)]


def test_a_seed_starts_from_other_weights_and_0_is_the_spec() -> None:
    assert seeded(SPEC, 0) == SPEC
    assert seeded(SPEC, 3).model.seed == 3


def test_rules_are_checked_before_anything_trains() -> None:
    with pytest.raises(SettingsError, match="--rules fsdp: no such rule; choose from noloco, diloco"):
        check_rules(["noloco", "fsdp"], Plan(2))
    with pytest.raises(SettingsError, match="cannot join, leave or crash"):
        check_rules(["ddp"], Plan(2, churn=Churn((Event("crash", 0, 1.0),))))
