"""The inner steps of a peer with one stage, and the end of its schedule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from staged_reference import spec_of

from noloco_p2p.errors import PeerError
from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.flow.node import MicrobatchLost, Task
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.trainer.cut import cut_of
from noloco_p2p.trainer.stage import build_stage
from noloco_p2p.trainer.stage_work import StageLoop, StageWork


class Inner:
    num_steps = num_forgotten = 0

    def forget(self) -> None:
        self.num_forgotten += 1

    def gradients(self) -> list[object]:
        return []

    def update(self, *, progress: float) -> None:
        self.num_steps += 1


class Outer:
    progress = 0.0
    num_steps = 0
    is_held = False

    def step(self) -> None:
        assert not self.is_held, "no step follows the last one"
        self.num_steps += 1

    def hold_progress(self) -> None:
        self.is_held = True


def loop_of() -> tuple[StageLoop, Inner, Outer]:
    inner, outer, stage = Inner(), Outer(), SimpleNamespace(hidden_size=16, device=torch.device("cpu"))
    return StageLoop(cast(Any, stage), spec_of(), cast(Any, inner), cast(Any, outer)), inner, outer


def test_a_replica_that_counted_nothing_for_the_last_step_ends_as_the_others_do() -> None:
    loop, inner, outer = loop_of()
    loop.close_step(64, 0.25)
    loop.finish()
    loop.finish()
    assert (inner.num_steps, outer.num_steps) == (1, 2)
    assert (outer.progress, outer.is_held) == (1, True)


def test_no_step_follows_the_end_of_the_schedule() -> None:
    loop, inner, outer = loop_of()
    for _ in range(3):
        assert loop.close_step(64, 1.0) == 1.0
    assert (inner.num_steps, inner.num_forgotten, outer.num_steps) == (1, 2, 1)


@pytest.mark.parametrize(("error", "raised"), [(torch.OutOfMemoryError(), PeerError), (RuntimeError(), RuntimeError)])
def test_only_an_accelerator_that_is_out_of_memory_loses_a_microbatch(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, raised: type[Exception]
) -> None:
    def fail(self: StageWork, task: Task) -> None:
        raise error

    monkeypatch.setattr(StageWork, "compute", fail)
    with pytest.raises(raised):
        loop_of()[0].compute(Task(Kind.FORWARD, MicrobatchId("head", 1), None))


def test_a_task_that_fails_leaves_the_gradients_of_the_others() -> None:
    spec, id = spec_of(), MicrobatchId("head", 1)
    stage = build_stage(spec.model, cut_of(spec), index=1, sequence_length=spec.data.sequence_length)
    work, hidden = StageWork(stage, spec), torch.ones(1, spec.data.sequence_length, spec.model.hidden_size)

    def gradients() -> list[torch.Tensor]:
        return [param.grad.clone() for param in stage.model.parameters() if param.grad is not None]

    work.compute(Task(Kind.BACKWARD, id, hidden, hidden))
    once = gradients()
    with pytest.raises(MicrobatchLost):
        work.compute(Task(Kind.BACKWARD, id, hidden, hidden * torch.inf))
    assert all(map(torch.equal, gradients(), once))
    work.compute(Task(Kind.BACKWARD, id, hidden, hidden))
    assert all(torch.equal(now, 2 * before) for now, before in zip(gradients(), once, strict=True))
