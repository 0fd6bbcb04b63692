"""The plan of a demo, and its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from noloco_p2p.demo.plan import FEWEST_STEPS, DemoPlan, step_s_of_all, steps_that_fit
from noloco_p2p.demo.report import report_lines
from noloco_p2p.errors import SettingsError, SpecError


@pytest.mark.parametrize(
    ("seconds", "step_s", "peers", "cores", "least", "most"),
    [
        (230, 0.1, 4, 2, 700, 850),
        (230, 0.5, 4, 2, 110, 150),  # five times slower
        (230, 0.1, 4, 1, 330, 420),
        (230, 0.1, 4, 16, 1400, 1700),  # no faster than with one core for each peer
        (230, 5.0, 4, 2, FEWEST_STEPS, FEWEST_STEPS),
    ],
)
def test_steps_fit_into_the_time(seconds: float, step_s: float, peers: int, cores: int, least: int, most: int) -> None:
    plan = DemoPlan(Path("unused"), num_peers=peers)
    each_s = step_s_of_all(plan, plan.spec(480), step_s=step_s, num_cores=cores)
    steps = steps_that_fit(seconds, each_s=each_s)
    assert least <= steps <= most
    assert steps % 10 == 0


def test_a_step_of_a_pipeline_costs_the_computing_of_all_stages_for_each_head() -> None:
    plan = DemoPlan(Path("unused"), num_peers=6, num_stages=3)

    def seconds(num_peers: int, num_cores: int) -> float:
        spec = plan.spec(480)
        return step_s_of_all(replace(plan, num_peers=num_peers), spec, step_s=1.0, num_cores=num_cores)

    assert seconds(6, 1) == 2 * seconds(6, 2), "two heads share a core, or have one each"
    assert seconds(12, 2) == 2 * seconds(6, 2)
    assert seconds(7, 1) == 1.5 * seconds(6, 1), "the seventh peer is a third head"
    assert seconds(6, 64) == seconds(6, 2), "one microbatch of a head is in flight: more cores are of no use"


def test_peers_take_stages_in_turn() -> None:
    plan = DemoPlan(Path("unused"), num_peers=6, num_stages=3)
    assert [plan.stage(index) for index in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [DemoPlan(Path("unused")).stage(index) for index in range(2)] == [None, None]
    spec = plan.spec(480)
    assert (spec.pipeline.stages, spec.pipeline.cut, spec.model.parameter_seeds) == (3, "auto", True)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        ({"num_peers": 2, "num_stages": 3}, "--peers 2 is too few: each of the 3 stages needs at least one peer"),
        ({"num_peers": 5, "num_stages": 3, "chaos_seed": 1}, r"3 stages need 6 peers \(two per stage\)"),
        ({"changes": {"pipeline.stages": 3, "model.parameter_seeds": True}}, "use --stages instead"),
        ({"num_peers": 8, "num_stages": 4}, "the model has 3 blocks"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(plan: dict[str, Any], error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        DemoPlan(Path("unused"), **plan).check()


def test_changes_to_the_spec_come_last_and_are_checked() -> None:
    assert DemoPlan(Path("unused"), changes={"outer.alpha": 0.3}).spec(480).outer.alpha == 0.3
    with pytest.raises(SpecError, match=r"outer\.nothing"):
        DemoPlan(Path("unused"), changes={"outer.nothing": 7}).spec(480)


PEER: dict[str, Any] = {
    "peer_id": "12D3KooWxyzabc",
    "stage": None,
    "step": 480,
    "swaps": 60,
    "failed": 1,
    "loss_start": 5.8,
    "loss_end": 1.3,
    "bytes_sent": 1,
    "bytes_received": 1,
    "kills": 0,
}
REST = {"merged_peers": 2, "merged_loss": 1.3, "spread": 0.001, "export_dir": "export", "wall_s": 100.0}


def test_the_report_has_a_row_for_each_peer() -> None:
    lines = report_lines({"peers": [PEER, PEER | {"failed": 0}], **REST})
    assert lines[0].split()[:5] == ["peer", "id", "steps", "swaps", "failed"]
    assert lines[1].split()[3:7] == ["480", "60", "1", "5.800"]
    assert "merged model (mean of 2 peers): validation loss 1.300" in lines


def test_the_report_of_a_run_with_stages_names_them_and_gives_inner_peers_no_loss() -> None:
    inner = PEER | {"stage": 1, "loss_start": None, "loss_end": None}
    lines = report_lines({"peers": [PEER | {"stage": 0}, inner], **REST})
    assert lines[0].split()[:3] == ["peer", "stage", "id"]
    assert lines[1].split()[:3] == ["peer", "0", "0"]
    assert "5.800 -> 1.300" in lines[1]
    assert lines[2].split()[:3] == ["peer", "1", "1"]
    assert "->" not in lines[2]
    assert "merged model (mean of 2 peers, stage by stage): validation loss 1.300" in lines
