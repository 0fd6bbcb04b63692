"""A head of the pipeline (stage 0), which launches microbatches and drives all other stages.

A microbatch is one coroutine: the forward pass of the front, the call of the other stages, and the backward pass of the
front. In the middle of that call, the last stage calls the head, which computes the loss and answers with its gradient.

The window of microbatches in flight doubles until the first losses, grows by one from then on, and halves when losses
occur in quick succession. If no slot is free for a microbatch, it waits at the head, and no other microbatch is
launched until it has been sent. A full pipeline therefore wastes no training data.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from statistics import median

from noloco_p2p.errors import PeerError
from noloco_p2p.flow.frames import Answer, Backward, Forward, Frame, Lost, Mark, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.flow.limits import (
    DEADLINE_LATENCIES,
    FIRST_DEADLINE_S,
    FIRST_PAUSE_S,
    LONGEST_DEADLINE_S,
    LONGEST_PAUSE_S,
    MAX_SINKS,
    NUM_LATENCIES,
    SHORTEST_DEADLINE_S,
    TELL_AGAIN_S,
    TICK_S,
)
from noloco_p2p.flow.node import Computer, Links, MicrobatchLost, Node, Task, Trip
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.flow.steps import FINAL_MARK
from noloco_p2p.spec import TrainerSpec


class Flight(Trip):
    """A microbatch in flight. `loss` is set once the last stage has returned the microbatch.

    Its result is whether the loss could be computed.
    """

    def __init__(self, ticket: MicrobatchTicket, microbatch: object, allowed_s: float) -> None:
        super().__init__(ticket, allowed_s)
        self.microbatch = microbatch
        self.has_left = False  # whether it was ever sent
        self.sent_s = asyncio.get_running_loop().time()  # when it was first sent, or launched if it was not
        self.returned_by = ""  # the replica of the last stage that returned it
        self.loss: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class Window:
    """The number of microbatches that may be in flight, controlled as in TCP (RFC 5681).

    The window doubles after each window without losses, and halves after losses. Once it has been halved, it grows by
    one per window.

    A loss that follows a whole window without losses has no effect. On links that lose 5 % of the microbatches at
    random, halving at each loss would reduce the speed by a sixth.
    """

    def __init__(self, largest: int) -> None:
        self.size = 1
        self._largest = largest
        self._is_starting = True  # until the first halving
        self._num_good = 0  # since the size last changed
        self._num_good_in_a_row = 0
        self._halved_s = -1.0
        self._pause_s = FIRST_PAUSE_S
        self._resume_s = 0.0

    def is_open(self, num_in_flight: int, now_s: float) -> bool:
        return num_in_flight < self.size and now_s >= self._resume_s

    def ended_well(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._num_good += 1
        self._num_good_in_a_row += 1
        if self._is_starting or self._num_good >= self.size:
            self.size, self._num_good = min(self.size + 1, self._largest), 0

    def lost(self, sent_s: float, now_s: float) -> None:
        """Record a lost microbatch and halve the window.

        If the microbatch was sent before the last halving, its loss has the same cause and does not count.
        """
        is_alone, self._num_good_in_a_row = self._num_good_in_a_row >= self.size, 0
        if is_alone or sent_s <= self._halved_s:
            return
        self.size, self._num_good, self._halved_s = max(1, self.size // 2), 0, now_s
        self._is_starting = False
        self._resume_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)


class HeadDeadlines:
    """The deadline of a microbatch, which is a multiple of the median latency.

    A missed deadline counts as a measured latency, so that deadlines grow if the path becomes slower.
    """

    def __init__(self) -> None:
        self._latencies_s: deque[float] = deque(maxlen=NUM_LATENCIES)

    @property
    def median_s(self) -> float:
        """The median of the last latencies, or 0 if there are none."""
        return median(self._latencies_s) if self._latencies_s else 0.0

    @property
    def seconds(self) -> float:
        if not self._latencies_s:
            return FIRST_DEADLINE_S
        return min(max(DEADLINE_LATENCIES * self.median_s, SHORTEST_DEADLINE_S), LONGEST_DEADLINE_S)

    def measured(self, seconds: float) -> None:
        self._latencies_s.append(seconds)


class Head(Node[Flight]):
    """A head.

    `num_rooms`, from `limits.num_rooms`, is the number of microbatches that it may have in flight. `first_number` must
    be larger than every number that this head has used, even before a restart. Unix time in milliseconds meets this
    condition. `Links` signs the tickets.

    The head closes a step when one of its own batches is complete. The gradients are divided by the number of tokens in
    the losses. With one microbatch in flight, that number equals the number of tokens processed. With more
    microbatches in flight, the tail of the model is ahead of the front by these microbatches, both at the beginning
    and at the end of the step. If a Backward for the front is lost, its gradient counts as zero.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        links: Links,
        computer: Computer,
        *,
        peer_id: str,
        num_rooms: int,
        first_number: int,
        rng: random.Random,
        progress: float = 0.0,
    ) -> None:
        super().__init__(spec, links, computer, stage=0, rng=rng)
        self.window = Window(num_rooms)
        self.deadlines = HeadDeadlines()
        self.progress = progress
        self.loss_tokens = self.done_tokens = 0  # in the current step
        self._peer_id, self._next_number = peer_id, first_number
        self._sinks: tuple[str, ...] = ()
        self._given_up: deque[object] = deque()
        self._to_evaluate: deque[object] = deque()
        self._changed = asyncio.Event()  # something that decides whether the next microbatch is due
        self._told_s = 0.0  # when it last told everybody that it has finished

    def start(self) -> None:
        super().start()
        self._tasks.start(self._launch())

    # events

    def neighbours_changed(self, downstream: Collection[str]) -> None:
        """Set the replicas of stage 1. Microbatches return over the streams to replicas of the last stage."""
        sinks = sorted(peer for peer, stage in self._links.stages.items() if stage == self._last_stage)
        self._sinks = tuple(self._rng.sample(sinks, min(MAX_SINKS, len(sinks))))
        for flight in self.trips.values():
            flight.sinks = self._sinks
        super().neighbours_changed(downstream)
        self._changed.set()

    def opened(self, peer: str) -> None:
        self.neighbours_changed(self._neighbours)
        if self.progress >= FINAL_MARK:  # tell a neighbour that was absent when this head finished
            self._links.send(peer, self._last_mark())

    def closed(self, peer: str) -> None:
        super().closed(peer)
        self.neighbours_changed(self._neighbours)

    def received(self, peer: str, frame: Frame) -> bool:
        if isinstance(frame, Want):
            self._links.send(peer, Answer(frame.ticket.id, is_taken=False))  # it accepts only its own microbatches
            return True
        return super().received(peer, frame)

    def leave(self) -> None:
        """Stop launching, finish the microbatches that have been sent, and give up all others.

        All replicas are notified, because this head's mark must not hold up the median.
        """
        super().leave()
        if self.progress < FINAL_MARK:
            self._links.broadcast(self._last_mark())
        for flight in self.trips.values():
            if not flight.sent_to:
                flight.abandon()

    def rejoin(self) -> None:
        super().rejoin()
        self._changed.set()

    def evaluate(self, microbatches: Collection[object]) -> None:
        """Send these microbatches through the pipeline before any others, without gradients.

        They replace the microbatches of an earlier call.
        """
        self._to_evaluate = deque(microbatches)
        self._changed.set()

    # microbatches

    async def _launch(self) -> None:
        """Launch one microbatch after another, each when it is due."""
        while True:
            self._changed.clear()
            is_training = not self._to_evaluate
            if not self.can_launch(is_training=is_training):
                with suppress(TimeoutError):  # the window opens again with time
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
                continue
            if not is_training:
                microbatch = self._to_evaluate.popleft()
            elif self._given_up:
                microbatch = self._given_up.popleft()
            else:
                microbatch = await self._computer.next_microbatch()
                if microbatch is None:
                    return
                if not self.can_launch():
                    self._given_up.append(microbatch)
                    continue
            flight = Flight(
                self._ticket(self._microbatch_tokens, is_training=is_training), microbatch, self.deadlines.seconds
            )
            flight.sinks = self._sinks
            self.trips[flight.id] = flight
            self._tasks.start(self._fly(flight))

    def can_launch(self, *, is_training: bool = True) -> bool:
        """Return whether the next microbatch is due."""
        if self._is_leaving or self._is_closing or (is_training and self.progress >= FINAL_MARK) or not self._sinks:
            return False
        is_waiting = any(not flight.sent_to for flight in self.trips.values())
        return not is_waiting and self.window.is_open(len(self.trips), asyncio.get_running_loop().time())

    async def _fly(self, flight: Flight) -> None:
        """Take a microbatch through the pipeline, from the forward pass of the front to its backward pass."""
        id, is_training = flight.id, flight.ticket.is_training
        loop = asyncio.get_running_loop()
        try:
            async with flight.begin():
                payload = await self._compute(Task(Kind.FORWARD, id, flight.microbatch, is_training=is_training))
                flight.step, flight.allowed_s = self.num_steps, self.deadlines.seconds
                gradient = await self._beyond(flight, payload)
                del payload
                if not await asyncio.shield(flight.loss):
                    raise MicrobatchLost("the loss of a microbatch could not be computed")
            if is_training:
                await self._compute(Task(Kind.BACKWARD, id, flight.microbatch, gradient))
                self._note_backward(flight)
                self.deadlines.measured(loop.time() - flight.sent_s)
            else:
                self.num_done += 1
            self.window.ended_well()
        except (PeerError, TimeoutError):
            if flight.has_left and loop.time() - flight.sent_s >= flight.allowed_s:
                self.deadlines.measured(self.deadlines.seconds)
            # Once the last stage has returned it, the loss is still valid, and so are the gradients of later stages.
            has_loss = bool(flight.returned_by) and await flight.loss
            self.num_lost += 1
            self.window.lost(flight.sent_s, loop.time())
            if not has_loss:
                (self._given_up if is_training else self._to_evaluate).append(flight.microbatch)
            elif is_training:
                self.done_tokens += flight.ticket.num_tokens
        finally:
            del self.trips[id]
            self._look()

    def _forward(self, peer: str, forward: Forward) -> bool:
        """Handle a microbatch that the last stage returns.

        Its slot was reserved at launch, so it is refused only if it was given up, refused by a gate, or took another
        path.
        """
        flight = self.trips.get(forward.id)
        is_repeated = flight is not None and flight.returned_by == peer
        is_welcome = flight is not None and not flight.returned_by and flight.sent_to and forward.payload is not None
        self._links.send(peer, Answer(forward.id, is_taken=bool(is_repeated or is_welcome)))
        if flight is not None and is_welcome:
            flight.returned_by = peer
            self._tasks.start(self._answer(flight, forward.payload))
        return True

    async def _answer(self, flight: Flight, payload: object) -> None:
        """Compute the loss of a microbatch, and answer the last stage with its gradient."""
        id, is_training = flight.id, flight.ticket.is_training
        try:
            gradient = await self._compute(Task(Kind.LOSS, id, flight.microbatch, payload, is_training))
        except PeerError:
            self._links.send(flight.returned_by, Lost(id))  # so that the replicas on the path free their slots
            flight.loss.set_result(False)
            flight.abandon()
            return
        flight.loss.set_result(True)
        if is_training:
            self._links.send(flight.returned_by, Backward(id, gradient))

    def _note_sent(self, trip: Flight) -> None:
        if not trip.has_left:  # repeated refusals must not extend the deadline forever
            trip.has_left, trip.sent_s = True, asyncio.get_running_loop().time()
            trip.set_timer(trip.allowed_s)
        self._changed.set()

    def _note_computed(self, task: Task) -> None:
        num_tokens = self._microbatch_tokens if task.is_training else 0
        if task.kind is Kind.LOSS:
            self.loss_tokens += num_tokens
        if task.kind is Kind.BACKWARD:
            self.done_tokens += num_tokens

    # steps

    def _look(self) -> None:
        if self.done_tokens >= self._batch_tokens and not self._is_closing:
            self._begin_step()
        if self.progress >= FINAL_MARK and asyncio.get_running_loop().time() - self._told_s >= TELL_AGAIN_S:
            self._tell_the_end()
        trains = self._is_closing or any(flight.ticket.is_training for flight in self.trips.values())
        self.is_over = self.progress >= FINAL_MARK and not trains
        self._changed.set()

    async def _close_step(self) -> None:
        async with self.turns.take(Kind.CLOSE_STEP):
            num_tokens, self.loss_tokens, self.done_tokens = self.loss_tokens, 0, 0
            self.progress = await self._computer.close_step(num_tokens, None)
            self.num_steps += 1
        self._is_closing = False
        if self.progress >= FINAL_MARK:
            self._tell_the_end()
        self._look()

    def _tell_the_end(self) -> None:
        self._told_s = asyncio.get_running_loop().time()
        self._links.broadcast(self._last_mark())

    def _last_mark(self) -> Mark:
        return Mark(self._ticket(num_tokens=0))

    def _ticket(self, num_tokens: int, *, is_training: bool = True) -> MicrobatchTicket:
        self._next_number += 1
        id = MicrobatchId(self._peer_id, self._next_number - 1)
        return MicrobatchTicket(id, min(self.progress, FINAL_MARK), num_tokens, is_training)
