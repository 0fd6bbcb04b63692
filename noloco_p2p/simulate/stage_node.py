"""A node of a simulated pipeline. It drives the real `flow` code on a virtual clock, and swaps with its stage."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from noloco_p2p.errors import CorruptPayload
from noloco_p2p.flow.actions import Action, Broadcast, CloseStep, Compute, GaveUp, Kind, Send
from noloco_p2p.flow.frames import Backward, Forward, Frame, MicrobatchId
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import MAX_SINKS, TICK_S
from noloco_p2p.flow.replica import Replica
from noloco_p2p.peer.stage_flow import NUM_HEADS, NUM_NEIGHBOURS, REDRAW_S, Neighbours
from noloco_p2p.simulate.replica import SimulatedPeer, now_s
from noloco_p2p.simulate.shared_link import SharedLink, Urgency, transfer
from noloco_p2p.simulate.stage_work import TaskFlops
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.memory import MemoryNetwork
from noloco_p2p.trainer.stage import train_of_stage
from noloco_p2p.trainer.stage_work import StageWork

FAILED = object()  # the result of a task whose microbatch is lost


class Pipeline(Protocol):
    """The interface through which a node uses the rest of the pipeline."""

    def node(self, name: str) -> StageNode: ...

    def neighbours(self, node: StageNode) -> None:
        """Draw the peers to which the node sends, and pass them to its state machine."""
        ...

    def launched(self, id: MicrobatchId) -> None: ...

    def is_lost_in(self, task: Compute, stage: int) -> bool: ...

    def loss_came(self) -> None: ...

    def step_closed(self, node: StageNode) -> None: ...


class StageNode(SimulatedPeer):
    """A node of a pipeline. A node of stage 0 is a head.

    `begin` starts the node. `has_finished` is set when its schedule is done, or when it has left.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        spec: TrainerSpec,
        work: StageWork,
        *,
        name: str,
        number: int,
        network: MemoryNetwork,
        link: SharedLink,
        flops: TaskFlops,
        flops_per_s: float,
        is_absent: Callable[[int], bool],
        seed: int,
    ) -> None:
        stage = work.stage.index
        super().__init__(
            spec,
            work.stage.model,
            train_of_stage(spec),
            peer_id=name,
            network=network,
            is_absent=is_absent,
            seed=seed,
            follows_caller=stage > 0,
        )
        self.name, self.stage, self.number = name, stage, number
        self.work, self.link = work, link
        self.flops, self.flops_per_s = flops, flops_per_s
        self.rng = random.Random(f"flow/{seed}/{name}")
        self.streams: dict[str, None] = {}  # open streams, in the order of opening
        self.downstream = Neighbours(self.rng, NUM_NEIGHBOURS)
        # At a head, the sinks that it drew; in the last stage, the heads that it drew.
        self.ring = Neighbours(self.rng, NUM_HEADS if stage else MAX_SINKS)
        self.unreachable: set[str] = set()
        self.is_alive = True
        self.has_finished = asyncio.Event()
        self.busy_s = 0.0
        self.lateness: Counter[int] = Counter()  # inner steps from a forward pass to its backward pass
        self.latencies_s: list[float] = []  # at a head, from a launch to the end of its backward pass
        self.num_counted = 0  # backward passes; at a head, those of its front
        self.trained_tokens = 0  # in closed steps, including the first ones of sequences
        self._pipeline = pipeline
        self._is_frozen = self._is_leaving = False
        self._redraw_at_s = now_s() + REDRAW_S
        self._counted_tokens = 0
        self._step_of: dict[MicrobatchId, int] = {}  # the inner step of each forward pass
        self._launched_s: dict[MicrobatchId, float] = {}
        self._given_up: deque[Tensor] = deque()
        self._batches: Iterator[Tensor] = iter(())
        self._tokens = spec.pipeline.microbatch * spec.data.sequence_length  # tokens of a microbatch
        self._microbatch_tokens = spec.pipeline.microbatch * (
            spec.data.sequence_length - 1
        )  # tokens that its loss counts

    def begin(self, machine: Head | Replica, batches: Iterable[Tensor] = ()) -> None:
        self.machine = machine
        self._batches = iter(batches)
        asyncio.get_running_loop().call_later(TICK_S * self.rng.random(), self._tick)

    # events

    def received(self, peer: str, frame: Frame) -> None:
        if self._is_frozen:
            return
        self.streams.setdefault(peer)
        self._do(self.machine.received(peer, frame, now_s()))

    def stream_closed(self, peer: str) -> None:
        if not self.is_alive:
            return
        self.streams.pop(peer, None)
        self.unreachable.add(peer)
        self._do(self.machine.stream_closed(peer, now_s()))
        self._pipeline.neighbours(self)

    def tell_neighbours(self, sinks: Collection[str]) -> None:
        downstream = self.downstream.chosen
        for other in (*sorted(downstream), *sorted(sinks)):
            self.streams.setdefault(other)
            self._pipeline.node(other).streams.setdefault(self.name)
        if isinstance(self.machine, Head):
            self._do(self.machine.neighbours_changed(downstream, sinks, now_s()))
        else:
            self._do(self.machine.neighbours_changed(downstream, now_s()))

    def leave(self) -> None:
        """Accept no new microbatches, finish those that this node holds, and leave."""
        self._is_leaving = True
        self._do(self.machine.leave(now_s()))

    def vanish(self) -> None:
        """Crash the node. Each peer with a stream to this node notices the crash after the delay of their links."""
        self.is_alive = False
        self.has_finished.set()
        self._network.vanish(self.name)
        for name in list(self.streams):
            other = self._pipeline.node(name)
            self._later(self.link.delay_s + other.link.delay_s, other.stream_closed, self.name)

    def freeze(self) -> None:
        """Stop the node, so that it handles no more tasks, frames or inner steps."""
        self._is_frozen = True

    def _tick(self) -> None:
        if self._is_frozen or not self.is_alive:
            return
        self._do(self.machine.tick(now_s()))
        if self._is_leaving and self.machine.is_idle:
            self.vanish()
            self._network.remove(self.name)
            self._network.own(asyncio.create_task(self.stop()))
            return
        if now_s() >= self._redraw_at_s:
            self._redraw_at_s = now_s() + REDRAW_S
            self.downstream.drop_one()
            self._pipeline.neighbours(self)
        self._later(TICK_S, self._tick)

    # actions

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(to, frame):
                    self._send(to, frame)
                case Broadcast(frame, but):
                    for other in [name for name in self.streams if name != but]:
                        self._send(other, frame)
                case Compute():
                    self._compute(action)
                case CloseStep():
                    asyncio.get_running_loop().call_soon(self._close_step, action)
                case GaveUp(_, microbatch):
                    assert isinstance(microbatch, Tensor)
                    self._given_up.append(microbatch)
        if isinstance(self.machine, Head) and self.is_alive and self.machine.can_launch(now_s()):
            microbatch = self._given_up.popleft() if self._given_up else next(self._batches)
            id, actions = self.machine.launch(microbatch, self._microbatch_tokens, now_s())
            self._launched_s[id] = now_s()
            self._pipeline.launched(id)
            self._do(actions)

    def _send(self, to: str, frame: Frame) -> None:
        other = self._pipeline.node(to)
        delay_s = self.link.delay_s + other.link.delay_s
        self.streams.setdefault(to)
        if not other.is_alive:
            self._later(delay_s, self.stream_closed, to)
        elif isinstance(frame, Forward | Backward):
            is_forward = isinstance(frame, Forward)
            num_bytes = self.work.forward_bytes if is_forward else self.work.backward_bytes
            urgency = Urgency.FORWARD if is_forward else Urgency.BACKWARD
            sent_s, sent = now_s(), frame

            def begin() -> None:
                nonlocal sent
                if isinstance(sent, Forward):
                    sent = replace(sent, remaining_s=max(0.0, sent.remaining_s - (now_s() - sent_s)))

            transfer(self.link, other.link, num_bytes, urgency, lambda: self._arrive(other, sent), on_begin=begin)
        else:
            self._later(delay_s, self._arrive, other, frame)

    def _arrive(self, other: StageNode, frame: Frame) -> None:
        if self.is_alive and other.is_alive:
            other.received(self.name, frame)

    def _compute(self, task: Compute) -> None:
        """Compute the task at once, but report the result after its virtual duration."""
        seconds = self.flops.of_kind(task.kind) * self._tokens / self.flops_per_s
        self.busy_s += seconds
        result: object = FAILED
        if not self._pipeline.is_lost_in(task, self.stage):
            try:
                result = self.work.run(task)
            except (ValueError, CorruptPayload):
                result = FAILED  # a non-finite or unusually large value
        self._later(seconds, self._computed, task, result)

    def _computed(self, task: Compute, result: object) -> None:
        if self._is_frozen or not self.is_alive:
            return
        if result is FAILED:
            self._do(self.machine.compute_failed(task, now_s()))
            return
        self._note(task)
        self._do(self.machine.computed(task, result, now_s()))

    def _note(self, task: Compute) -> None:
        is_head = self.stage == 0
        if task.kind is Kind.FORWARD:
            self._step_of[task.id] = self.steps
        if task.kind is (Kind.LOSS if is_head else Kind.BACKWARD):
            self._counted_tokens += self._microbatch_tokens
        if task.kind is Kind.LOSS:
            self._pipeline.loss_came()
        if task.kind is Kind.BACKWARD:
            self.num_counted += 1
            self.lateness[self.steps - self._step_of.pop(task.id)] += 1
            if is_head:
                self.latencies_s.append(now_s() - self._launched_s.pop(task.id))

    # steps

    def _close_step(self, step: CloseStep) -> None:
        if self._is_frozen or not self.is_alive:
            return
        assert step.num_tokens == self._counted_tokens, "the divisor differs from the number of counted tokens"
        self.trained_tokens += self._tokens * self._counted_tokens // self._microbatch_tokens
        self._counted_tokens = 0
        self.work.close(self.inner, step.num_tokens, progress=self.progress)
        self.step_taken()
        if self.mixing.is_due:
            self.mixing.outer_step()
        if step.progress is not None:
            self.mixing.progress = step.progress
        if self.progress >= 1:
            self.has_finished.set()
        if isinstance(self.machine, Head):
            self._do(self.machine.step_closed(self.progress, now_s()))
        else:
            self._do(self.machine.step_closed(now_s()))
        self._pipeline.step_closed(self)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(seconds, call, *arguments)
