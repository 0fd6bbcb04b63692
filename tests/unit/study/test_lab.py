"""The lab of benchmarks/study: its search, its budgets, its clock, and the verdicts in its tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lab
import lab_tables
import pytest
from lab import CAPS, FAMILIES, OURS, SEEDS, Lab, Run, Setting, capped, descend, fitting, winners
from lab_clock import CABLE, SIZES, Size, clock_of

from noloco_p2p.optim.rules import NOLOCO
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import CodecSpec, DataSpec, EvaluateSpec, ModelSpec, OuterSpec, TrainerSpec, TrainSpec
from noloco_p2p.testing.links import LinkProfile


def bowl(setting: Setting, seed: int = 0) -> float:
    """Return a loss with one minimum: rate 8e-3, alpha 0.3, beta 1."""
    rate = math.log(setting.learning_rate / 8e-3) ** 2
    return 2 + rate + (setting.alpha - 0.3) ** 2 + (setting.beta - 1) ** 2 + setting.inner_steps / 1000 + seed / 1e4


def pretend(run: Run) -> tuple[Run, dict[str, Any]]:
    loss = bowl(run.setting, run.seed) + 100 / run.steps + run.absent
    row = {"loss": loss, "spread": 0.0, "sent_per_parameter_step": run.setting.round_bytes(), "cpu_s": 1.0}
    return run, row


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(lab, "perform", pretend)
    return Lab(tmp_path / "lab.jsonl")


def test_a_search_finds_the_valley_and_stays_within_its_budget() -> None:
    family, tried = FAMILIES["DiLoCo"], set()

    def loss_of(setting: Setting) -> float:
        tried.add(setting)
        return bowl(setting)

    found = descend(family, family.starts, cap="tenth", budget=100, loss_of=loss_of)
    assert (found.learning_rate, found.alpha, found.beta, found.codec) == (8e-3, 0.3, 1.0, "int4")
    tried.clear()
    descend(family, family.starts, cap="tenth", budget=5, loss_of=loss_of)
    assert len(tried) == 5


@pytest.mark.parametrize("name", FAMILIES)
def test_no_rule_has_more_runs_than_the_budget_and_a_search_goes_on_where_it_stopped(name: str, made: Lab) -> None:
    found = winners(made, name)
    assert 0 < len(made.rows) <= lab.BUDGET
    assert {run.seed for run in made.rows} == {lab.SEARCH_SEED}
    assert lab.SEARCH_SEED not in SEEDS
    lines = made.path.read_text(encoding="utf-8").splitlines()
    made.path.write_text("\n".join(lines[: len(lines) // 2]) + "\n", encoding="utf-8")
    again = Lab(made.path)
    assert winners(again, name) == found
    assert again.rows.keys() == made.rows.keys()
    assert len(again.path.read_text(encoding="utf-8").splitlines()) == len(lines)


def test_a_capped_setting_has_the_shortest_rounds_under_its_cap() -> None:
    for family in FAMILIES.values():
        if family.is_capped:
            for start, (cap, most) in ((start, item) for start in family.starts for item in CAPS.items()):
                steps = capped(start, cap).inner_steps
                assert start.round_bytes() / steps <= most < start.round_bytes() / (steps - 1)


def test_a_run_that_diverged_never_wins(made: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = [setting for setting in (Setting("ddp", "muon", rate) for rate in lab.RATES) if setting.learning_rate > 6e-3]

    def diverges(run: Run) -> tuple[Run, dict[str, Any]]:
        run, row = pretend(run)
        return run, {**row, "loss": None} if run.setting in fast else row

    monkeypatch.setattr(lab, "perform", diverges)
    best = winners(made, "ddp")["muon", None]
    assert best == Setting("ddp", "muon", 16e-3) or best.learning_rate <= 6e-3


@pytest.mark.parametrize("name", lab.NEEDS)
def test_a_command_does_all_that_its_table_needs(name: str, made: Lab) -> None:
    made.complete(lab.NEEDS[name](made))
    before = len(made.rows)
    lines = lab_tables.LAB_TABLES[f"lab_{name}"](made)
    assert len(made.rows) == before
    assert not [line for line in lines if "not run" in line or "too few" in line]
    head = f" {OURS} |" if name == "target" else f"| {OURS}, against |"
    assert [line for line in lines if head in line], "where this project stands"
    assert "**" not in "".join(lines)


def test_a_schedule_fits_and_its_time_is_that_of_a_whole_one(made: Lab) -> None:
    for place in lab.PLACES:
        for setting, steps in place.schedules(made, OURS).items():
            assert steps % setting.inner_steps == 0
            assert place.clock(setting).seconds(steps) <= made.steps * place.size.step_s * (1 + 1e-9)
    assert (fitting(399.9, 3), fitting(400.0, 50), fitting(9.0, 1)) == (390, 400, 0)


def test_a_verdict_needs_every_seed_on_one_side() -> None:
    assert lab_tables.compared([1.0, 1.1, 1.2], [1.1, 1.2, 1.3]).startswith("ahead (-")
    assert lab_tables.compared([1.2, 1.3, 1.4], [1.1, 1.2, 1.3]).startswith("loses (+")
    assert lab_tables.compared([1.0, 1.3, 1.2], [1.1, 1.2, 1.3]).startswith("undecided")
    assert lab_tables.compared([1.0], [1.1]) == "too few seeds for a verdict"


# the clock


def test_the_clock_of_each_rule_by_hand() -> None:
    """A model of 1M parameters takes 1 s a step; a link of 8 Mbit/s carries one byte per parameter and second."""
    size = Size("1M", 1_000_000, int(40e12 / 6e6))
    link = LinkProfile("link", down_mbit_s=8, up_mbit_s=8, delay_ms=0, jitter_ms=0)

    def step_s(setting: Setting, coding_s: float = 0.0) -> float:
        return clock_of(setting.rule, setting.spec(), size, link, num_replicas=8, coding_s=coding_s).step_s

    assert step_s(Setting("local", "muon", 1e-3)) == pytest.approx(1.0)
    assert step_s(Setting("ddp", "muon", 1e-3)) == pytest.approx(1 + 3.5 - 2 / 3, abs=1e-3)
    diloco = Setting("diloco", "muon", 1e-3, 10, codec="int8")
    assert step_s(diloco) == pytest.approx(1 + 1.75 * 1.0078 / 10, abs=1e-3)
    noloco = Setting(NOLOCO, "muon", 1e-3, 10, codec="modulo8+int4")
    assert step_s(noloco) == pytest.approx(1 + 0.5156 / 10, abs=1e-3)
    assert step_s(noloco, coding_s=2e-6) == pytest.approx(1 + 2 / 10, abs=1e-3), "coding is slower than the link"
    assert clock_of(NOLOCO, noloco.spec(), size, CABLE, num_replicas=8, coding_s=0.0).is_hidden
    short = replace(noloco, inner_steps=1)
    assert not clock_of(NOLOCO, short.spec(), size, link, num_replicas=8, coding_s=0.0).is_hidden


@pytest.mark.parametrize(("mbit_s", "delay_ms"), [(8.0, 0.0), (8.0, 200.0), (1e6, 50.0)])
def test_the_clock_of_noloco_is_that_of_the_simulated_swarm(mbit_s: float, delay_ms: float) -> None:
    """They may differ by a chunk, which the simulated receiver gets only once all of it was sent."""
    spec = TrainerSpec(
        name="clock",
        model=ModelSpec(hidden_size=256, num_layers=1, num_heads=2, mlp_size=688),
        data=DataSpec(sequence_length=16),
        train=TrainSpec(total_steps=8, batch_size=1, warmup_steps=1),
        outer=OuterSpec(inner_steps=2, max_wait_s=1000.0, closing_rounds=0),
        codec=CodecSpec(slow_weights="int8", outer_gradient="int4"),
        evaluate=EvaluateSpec(num_sequences=1),
    )
    num_parameters = spec.model.num_parameters()
    size = Size("clock", num_parameters, int(5 * 40e12 / 6 / num_parameters))
    link = LinkProfile("link", down_mbit_s=mbit_s, up_mbit_s=mbit_s, delay_ms=delay_ms, jitter_ms=0)
    result = simulate_swarm(Material.of(spec, {}), Plan(4, step_s=size.step_s, links=(link,)))
    assert result.alone == 0
    expected_s = 2 * clock_of(NOLOCO, spec, size, link, num_replicas=4, coding_s=0.0).step_s
    chunk_s = 262_144 * 0.5156 / (mbit_s * 1e6 / 8)
    for round_s in result.rounds_s:
        assert expected_s - 0.01 <= round_s <= expected_s + chunk_s + 0.01


def test_the_sizes_are_those_of_the_paper() -> None:
    assert [(size.num_parameters, size.tokens) for size in SIZES] == [(125_000_000, 2**19 // 8), (10**9, 2**20 // 16)]
