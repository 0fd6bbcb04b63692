"""Drive the state machine of a pipeline stage over the streams to its neighbours, in parallel with the computing
thread.

The driver passes events and their times to `flow/`, and performs the resulting actions on the network thread. It passes
tasks one at a time to the only thread that touches weights (`threaded_flow.py`). While that thread computes, other
threads decode the payload of the next task and encode the result of the previous one, so it waits for neither.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from noloco_p2p.errors import NotFinite, PeerError, Refused
from noloco_p2p.flow.actions import Action, Broadcast, CloseStep, Compute, GaveUp, Kind, Send
from noloco_p2p.flow.frames import Answer, Backward, Forward, Frame, Mark, Want
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import TICK_S
from noloco_p2p.flow.replica import Replica
from noloco_p2p.net.flow import FlowLinks
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.owned_tasks import OwnedTasks

log = logging.getLogger(__name__)
T = TypeVar("T")
LookFor = Callable[[str], Awaitable[None]]

DIAL_AGAIN_S = 5.0  # between two dials of a neighbour to which a stream is kept open
MAX_DROPPED = 16  # consecutive forwards from one neighbour; an honest neighbour sends only after a Credit


class Work(Protocol):
    """The work that other threads may do while one thread computes, as in `trainer.stage_work.StageWork`."""

    def check(self, payload: memoryview, *, is_backward: bool) -> None: ...

    def decoded(self, task: Compute) -> Compute: ...

    def encoded(self, kind: Kind, values: Any) -> memoryview: ...


@dataclass(frozen=True, slots=True, eq=False)
class Handed:
    """A task for the computing thread. `inputs` is the task with tensors in place of payloads."""

    task: Compute | CloseStep
    inputs: Compute | CloseStep


class FlowDriver:
    """The driver of a pipeline stage, which belongs to the network thread.

    `look_for` reads the record of a head again if the directory does not list it. A replica waits for it before it
    handles a ticket of that head, because a record reaches it later than the first microbatch may.

    The computing thread reads `tasks`, which can also contain an exception that was raised while reading data. A head
    has `batches`, from which another thread reads the next microbatch before it is due. `microbatch_tokens` is the
    number of tokens in the loss of each microbatch.
    """

    def __init__(
        self,
        machine: Head | Replica,
        links: FlowLinks,
        work: Work,
        tickets: Tickets,
        *,
        look_for: LookFor,
        stage: int,
        num_stages: int,
        executor: concurrent.futures.Executor,
        strike: Callable[[str, str], None],
        batches: Iterator[object] | None = None,
        microbatch_tokens: int = 0,
    ) -> None:
        self.machine = machine
        self.tasks: queue.SimpleQueue[Handed | Exception] = queue.SimpleQueue()
        self.is_over = False  # no head is training any more, and nothing is left to do
        self._links = links
        self._work = work
        self._tickets = tickets
        self._look_for = look_for
        self._last_stage = num_stages - 1
        self._executor = executor
        self._strike = strike
        self._batches: Iterator[object] = batches or iter(())
        self._microbatch_tokens = microbatch_tokens
        self._loop = asyncio.get_running_loop()
        self._downstream: frozenset[str] = frozenset()
        self._kept: dict[str, float] = {}  # neighbour to which a stream is kept open -> time of the last dial
        self._num_dropped = Counter[str]()
        # the next task, and its payload while it is being decoded
        self._ahead: tuple[Compute, asyncio.Future[Compute]] | None = None
        self._given_up: deque[object] = deque()
        self._to_evaluate: deque[object] = deque()
        self._microbatch: asyncio.Future[object] | None = None  # the microbatch to launch next
        self._running = OwnedTasks("a pipeline task")
        links.neighbourhood = self

    def start(self) -> None:
        self._running.start(self._tick())

    def meet(self, downstream: Collection[str], ring: Collection[str] = ()) -> None:
        """Set the neighbours of this peer.

        `downstream` holds the replicas of the next stage. `ring` holds the peers to which a stream is kept open where
        the pipeline closes: a head keeps streams to replicas of the last stage, and these replicas keep streams to
        heads.
        """
        self._downstream = frozenset(downstream)
        self._kept = dict.fromkeys(ring, -DIAL_AGAIN_S)
        self._keep_streams()
        self._neighbours_changed()

    def leave(self) -> None:
        """Stop launching and accepting microbatches, but finish the ones that are held."""
        self._do(self.machine.leave(self._now_s()))

    def rejoin(self) -> None:
        """Take part again after `leave`."""
        self._do(self.machine.rejoin(self._now_s()))

    def evaluate(self, microbatches: Collection[object]) -> None:
        """Send these microbatches of a head through the pipeline before any others, without gradients.

        They replace the microbatches of an earlier call.
        """
        self._to_evaluate = deque(microbatches)
        self._do([])

    async def stop(self) -> None:
        """Stop the driver. The owner must end the streams first."""
        await self._running.stop(grace_s=0.0)

    # neighbours

    def opened(self, peer: str, stage: int) -> None:
        if isinstance(self.machine, Head):
            self._do(self.machine.stream_opened(peer, self._now_s()))
        if stage == self._last_stage:
            self._neighbours_changed()

    def closed(self, peer: str) -> None:
        self._num_dropped.pop(peer, None)
        self._do(self.machine.stream_closed(peer, self._now_s()))
        self._neighbours_changed()

    async def checked(self, peer: str, frame: Frame) -> Frame:
        """Check a frame and return it. If the payload contains non-finite values, it is removed, and the peer gets a
        strike.

        Raises CorruptPayload for damage that the network cannot cause.
        """
        if isinstance(frame, Want | Mark):
            self._tickets.check(frame.ticket)
            if isinstance(self.machine, Replica):
                await self._look_for(frame.ticket.id.head)
        if not isinstance(frame, Forward | Backward) or frame.payload is None:
            return frame
        payload, is_backward = frame.payload, isinstance(frame, Backward)
        assert isinstance(payload, memoryview)
        try:
            await self._elsewhere(lambda: self._work.check(payload, is_backward=is_backward))
        except NotFinite as error:
            self._strike(peer, str(error))
            return replace(frame, payload=None)
        return frame

    def received(self, peer: str, frame: Frame) -> None:
        actions = self.machine.received(peer, frame, self._now_s())
        if isinstance(frame, Forward):
            self._count_dropped(peer, is_dropped=Send(peer, Answer(frame.id, is_taken=False)) in actions)
        self._do(actions)

    def _count_dropped(self, peer: str, *, is_dropped: bool) -> None:
        self._num_dropped[peer] = self._num_dropped[peer] + 1 if is_dropped else 0
        if self._num_dropped[peer] > MAX_DROPPED and isinstance(self.machine, Replica):
            sentence = f"it sent {MAX_DROPPED} forward frames without a reservation"
            self._strike(peer, sentence)
            self._loop.call_soon(self._links.drop, peer, Refused(sentence, peer=peer))

    def _neighbours_changed(self) -> None:
        now_s = self._now_s()
        if isinstance(self.machine, Head):
            sinks = [peer for peer, stage in self._links.stages.items() if stage == self._last_stage]
            self._do(self.machine.neighbours_changed(self._downstream, sinks, now_s))
        else:
            self._do(self.machine.neighbours_changed(self._downstream, now_s))

    def _keep_streams(self) -> None:
        now_s = self._now_s()
        for peer, dialled_s in self._kept.items():
            if peer not in self._links.stages and now_s - dialled_s >= DIAL_AGAIN_S:
                self._kept[peer] = now_s
                self._links.open(peer)

    async def _tick(self) -> None:
        while True:
            self._do(self.machine.tick(self._now_s()))
            self._keep_streams()
            self._links.look()
            if isinstance(self.machine, Head):
                self.is_over = self.machine.is_over
            else:
                self.is_over = self.machine.is_over(self._now_s())
            await asyncio.sleep(TICK_S)

    # reports of the computing thread

    def computed(self, task: Compute, result: object) -> None:
        """Report the result of a task, which is a tensor, or None if nothing is to be sent."""
        payload = None if result is None else self._elsewhere(lambda: self._work.encoded(task.kind, result))
        self._do(self.machine.computed(task, payload, self._now_s()))

    def failed(self, task: Compute) -> None:
        self._do(self.machine.compute_failed(task, self._now_s()))

    def step_closed(self, progress: float) -> None:
        now_s = self._now_s()
        machine = self.machine
        self._do(machine.step_closed(progress, now_s) if isinstance(machine, Head) else machine.step_closed(now_s))

    # actions

    def _do(self, actions: list[Action]) -> None:
        self._perform(actions)
        self._launch()
        self._look_ahead()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(to, frame):
                    self._send(to, frame)
                case Broadcast(Mark(ticket), but):
                    self._links.broadcast(Mark(self._tickets.signed(ticket)), but=but)
                case Broadcast(frame, but):
                    self._links.broadcast(frame, but=but)
                case Compute():
                    self._running.start(self._hand_out(action))
                case CloseStep():
                    self.tasks.put(Handed(action, action))
                case GaveUp(_, microbatch, is_training):
                    (self._given_up if is_training else self._to_evaluate).append(microbatch)

    def _send(self, to: str, frame: Frame) -> None:
        if isinstance(frame, Forward | Backward):
            self._running.start(self._send_payload(to, frame, self._now_s()))
        elif isinstance(frame, Want | Mark):
            self._links.send(to, replace(frame, ticket=self._tickets.signed(frame.ticket)))
        else:
            self._links.send(to, frame)

    async def _send_payload(self, to: str, frame: Forward | Backward, since_s: float) -> None:
        assert isinstance(frame.payload, asyncio.Future)
        payload = await frame.payload
        self._links.send(to, replace(frame, payload=payload), since_s=since_s)

    async def _hand_out(self, task: Compute) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead and (ahead[0].kind, ahead[0].id) == (task.kind, task.id):
            decoding = ahead[1]
        else:
            decoding = self._elsewhere(lambda: self._work.decoded(task))
        try:
            self.tasks.put(Handed(task, await decoding))
        except PeerError as error:
            log.warning("a microbatch was lost: %s", error)
            self.failed(task)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Start decoding the payload of the next task, unless it is already being decoded."""
        if not isinstance(self.machine.tasks.running, Compute):
            return
        task = self.machine.next_task
        if task is None or (self._ahead and (self._ahead[0].kind, self._ahead[0].id) == (task.kind, task.id)):
            return
        decoding = self._elsewhere(lambda: self._work.decoded(task))
        decoding.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the result may not be needed
        self._ahead = (task, decoding)

    # data

    def _launch(self) -> None:
        machine = self.machine
        if not isinstance(machine, Head):
            return
        if self._to_evaluate and machine.can_launch(self._now_s(), is_training=False):
            microbatch, now_s = self._to_evaluate.popleft(), self._now_s()
            _, actions = machine.launch(microbatch, self._microbatch_tokens, now_s, is_training=False)
            self._perform(actions)
        if self._to_evaluate or not machine.can_launch(self._now_s()):
            return
        microbatch = self._given_up.popleft() if self._given_up else self._next_microbatch()
        if microbatch is not None:
            _, actions = machine.launch(microbatch, self._microbatch_tokens, self._now_s())
            self._perform(actions)

    def _next_microbatch(self) -> object:
        """Return the next microbatch, or None if it has not been read yet. `_launch` is called again once it has."""
        ready, self._microbatch = self._microbatch, None
        if ready and not ready.done():
            self._microbatch = ready
            return None
        if ready and (ready.exception() or ready.result() is None):
            self._microbatch = ready  # launch nothing more; the computing thread gets the error
            return None
        self._microbatch = self._elsewhere(lambda: next(self._batches, None))
        self._microbatch.add_done_callback(self._has_read)
        return ready.result() if ready else None

    def _has_read(self, reading: asyncio.Future[object]) -> None:
        if reading.cancelled():
            return
        if isinstance(error := reading.exception(), Exception):
            self.tasks.put(error)
        else:
            self._do([])

    def _elsewhere(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._executor, function)

    def _now_s(self) -> float:
        return self._loop.time()
