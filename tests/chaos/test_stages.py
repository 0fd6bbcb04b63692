"""A staged model on real processes: it learns, and no peer stalls or exits because of another one.

All tests of this file share one swarm, in their order: two heads, two peers of stage 1, and one of stage 2.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness.processes import PeerProcess, noloco, small_spec, until, write_spec

from noloco_p2p.control import ask
from noloco_p2p.outer.checkpoint import Checkpoints

SPEC = small_spec(
    "stages",
    model__num_layers=3,
    model__parameter_seeds=True,
    pipeline__stages=3,
    pipeline__cut=[1, 1, 1],
    train__total_steps=1_000_000,
)
OFTEN = ("--save-every-s", "1")

pytestmark = pytest.mark.slow


@dataclass
class Swarm:
    folder: Path
    stack: ExitStack
    heads: list[PeerProcess] = field(default_factory=list[PeerProcess])
    middle: list[PeerProcess] = field(default_factory=list[PeerProcess])
    last: list[PeerProcess] = field(default_factory=list[PeerProcess])

    def join(self, target: str | Path, name: str, *flags: str) -> PeerProcess:
        return self.stack.enter_context(PeerProcess(target, self.folder / name, *OFTEN, *flags))

    @property
    def everybody(self) -> list[PeerProcess]:
        return [*self.heads, *self.middle, *self.last]

    def steps(self) -> list[int]:
        return [status(peer)["step"] for peer in self.everybody]

    def assert_all_go_on(self) -> None:
        """Check that every peer still runs and closes further inner steps."""
        before = self.steps()
        until(
            lambda: all(now >= then + 3 for now, then in zip(self.steps(), before, strict=True)),
            what=lambda: f"steps of all peers after {before}: {self.steps()}",
        )
        assert all(peer.process.poll() is None for peer in self.everybody)
        assert not [peer.text for peer in self.everybody if "Traceback" in peer.text]


def status(peer: PeerProcess) -> dict[str, Any]:
    answer = until(lambda: ask(peer.folder, "status", timeout_s=10.0), what="a status")
    assert answer
    return answer


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("stages")
    with ExitStack() as stack:
        swarm = Swarm(folder, stack)
        first = swarm.join(write_spec(SPEC, folder), "head-0", "--stage", "0")
        ticket = first.ticket
        first.wait_for("waiting for stages 1, 2, which no peer holds")
        swarm.heads = [first, swarm.join(ticket, "head-1", "--stage", "0")]
        swarm.middle = [swarm.join(ticket, f"middle-{number}", "--stage", "1") for number in range(2)]
        swarm.last = [swarm.join(ticket, "last", "--stage", "2")]
        yield swarm


def test_the_stages_learn_and_swap_each_within_itself(swarm: Swarm) -> None:
    swarm.heads[0].swap_with(swarm.heads[1])
    swarm.middle[0].swap_with(swarm.middle[1])
    head = swarm.heads[0]
    first = head.report_where(lambda event: event["loss"] is not None)["loss"]
    head.report_where(lambda event: event["loss"] < first - 0.5)
    inner = swarm.middle[0].events("report")[-1]
    assert inner["loss"] is None
    assert inner["microbatches"] > 0
    assert inner["capacity"] > 0
    for event in (inner, head.events("report")[-1]):
        assert event["tokens"] == event["microbatches"] * SPEC.pipeline.microbatch * SPEC.data.sequence_length
    assert swarm.heads[0].event("evaluated")["validation_loss"] > 0, "the held-out sequences went around the ring"
    assert [status(peer)["stage"] for peer in swarm.everybody] == [0, 0, 1, 1, 2]
    swarm.assert_all_go_on()


def test_a_killed_replica_of_a_stage_with_two_stops_nobody(swarm: Swarm) -> None:
    victim = swarm.middle.pop()
    victim.send(signal.SIGKILL)
    victim.wait()
    swarm.assert_all_go_on()


def test_a_frozen_next_stage_costs_no_more_than_deadlines(swarm: Swarm) -> None:
    """The kernel of the frozen peer still acknowledges packets. The heads give up the microbatches that it holds, or
    find after a while that nobody holds the stage, and continue when it is back."""
    frozen = swarm.middle[0]
    until(lambda: swarm.heads[0].events("saved"), what="a checkpoint")
    frozen.send(signal.SIGSTOP)
    head = swarm.heads[0]
    lost = status(head)["lost_microbatches"]
    until(
        lambda: status(head)["lost_microbatches"] > lost or status(head)["waits_for_stages"] == [1],
        what="a microbatch that is given up",
    )
    frozen.send(signal.SIGCONT)
    swarm.assert_all_go_on()


def test_an_empty_stage_holds_the_others_until_its_checkpoint_comes_back(swarm: Swarm) -> None:
    victim = swarm.last.pop()
    until(lambda: victim.events("saved"), what="a checkpoint")
    ticket = swarm.heads[0].ticket
    victim.send(signal.SIGKILL)
    victim.wait()
    until(lambda: status(swarm.heads[0])["waits_for_stages"] == [2], what="a head that waits")
    until(lambda: status(swarm.heads[0])["tokens_per_s"] == 0, what="a head that shows that nothing moves")
    kept = Checkpoints(victim.folder / "runs" / SPEC.run_id / "stage-2").newest()
    assert kept
    newcomer = swarm.join(ticket, "newcomer", "--stage", "2")
    newcomer.wait_for("stage 2 has been trained, but no live peer holds it")
    back = swarm.join(ticket, "last")  # without --stage it resumes the stage that it held
    back.wait_for("resumed from step")
    assert status(back)["stage"] == 2
    swarm.last = [back, newcomer]
    newcomer.event("started")
    swarm.assert_all_go_on()
    assert status(swarm.heads[0])["tokens_per_s"] > 0
    assert newcomer.event("report")["progress"] >= kept.meta["outer"]["progress"]
    back.send(signal.SIGTERM)
    assert back.wait() == 0
    swarm.last = [newcomer]
    swarm.assert_all_go_on()


def test_the_operator_revives_a_stage_that_nobody_comes_back_with(swarm: Swarm) -> None:
    lost = swarm.last.pop()
    until(lambda: lost.events("saved"), what="a checkpoint")
    lost.send(signal.SIGKILL)
    lost.wait()
    folder = lost.folder / "runs" / SPEC.run_id / "stage-2"
    until(lambda: status(swarm.heads[0])["waits_for_stages"] == [2], what="a head that waits")
    revived = swarm.join(swarm.heads[0].ticket, "revived", "--stage", "2", "--revive-from", str(folder))
    revived.wait_for(f"stage 2 continues from {folder}")
    swarm.last = [revived]
    swarm.assert_all_go_on()


def test_a_pause_holds_a_stage_and_a_stage_that_does_not_exist_is_refused(swarm: Swarm) -> None:
    head = swarm.heads[1]
    assert ask(head.folder, "pause", timeout_s=30.0)
    head.event("paused")
    swarm.heads[0].report_where(lambda event: True)
    assert ask(head.folder, "resume", timeout_s=30.0)
    head.event("resumed")
    swarm.assert_all_go_on()
    with PeerProcess(swarm.heads[0].ticket, swarm.folder / "wrong", "--stage", "3") as wrong:
        assert wrong.wait() == 3
        assert "--stage 3 does not exist: the run stages has stages 0 to 2" in wrong.text
    with PeerProcess(swarm.heads[0].ticket, swarm.folder / "small", "--max-memory", "0.1MB") as small:
        assert small.wait() == 3
        assert "this machine cannot hold any stage: stage 0 needs at least" in small.text


def test_a_fork_with_fewer_stages_goes_on_from_the_weights_of_all(swarm: Swarm, tmp_path: Path) -> None:
    """The forking machine holds one stage; the other stage starts from a copy, and a newcomer fetches its state."""
    new, head_folder, inner_folder = tmp_path / "new.toml", tmp_path / "head", tmp_path / "inner"
    before = swarm.heads[0].events("evaluated")[0]["validation_loss"]
    stages = ("--set", "pipeline.stages=2")
    done = noloco("fork", swarm.heads[0].ticket, new, "--state-dir", head_folder, *stages)
    assert done.returncode == 0, done.stderr
    assert f"noloco join {new} --state-dir {head_folder} --stage 0" in done.stdout
    with ExitStack() as stack:
        head = stack.enter_context(PeerProcess(new, head_folder, "--stage", "0"))
        inner = stack.enter_context(PeerProcess(head.ticket, inner_folder, "--stage", "1"))
        inner.wait_for("no live peer holds stage 1; waiting for a peer that holds it")
        shutil.copytree(head_folder / "starts", inner_folder / "starts")
        mate = stack.enter_context(PeerProcess(head.ticket, tmp_path / "mate", "--stage", "1"))
        assert head.event("evaluated")["validation_loss"] < before - 0.5, "the weights are those of the old run"
        mate.swap_with(inner)
        assert not [peer.text for peer in (head, inner, mate) if "Traceback" in peer.text]
