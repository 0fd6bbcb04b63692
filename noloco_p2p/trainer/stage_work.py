"""Compute the tasks of one stage in a pipeline, and encode and decode the tensors that travel between stages.

One thread computes, and only that thread touches weights. Other threads may call `check`, `decoded` and `encoded` at
the same time, because these do not touch weights. The pipeline never stops for a swap: half-differences are added to
the weights between two tasks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from noloco_p2p.codec import LARGEST, Codec, get_activation_codec, refused_value, within
from noloco_p2p.devices import empty_cache, is_out_of_memory
from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.node import MicrobatchLost, Task
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.flow.steps import FINAL_MARK
from noloco_p2p.outer.noloco import NoLoCo
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.evaluate import evaluating
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.stage import Stage, dropout_seed

log = logging.getLogger(__name__)

SMOOTHING = 0.1  # weight of a new measurement of the duration of a task
CODABLE = LARGEST / 2  # every codec can represent magnitudes up to this one, although int8 rounds its scales up
HISTORY_FRAMES = 64
LEAST_FRAMES = 8  # the first frames are always admitted
MOST_TIMES = 10.0  # limit for the ratio of a frame's RMS to the median, in either direction
# The RMS changes most at the start. The limit is therefore wide at first, falls in inverse proportion to the number of
# frames, and reaches MOST_TIMES with the 640th frame. This limit drops 5 of 134,000 honest frames. A limit of
# MOST_TIMES from the start would drop 20.
FIRST_TIMES = 100.0


class StageWork:
    """The computations of one stage. Gradients accumulate in the parameters until `close`.

    If a task raises an exception, the gradients of other tasks are unchanged.
    """

    def __init__(self, stage: Stage, spec: TrainerSpec) -> None:
        self.stage, self.spec = stage, spec
        self.loss_sum, self.loss_tokens = 0.0, 0  # only in a head; the trainer sets them to 0 with each report
        self.evaluated_sum, self.evaluated_tokens = 0.0, 0
        pipeline = spec.pipeline
        self._activations = get_activation_codec(pipeline.activations)
        self._gradients = get_activation_codec(pipeline.gradients)
        self.activation_gate, self.gradient_gate = RmsGate("activations"), RmsGate("gradients")
        self._shape = (pipeline.microbatch, spec.data.sequence_length, stage.hidden_size)
        self.forward_bytes = self._activations.num_bytes(self._shape)
        self.backward_bytes = self._gradients.num_bytes(self._shape)

    def probe(self) -> float:
        """Measure the time for one microbatch on this machine twice, and return the shorter time in seconds.

        The caller must drop the gradients that this leaves behind.
        """
        stage, shape = self.stage, self._shape
        hidden = torch.randn(shape, dtype=torch.float32, device=stage.device)
        tokens = torch.zeros(shape[:2], dtype=torch.long, device=stage.device)
        inputs = tokens if stage.is_head else hidden
        seconds: list[float] = []
        for _ in range(2):
            began_s = time.monotonic()
            forward = stage.forward(inputs, seed=0)
            gradient = stage.loss_backward(hidden, tokens).gradient if stage.is_head else torch.zeros_like(forward)
            stage.backward(inputs, gradient, seed=0)
            float(next(stage.model.parameters()).detach().flatten()[0])  # waits for an accelerator
            seconds.append(time.monotonic() - began_s)
        return min(seconds)

    def check(self, payload: memoryview, *, is_backward: bool) -> None:
        """Raise CorruptPayload, or its subclass NotFinite, if a payload cannot be decoded."""
        (self._gradients if is_backward else self._activations).check(payload, shape=self._shape)

    def decoded(self, task: Task) -> Task:
        """Return the task with its payloads decoded to tensors on the device of the stage.

        Raises CorruptPayload if a payload cannot be decoded, or if its values are far larger or smaller than usual.
        """
        is_backward = task.kind is Kind.BACKWARD
        of_received = self._gradients if is_backward else self._activations
        data, received = self._decoded(task.data, self._activations), self._decoded(task.received, of_received)
        if received is not None:
            (self.gradient_gate if is_backward else self.activation_gate).admit(received)
        elif isinstance(task.data, memoryview) and data is not None:
            self.activation_gate.admit(data)
        return replace(task, data=data, received=received)

    def compute(self, task: Task) -> Tensor | None:
        """Compute the content of the next frame, with the shape (sequences, tokens, hidden).

        Returns None for a BACKWARD task of the head, and for a LOSS task of an evaluation. Raises MicrobatchLost if the
        result is non-finite or larger than a codec can represent.
        """
        inputs, received = task.data, task.received
        assert isinstance(inputs, Tensor)
        seed = dropout_seed(f"{task.id.head}/{task.id.number}", self.stage.index)
        if not task.is_training:
            return self._evaluated(task.kind, inputs, received)
        if task.kind is Kind.FORWARD:
            return _finite(self.stage.forward(inputs, seed=seed))
        assert isinstance(received, Tensor)
        with self._gradients_apart():
            if task.kind is Kind.LOSS:
                summed = self.stage.loss_backward(received, inputs)
                gradient = _finite(summed.gradient)
                self.loss_sum += float(summed.loss)
                self.loss_tokens += summed.num_tokens
                return gradient
            passed = self.stage.backward(inputs, received, seed=seed)
            return None if passed is None else _finite(passed)

    def encoded(self, kind: Kind, values: Tensor) -> memoryview:
        """Encode the result of `compute` for a task of this kind."""
        return (self._activations if kind is Kind.FORWARD else self._gradients).encode(values)

    def close(self, inner: InnerStep, num_tokens: int, *, progress: float) -> None:
        """Take an inner step with the accumulated gradients, divided by the number of tokens."""
        for gradient in inner.gradients():
            gradient.div_(num_tokens)
        inner.update(progress=progress)

    def _evaluated(self, kind: Kind, inputs: Tensor, received: object) -> Tensor | None:
        with evaluating(self.stage.model):
            if kind is Kind.FORWARD:
                return _finite(self.stage.forward(inputs))
            assert isinstance(received, Tensor)
            self.evaluated_sum += float(self.stage.loss(received, inputs))
            self.evaluated_tokens += inputs[:, 1:].numel()
            return None

    @contextmanager
    def _gradients_apart(self) -> Iterator[None]:
        """Add the gradients of the `with` block to the earlier gradients.

        If the block raises an exception, its gradients are dropped.
        """
        params = list(self.stage.model.parameters())
        earlier = [param.grad for param in params]
        for param in params:
            param.grad = None
        try:
            yield
        except BaseException:
            for param in params:
                param.grad = None
            raise
        finally:
            for param, before in zip(params, earlier, strict=True):
                if before is not None:
                    param.grad = before if param.grad is None else before.add_(param.grad)

    def _decoded(self, data: object, codec: Codec) -> Tensor | None:
        if data is None or isinstance(data, Tensor):
            return None if data is None else data.to(self.stage.device)
        assert isinstance(data, memoryview)
        return codec.decode(data, shape=self._shape, dtype=torch.float32, device=self.stage.device)


class StageLoop(StageWork):
    """The work of a peer that trains a stage, which includes its inner steps.

    `outer` swaps with replicas of the same stage. The progress of a head follows from its own steps, while an inner
    replica follows the progress of the heads.
    """

    def __init__(self, stage: Stage, spec: TrainerSpec, inner: InnerStep, outer: NoLoCo) -> None:
        super().__init__(stage, spec)
        self.steps = 0
        self._inner, self._outer = inner, outer
        self._task_s: dict[Kind, float] = {}  # smoothed duration of each kind of task
        self._has_finished = outer.progress >= FINAL_MARK

    @property
    def microbatch_s(self) -> float | None:
        """The compute time of a microbatch at this stage in seconds, or None before the first one."""
        return sum(self._task_s.values()) if Kind.BACKWARD in self._task_s else None

    def compute(self, task: Task) -> Tensor | None:
        """Compute as `StageWork` does. Raises MicrobatchLost also if the accelerator runs out of memory."""
        began_s = time.monotonic()
        try:
            result = super().compute(task)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("a microbatch was lost because the accelerator ran out of memory")
            error.__traceback__ = None  # it would keep the activations in memory
            empty_cache(self.stage.device)
            raise MicrobatchLost("the accelerator ran out of memory") from None
        seconds = time.monotonic() - began_s
        before = self._task_s.get(task.kind, seconds)
        self._task_s[task.kind] = before + SMOOTHING * (seconds - before)
        return result

    def close_step(self, num_tokens: int, progress: float | None) -> float:
        """Take an inner step, and return the progress of this peer."""
        if self._has_finished or not num_tokens:  # this stage has finished, and a head is late
            self._inner.forget()
        else:
            self.close(self._inner, num_tokens, progress=self._outer.progress)
            self.steps += 1
            self._advance(progress)
        return self._outer.progress

    def finish(self) -> None:
        """Take the last step without gradients, because nothing was counted here since the step before."""
        if not self._has_finished:
            self._advance(FINAL_MARK)

    def _advance(self, progress: float | None) -> None:
        """Count one inner step, and set the progress to `progress` if this peer follows the heads.

        The progress is set last, because a replica that was away must first notice that it is behind and fetch the
        state of another replica.
        """
        outer = self._outer
        outer.step()
        if progress is not None:
            outer.progress = progress
        self._has_finished = outer.progress >= FINAL_MARK
        if self._has_finished:
            outer.hold_progress()  # otherwise a partner that is behind would move a finished head backwards


def _finite(values: Tensor) -> Tensor:
    if not within(values, lowest=-CODABLE, highest=CODABLE):
        error = refused_value(values, name="a pipeline codec")
        log.error("a microbatch was lost: %s", error)
        raise MicrobatchLost(str(error))
    return values


class RmsGate:
    """Refuses a frame from a pipeline neighbour if its root mean square (RMS) is far from the usual value.

    This bounds the damage that a single frame can do. A dishonest stage can still bias its frames within the limits.
    There is one gate for each boundary and direction. All frames count toward its median, so that it follows real
    changes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._recent: deque[float] = deque(maxlen=HISTORY_FRAMES)
        self._num_frames = 0

    def admit(self, values: Tensor) -> None:
        """Raise CorruptPayload if the RMS of a frame is more than ten times, or less than a tenth of, the usual value.

        The limits are wider for the first frames.
        """
        rms = float(torch.linalg.vector_norm(values, dtype=torch.float32)) / values.numel() ** 0.5
        usual = median(self._recent) if len(self._recent) >= LEAST_FRAMES else rms
        self._recent.append(rms)
        self._num_frames += 1
        most = min(FIRST_TIMES, max(MOST_TIMES, FIRST_TIMES * HISTORY_FRAMES / self._num_frames))
        if not usual / most <= rms <= usual * most:
            times = rms / usual if usual else float("inf")
            raise CorruptPayload(f"the RMS of {self._name} is {times:.3g} times its usual value")
