"""Whole simulations of a tiny Llama: reproducible bits, and the effect of faults, links and speeds on swaps."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.small_chats import write_tokenizer
from harness.specs import published, tiny_llama
from rules import Lockstep
from torch import Tensor

from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Churn, Event, Plan, parse_links
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.result import Result, table
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import DataSpec, LoraSpec, ModelSpec, OuterSpec, TrainerSpec, TrainSpec
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.trainer.model import build_model

STEPS = 12
SPEC = tiny_llama(
    "simulated",
    train=TrainSpec(total_steps=STEPS, batch_size=2, warmup_steps=2),
    outer=OuterSpec(closing_mixings=0),
)


def material(spec: TrainerSpec = SPEC) -> Material:
    return _material(spec.canonical_json(), spec.digest())


@functools.cache
def _material(canonical: bytes, digest: str) -> Material:
    return Material.of(TrainerSpec.from_json(canonical, expected_digest=digest, origin="test"), {})


def run(plan: Plan, **changes: Any) -> tuple[Result, list[SimulatedReplica]]:
    """Simulate with changes to the spec, in whose names __ stands for a dot."""
    spec = SPEC.with_changes({name.replace("__", "."): value for name, value in changes.items()})
    made: list[SimulatedReplica] = []
    result = simulate_swarm(material(spec), plan, on_made=made.extend)
    return result, made


def weights(made: list[SimulatedReplica]) -> Tensor:
    return torch.stack([replica.current_weights() for replica in made])


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not() -> None:
    links = (LinkProfile("some", down_mbit_s=1, up_mbit_s=1, delay_ms=20, jitter_ms=50),)
    plans = [Plan(4, seed=seed, links=links, churn=Churn(lose=0.2, absent=0.1)) for seed in (1, 1, 2)]
    first, again, other = (run(plan, codec__weights="modulo", outer__closing_mixings="auto") for plan in plans)
    assert first[0] == again[0]
    assert torch.equal(weights(first[1]), weights(again[1]))
    assert first[0] != other[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_a_script_changes_no_bit(dtype: torch.dtype) -> None:
    plan = Plan(3, churn=Churn(lose=0.2))
    expected, others = run(plan)
    _material.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        result, made = run(plan)
    finally:
        torch.set_default_dtype(torch.float32)
        _material.cache_clear()
    assert result == expected
    assert torch.equal(weights(made), weights(others))


def test_a_clean_swarm_learns_and_stays_together() -> None:
    (result, _), (alone, _) = (run(Plan(4, churn=Churn(absent=absent))) for absent in (0.0, 1.0))
    assert result.loss < result.curve[0].loss
    assert result.merged_loss == pytest.approx(result.loss, abs=0.1)
    assert 0 < result.spread < alone.spread / 3
    assert result.swaps.committed > STEPS
    assert result.swaps.failed == 0
    assert result.steps == STEPS, "equal peers take the steps of the schedule"
    assert result.virtual_s == pytest.approx(STEPS, abs=0.1)
    assert (alone.swaps.committed, alone.sent_bytes) == (0, 0), "absent peers never swap"
    assert len(table([result])) == 2
    assert str(result).startswith(f"{result.rule}: loss {result.loss:.4f}, merged ")
    assert "\n" not in str(result)


def test_two_replicas_that_wait_are_diloco() -> None:
    """A pair that starts equal has nothing to mix, so the production path must match the collective rule."""
    outer = published(inner_steps=3, wait=True, max_wait_s=100.0, closing_mixings=0)
    result, ours = run(Plan(2), outer=outer.model_dump())
    assert result.swaps.committed == STEPS / 3
    reference = Lockstep(ours[0]._material, Plan(2), "diloco").run()
    assert result.loss == pytest.approx(reference.loss, abs=1e-4)
    assert result.spread < 1e-8
    assert result.sent_bytes == STEPS / 3 * 4 * result.num_parameters, "a swap carries everything"


def slow_link(seconds: float) -> LinkProfile:
    """Return a link that sends the weights of the tiny Llama, in fp32, in this time."""
    mbit_s = 4 * SPEC.model.num_parameters() * 8 / 1e6 / seconds
    return LinkProfile("slow", down_mbit_s=float("inf"), up_mbit_s=mbit_s, delay_ms=5, jitter_ms=0)


def test_a_slow_link_is_used_and_nobody_waits_for_it() -> None:
    result, _ = run(Plan(6, links=(slow_link(10.0),)), train__total_steps=60, train__batch_size=1)
    assert result.virtual_s == pytest.approx(60, abs=2)
    assert result.swaps.link_use > 0.5
    assert result.swaps.age_steps < 4, "slices are young, although the whole vector takes ten steps"
    assert result.spread < 0.1


def test_broken_calls_never_stop_anybody() -> None:
    result, _ = run(Plan(4, links=parse_links(["1mbit-20ms"]), churn=Churn(lose=0.5)), train__total_steps=24)
    assert (result.steps, result.virtual_s) == (24, pytest.approx(24, abs=1))
    assert result.swaps.failed > 1
    assert result.swaps.committed > 10


def test_who_joins_stands_where_its_donor_stands_and_who_crashes_is_missing() -> None:
    events = (Event("crash", 0, 5.5), Event("join", 3, 4.5), Event("leave", 2, 8.5))
    result, _ = run(Plan(4, churn=Churn(events)))
    assert result.num_replicas == 3
    begins = [next(point for point in result.curve if point.replica == replica) for replica in (1, 3)]
    assert [point.step for point in begins] == [0, 0]
    assert begins[1].loss < begins[0].loss, "the curve of a newcomer begins with the weights of its donor"
    assert result.steps < STEPS
    assert result.spread < 0.2, "the newcomer is near the others"


@pytest.mark.parametrize("wait", [False, True])
def test_closing_swaps_bring_replicas_together(wait: bool) -> None:
    spreads = [
        run(Plan(4, links=parse_links(["1mbit-20ms"])), outer__closing_mixings=mixings, outer__wait=wait)[0].spread
        for mixings in (0, 6)
    ]
    assert spreads[1] < spreads[0] / 5, spreads


def test_faster_replicas_take_as_many_steps_in_less_time() -> None:
    result, _ = run(Plan(2, speeds=(1.0, 2.0)))
    assert result.steps == pytest.approx(STEPS, abs=3)  # partners meet on the schedule
    assert result.virtual_s <= 16


@pytest.mark.parametrize(("num_peers", "at_most_s"), [(2, 155.0), (3, 150.0), (6, 145.0)])
def test_a_slow_peer_ends_the_schedule_with_the_others(num_peers: int, at_most_s: float) -> None:
    """Alone, it would take 185 s. Of two peers, each goes half of the way. In a larger swarm, it joins after 30 s."""
    last = num_peers - 1
    churn = Churn((Event("join", last, 30.5),) if num_peers > 2 else ())
    plan = Plan(num_peers, speeds=(*[1.0] * last, 0.65), churn=churn, evaluations=1)
    result, _ = run(plan, train__total_steps=120, train__batch_size=1)
    assert result.num_replicas == num_peers
    assert 118 <= result.virtual_s <= at_most_s


def test_adapters_of_a_bound_model_learn_from_chats(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    build_model(SPEC.model, sequence_length=32).save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name in ("chats", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 3)
    model = ModelSpec(pretrained="base", lora=LoraSpec(rank=2))
    data = DataSpec(source="chats", format="chat", tokenizer="base", sequence_length=32, holdout=1e-9)
    spec = SPEC.model_copy(update={"model": model, "data": data})
    files = {"chats": str(tmp_path / "chats.jsonl"), "chats.validation": str(tmp_path / "held_out.jsonl")}
    bound = Material.of(spec, files, folders={"base": str(tmp_path)})
    result = simulate_swarm(bound, Plan(2, evaluations=1))
    assert result.merged_loss < bound.loss(bound.model())
    assert result.swaps.committed > 0


def test_a_seed_starts_from_other_weights_and_0_is_the_spec() -> None:
    assert [Material.of(SPEC, {}, seed=seed).spec.model.seed for seed in (0, 3)] == [0, 3]
