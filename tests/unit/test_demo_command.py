"""The plan of a demo, the peers that it kills, and its report."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noloco_p2p.demo import FEWEST_STEPS, Demo, DemoPeer, chaos, report_lines
from noloco_p2p.errors import SettingsError, SpecError
from noloco_p2p.telemetry.events import EventLog


@pytest.mark.parametrize(
    ("plan", "step_s", "cores", "least", "most"),
    [
        ({}, 0.1, 2, 600, 750),
        ({}, 0.5, 2, 100, 140),  # five times slower
        ({}, 0.1, 1, 280, 360),
        ({}, 0.1, 16, 1300, 1500),  # no faster than with one core for each peer
        ({}, 5.0, 2, FEWEST_STEPS, FEWEST_STEPS),
        ({"num_peers": 6, "num_stages": 3}, 0.1, 2, 450, 520),  # a core for each head
        ({"num_peers": 6, "num_stages": 3}, 0.1, 1, 200, 260),
        ({"num_peers": 7, "num_stages": 3}, 0.1, 1, 120, 170),  # the seventh peer is a third head
    ],
)
def test_steps_fit_into_the_time(plan: dict[str, Any], step_s: float, cores: int, least: int, most: int) -> None:
    steps = Demo(Path("unused"), **plan).steps_in_time(step_s=step_s, num_cores=cores, left_s=230)
    assert least <= steps <= most
    assert steps % 10 == 0


def test_peers_take_stages_in_turn() -> None:
    plan = Demo(Path("unused"), num_peers=6, num_stages=3)
    assert [peer.stage for peer in plan.peers] == [0, 1, 2, 0, 1, 2]
    assert [peer.stage for peer in Demo(Path("unused"), num_peers=2).peers] == [None, None]
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
        Demo(Path("unused"), **plan)


def test_changes_to_the_spec_come_last_and_are_checked() -> None:
    assert Demo(Path("unused"), changes={"outer.alpha": 0.3}).spec(480).outer.alpha == 0.3
    with pytest.raises(SpecError, match=r"outer\.nothing"):
        Demo(Path("unused"), changes={"outer.nothing": 7}).spec(480)


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


def test_a_clock_that_is_set_between_two_starts_confuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("noloco_p2p.demo.subprocess.Popen", lambda *args, **kwargs: SimpleNamespace(poll=lambda: None))
    peer = DemoPeer(0, tmp_path, stage=None)
    folder = peer.folder / "runs" / "demo"
    folder.mkdir(parents=True)
    for clock_s in (2e9, 1e9, 3e9):
        monkeypatch.setattr("noloco_p2p.telemetry.events.time", SimpleNamespace(time=iter([clock_s] * 9).__next__))
        peer.start("start")
        peer.look()
        assert not peer.has_begun, "what an earlier process wrote does not count"
        EventLog(folder / "events.jsonl").write("started", peer_id="p")
        peer.look()
        assert peer.has_begun


def test_a_peer_that_has_not_reported_yet_holds_no_progress_back(tmp_path: Path) -> None:
    demo = Demo(tmp_path, num_peers=3, num_steps=400)
    assert demo.done == 0
    demo.peers[0].metrics, demo.peers[1].metrics = {"progress": 0.5}, {"progress": 0.25}
    assert demo.done == 100


class Puppet(DemoPeer):
    """A peer that is back as soon as it restarts."""

    def __init__(self, story: list[str], name: str, *, has_begun: bool, has_finished: bool) -> None:
        super().__init__(0, Path("unused"), stage=None)
        self.has_begun, self.has_finished = has_begun, has_finished
        self._story, self._name = story, name

    def kill(self) -> None:
        self._story.append(f"kill {self._name}")

    def start(self, target: str, flags: str = "") -> None:
        self._story.append(f"{target} {self._name}")


@pytest.fixture
def story_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def story_of(seed: int, *, done: str = "", late: str = "") -> list[str]:
        story, times_s = list[str](), iter(range(1_000))
        monkeypatch.setattr("noloco_p2p.demo.time", SimpleNamespace(monotonic=lambda: next(times_s) / 2))
        peers = [Puppet(story, name, has_begun=name not in late, has_finished=name in done) for name in "012"]
        for _ in islice(chaos(peers, target="start", seed=seed), 400):
            pass
        return story

    return story_of


def test_everybody_who_is_killed_comes_back_before_the_next(story_of: Callable[..., list[str]]) -> None:
    story = story_of(1)
    assert len(story) >= 10
    for kill, start in zip(story[::2], story[1::2], strict=False):
        assert kill.replace("kill", "start") == start


def test_the_seed_tells_the_story(story_of: Callable[..., list[str]]) -> None:
    assert story_of(5) == story_of(5)
    assert len({tuple(story_of(seed)) for seed in range(5)}) > 1


def test_who_is_done_and_the_last_one_are_spared_and_nobody_dies_before_all_have_begun(
    story_of: Callable[..., list[str]],
) -> None:
    assert story_of(1, done="1")
    assert not any("1" in line for line in story_of(1, done="1"))
    assert story_of(1, done="01") == story_of(1, late="2") == []
