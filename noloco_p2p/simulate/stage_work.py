"""Computes the cost of the tasks of a simulated node, and implements the ablation of late gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from noloco_p2p.flow.actions import Kind
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.cut import Sizes
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.stage import Stage
from noloco_p2p.trainer.stage_work import StageWork

FORWARD_SHARE = 0.25  # a block takes 2 FLOPs per weight forward, 2 for recomputation and 4 backward


@dataclass(frozen=True, slots=True)
class TaskFlops:
    """FLOPs per token, by kind of task."""

    forward: float
    backward: float  # including the recomputed forward pass
    loss: float

    @classmethod
    def of(cls, sizes: Sizes, cut: Sequence[int], index: int) -> TaskFlops:
        blocks = cut[index] * sizes.block.flops
        loss = 0.0 if index else sizes.vocabulary.flops
        return cls(FORWARD_SHARE * blocks, (1 - FORWARD_SHARE) * blocks, loss)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.loss

    def of_kind(self, kind: Kind) -> float:
        return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.LOSS: self.loss}[kind]


@dataclass(frozen=True, slots=True)
class LateBackward:
    inputs: Tensor
    gradient: Tensor
    seed: int


class LateStageWork(StageWork):
    """Stage work whose parameter gradients are applied `late_steps` inner steps late. Input gradients are not delayed.

    The gradients of the last `late_steps` steps are never applied.
    """

    def __init__(self, stage: Stage, spec: TrainerSpec, *, late_steps: int) -> None:
        super().__init__(stage, spec)
        self._late_steps = late_steps
        self._late: deque[tuple[list[LateBackward], int]] = deque()  # of closed steps, with their tokens
        self._backwards: list[LateBackward] = []  # of the current step

    def close(self, inner: InnerStep, num_tokens: int, *, progress: float) -> None:
        for gradient in inner.gradients():
            gradient.div_(num_tokens)
        self._late.append((self._backwards, num_tokens))
        self._backwards = []
        if len(self._late) > self._late_steps:
            due, due_tokens = self._late.popleft()
            for late in due:
                self.stage.backward(late.inputs, late.gradient / due_tokens, seed=late.seed)
        inner.update(progress=progress)

    def _backward(self, inputs: Tensor, gradient: Tensor, seed: int) -> Tensor | None:
        self._backwards.append(LateBackward(inputs, gradient, seed))
        passed = super()._backward(inputs, gradient, seed)
        for param in self.stage.model.parameters():
            param.grad = None
        return passed
