"""A peer of the pipeline. A microbatch is a call that returns a gradient.

    head:     hidden = forward(tokens);  gradient = await beyond(hidden);  backward(gradient)
    replica:  hidden = forward(inputs);  gradient = await beyond(hidden);  return backward(gradient)

`beyond` has the next stage do the same. The last stage calls the head, whose answer is the gradient of the loss. Each
call is a coroutine; where it waits is where its microbatch stands. `head.py` and `replica.py` define the two kinds of
peers, and this module what they share: how a call is made.

    ask replicas of the next stage for a slot, one after another
        -> one of them has a slot: send it the activations
            -> it takes them: its Backward is the result. If it dies or gives up, the microbatch is lost
            -> it refuses them, or dies: ask others

The same code runs over sockets (`trainer/stage_flow.py`) and on the virtual clock of a simulation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from noloco_p2p.errors import PeerError
from noloco_p2p.flow.frames import Answer, Backward, Credit, Forward, Frame, Lost, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.flow.limits import ASK_AGAIN_S, ASK_PATIENCE_S, MAX_MAIL, MAX_SINKS, MAX_UNDER_WAY, TICK_S
from noloco_p2p.flow.neighbours import Few, Routing
from noloco_p2p.flow.rooms import Kind, Turns
from noloco_p2p.owned_tasks import OwnedTasks
from noloco_p2p.spec import TrainerSpec

NUM_NEIGHBOURS = 4  # replicas of the next stage to which a replica sends
NUM_HEADS = 2  # heads to which a replica of the last stage keeps a stream
LOOK_S = 1.0  # how often the live peers and the streams are checked
REDRAW_S = 60.0  # how often one neighbour is redrawn
DIAL_AGAIN_S = 5.0  # between two dials of a neighbour to which a stream is kept open


class MicrobatchLost(PeerError):
    """A microbatch ended without a gradient. Its gradients are not counted here."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A computation of one microbatch.

    `data` is the encoded input of a replica, or the tokens of a head. `received` is the encoded gradient for BACKWARD
    and the encoded activations for LOSS.
    """

    kind: Kind
    id: MicrobatchId
    data: object
    received: object = None
    is_training: bool = True


class Links(Protocol):
    """The streams to neighbours. `stages` holds the stage of each peer with an open stream."""

    @property
    def stages(self) -> Mapping[str, int]: ...

    def send(self, to: str, frame: Frame) -> None:
        """Send a frame, over a stream that is opened on demand. If that fails, `Node.closed` is called."""
        ...

    def broadcast(self, frame: Frame, *, but: str = "") -> None:
        """Send a frame over all open streams except the stream to `but`."""
        ...

    def open(self, peer: str) -> None:
        """Open a stream if there is none."""
        ...

    def look(self) -> None:
        """End the streams that may not go on. This is called about once per second."""
        ...


class Computer(Protocol):
    """The thread that touches the weights. It runs its tasks one at a time, in order."""

    async def next_microbatch(self) -> object:
        """Return the next microbatch of a head, or None after the last one."""
        ...

    async def compute(self, task: Task) -> object:
        """Return the result, or None for a BACKWARD at the head or the LOSS of an evaluation.

        Raises PeerError if the input or the result is unusable. The gradients of other tasks are then unchanged.
        """
        ...

    async def encoded(self, kind: Kind, result: object) -> object:
        """Return the payload of a result for the next frame."""
        ...

    async def close_step(self, num_tokens: int, progress: float | None) -> float:
        """Divide the accumulated gradients by `num_tokens`, take an inner step, and return the progress.

        `progress` is the median mark, to which this step advances an inner replica. It is None at a head.
        """
        ...


class Trip:
    """A microbatch at this peer. `allowed_s` is its deadline, from the moment at which its timer is first set."""

    def __init__(self, ticket: MicrobatchTicket, allowed_s: float, *, sinks: tuple[str, ...] = ()) -> None:
        self.ticket, self.id, self.sinks = ticket, ticket.id, sinks
        self.allowed_s = allowed_s
        self._timer = asyncio.timeout(None)
        self._has_begun = self._has_backward = False
        self.mail: asyncio.Queue[tuple[str, Frame | None]] = asyncio.Queue()  # None: the stream was closed
        self.sent_to = ""  # the only peer from which a Backward is accepted
        self.is_taken = False  # whether that peer has accepted the activations
        self.step = 0  # the step in which its forward pass was computed

    def tell(self, peer: str, frame: Frame | None) -> None:
        """Pass on a frame about this microbatch. A neighbour that floods it is ignored."""
        if isinstance(frame, Backward):
            if peer != self.sent_to or self._has_backward:
                return
            self._has_backward = True
        if frame is None or self.mail.qsize() < MAX_MAIL:
            self.mail.put_nowait((peer, frame))

    def begin(self) -> asyncio.Timeout:
        """Return the context in which its coroutine ends with TimeoutError at the deadline."""
        self._has_begun = True
        return self._timer

    def set_timer(self, seconds: float) -> None:
        if not self._has_begun:
            self._timer = asyncio.timeout(seconds)
            return
        with suppress(RuntimeError):  # the context has been left
            self._timer.reschedule(asyncio.get_running_loop().time() + seconds)

    def left_s(self) -> float:
        due_s = self._timer.when()
        return self.allowed_s if due_s is None else max(0.0, due_s - asyncio.get_running_loop().time())

    def abandon(self) -> None:
        """Let the coroutine of this microbatch end as if its deadline had passed."""
        self.set_timer(0.0)


AnyTrip = TypeVar("AnyTrip", bound=Trip)


class Node(Generic[AnyTrip]):
    """The base class of `Head` and `Replica`. All methods are called on the event loop.

    `rng` draws the path. `num_done` counts the microbatches whose
    backward pass was computed here, and `num_late` those of them whose forward pass was in an earlier step. If all
    neighbours refuse a microbatch, a replica loses it, to free its slot. A head keeps it and asks again, because no
    other microbatch is waiting for that slot.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        links: Links,
        computer: Computer,
        *,
        stage: int,
        rng: random.Random,
    ) -> None:
        assert 0 <= stage < spec.pipeline.stages > 1, "a pipeline must have at least two stages"
        self.trips: dict[MicrobatchId, AnyTrip] = {}
        self.turns = Turns()
        self.num_done = self.num_late = self.num_lost = self.num_steps = 0
        self.is_over = False  # whether no head is training any more, and nothing is left to do
        self.downstream = Few(rng, NUM_NEIGHBOURS)
        self._stage, self._last_stage = stage, spec.pipeline.stages - 1
        tokens = spec.data.sequence_length - 1
        self._batch_tokens, self._microbatch_tokens = spec.train.batch_size * tokens, spec.pipeline.microbatch * tokens
        self._links, self._computer, self._rng = links, computer, rng
        self._routing = Routing(rng, spec.pipeline.routing)
        self._neighbours: frozenset[str] = frozenset()
        self._under_way = asyncio.Semaphore(MAX_UNDER_WAY)
        self._is_closing = self._is_leaving = False
        self._tasks = OwnedTasks("a microbatch")

    def start(self) -> None:
        self._tasks.start(self._tick())

    async def stop(self) -> None:
        await self._tasks.stop(grace_s=0.0)

    @property
    def is_idle(self) -> bool:
        """Whether no microbatch is held or in flight, and nothing is computed."""
        return not self.trips and not self._is_closing and not len(self.turns)

    @property
    def num_held(self) -> int:
        """The number of microbatches that are held, or in flight."""
        return len(self.trips)

    # neighbours

    def follow(
        self, live: Callable[[], Mapping[int, Collection[str]]], is_closed: Callable[[], bool] = lambda: False
    ) -> None:
        """Choose neighbours among the live peers from now on, and keep the streams that this node needs.

        `live` returns the peers of each stage that take part in the pipeline. `is_closed` returns whether no peer can
        dial this one, in which case it must dial all its neighbours.
        """
        self._tasks.start(self._follow(live, is_closed))

    async def _follow(self, live: Callable[[], Mapping[int, Collection[str]]], is_closed: Callable[[], bool]) -> None:
        """Send to a few replicas of the next stage, and redraw one of them from time to time.

        A head keeps streams to replicas of the last stage, through which its microbatches return. A head chooses only a
        few of them, so each replica of the last stage also keeps streams to a few heads.
        """
        loop, num_stages = asyncio.get_running_loop(), self._last_stage + 1
        ring, upstream = Few(self._rng, NUM_HEADS if self._stage else MAX_SINKS), Few(self._rng, NUM_NEIGHBOURS)
        before: tuple[str, ...] | None = None
        dialled_s: dict[str, float] = {}
        redraw_s = loop.time() + REDRAW_S
        while True:
            now_s, of_stage, kept = loop.time(), live(), list[str]()
            if now_s >= redraw_s:
                redraw_s = now_s + REDRAW_S
                self.downstream.drop_one()
            self.downstream.update(of_stage.get((self._stage + 1) % num_stages, ()))
            if self._stage in (0, self._last_stage):
                ring.update(of_stage.get(self._last_stage - self._stage, ()))
                kept += ring.chosen
            if is_closed():
                upstream.update(of_stage.get((self._stage - 1) % num_stages, ()))
                kept += upstream.chosen
            if self.downstream.chosen != before:
                before = self.downstream.chosen
                self.neighbours_changed(before)
            dialled_s = {peer: dialled_s.get(peer, -DIAL_AGAIN_S) for peer in kept}
            for peer, last_s in dialled_s.items():
                if peer not in self._links.stages and now_s - last_s >= DIAL_AGAIN_S:
                    dialled_s[peer] = now_s
                    self._links.open(peer)
            self._links.look()
            await asyncio.sleep(LOOK_S)

    # events

    def neighbours_changed(self, downstream: Collection[str]) -> None:
        """Set the peers to ask for slots from now on. Microbatches that other peers already hold are not affected."""
        self._neighbours = frozenset(downstream)
        for trip in self.trips.values():
            trip.tell("", None)

    def opened(self, peer: str) -> None:
        """Note a new stream to a neighbour."""

    def closed(self, peer: str) -> None:
        """Note that the stream to a neighbour has closed, or that the neighbour cannot be reached.

        This is called before any frames of a new stream arrive.
        """
        self._routing.forget(peer)
        for trip in self.trips.values():
            trip.tell(peer, None)

    def received(self, peer: str, frame: Frame) -> bool:
        """Handle a frame from a neighbour, and return False if it is a Forward that this peer does not expect.

        The frame must be complete, and its size and ticket verified.
        """
        match frame:
            case Forward():
                return self._forward(peer, frame)
            case Credit(id) | Answer(id) | Backward(id) | Lost(id):
                trip = self.trips.get(id)
                if trip:
                    trip.tell(peer, frame)
                elif isinstance(frame, Credit) and frame.has_room:
                    self._links.send(peer, Lost(id))
            case _:
                pass
        return True

    def leave(self) -> None:
        """Take no new microbatches, and finish those that are held."""
        self._is_leaving = True

    def rejoin(self) -> None:
        """Take part again after `leave`."""
        self._is_leaving = False

    def _forward(self, peer: str, forward: Forward) -> bool:
        raise NotImplementedError

    # a call of the next stage

    async def _beyond(self, trip: AnyTrip, payload: object) -> object:
        """Let the next stage work on a microbatch, and return the encoded gradient.

        For an evaluation, this returns None as soon as the next stage has taken it. Raises MicrobatchLost.
        """
        head = trip.id.head if self._stage == self._last_stage else ""  # which needs no request for a slot
        async with nullcontext() if head else self._under_way:  # a head that is stuck must not hold up the others
            refused: set[str] = set()
            while not trip.is_taken:
                peer = head or await self._reserve(trip, refused)
                await self._send(trip, peer, payload)
                refused = {peer}
        del payload
        if not trip.ticket.is_training:
            return None
        while True:
            peer, frame = await trip.mail.get()
            if peer != trip.sent_to:
                self._decline(peer, frame)
            elif isinstance(frame, Backward) and frame.payload is not None:
                return frame.payload
            elif isinstance(frame, Backward | Lost | None):
                raise MicrobatchLost("the gradient of a microbatch was lost", peer=peer)

    def _candidates(self, trip: AnyTrip) -> Collection[str]:
        """Return the peers from which to request a slot. The stage before the last one draws among the sinks."""
        return trip.sinks if self._stage == self._last_stage - 1 else self._neighbours

    def _note_sent(self, trip: AnyTrip) -> None:
        """Note that a microbatch is being sent."""

    async def _reserve(self, trip: AnyTrip, refused: set[str]) -> str:
        """Return a peer that has reserved a slot for a microbatch.

        If a peer has no free slot, it queues the request, and the next peer is asked as well. Raises MicrobatchLost if
        all peers refuse.
        """
        asked, waiting = set(refused), set[str]()
        last = ""  # the peer whose answer decides whether another one is asked
        loop = asyncio.get_running_loop()
        again_s = loop.time() + ASK_AGAIN_S
        try:
            while True:
                if loop.time() >= again_s:
                    asked, last, again_s = set(), "", loop.time() + ASK_AGAIN_S
                    for former in sorted(waiting - set(self._candidates(trip))):
                        waiting.discard(former)
                        self._links.send(former, Lost(trip.id))
                if not last:
                    order = self._routing.order(self._candidates(trip), trip.ticket)
                    last = next((peer for peer in order if peer not in asked), "")
                    if last:
                        asked.add(last)
                        waiting.add(last)
                        self._links.send(last, Want(trip.ticket, trip.left_s(), trip.sinks))
                    elif asked and not waiting and self._stage > 0:
                        raise MicrobatchLost("all neighbours refused a microbatch")
                wait_s = again_s - loop.time()
                try:
                    async with asyncio.timeout(min(wait_s, ASK_PATIENCE_S) if last else wait_s):
                        peer, frame = await trip.mail.get()
                except TimeoutError:
                    last = ""
                    continue
                if isinstance(frame, Credit) and frame.has_room and peer in waiting:
                    waiting.discard(peer)
                    return peer
                if isinstance(frame, Answer | Lost | None):  # refused, or the stream has closed
                    waiting.discard(peer)
                elif peer not in waiting:
                    self._decline(peer, frame)
                if peer == last or not waiting:
                    last = ""
        finally:
            for peer in sorted(waiting):
                self._links.send(peer, Lost(trip.id))

    async def _send(self, trip: AnyTrip, peer: str, payload: object) -> None:
        """Send the activations to a peer, and wait until it has taken or refused them. Raises MicrobatchLost."""
        trip.sent_to = peer
        self._note_sent(trip)
        began_s = asyncio.get_running_loop().time()
        self._links.send(peer, Forward(trip.id, trip.left_s(), payload))
        while True:
            sender, frame = await trip.mail.get()
            if sender != peer:
                self._decline(sender, frame)
            elif isinstance(frame, Answer) and frame.is_taken:
                self._routing.measured(peer, asyncio.get_running_loop().time() - began_s)
                trip.is_taken = True
                return
            elif isinstance(frame, Lost | Backward) or (
                not isinstance(frame, Credit) and self._stage == self._last_stage
            ):
                raise MicrobatchLost("a microbatch was refused", peer=peer)
            elif not isinstance(frame, Credit):
                trip.sent_to = ""
                return

    def _decline(self, peer: str, frame: Frame | None) -> None:
        """Release a slot that is no longer needed."""
        if isinstance(frame, Credit) and frame.has_room:
            self._links.send(peer, Lost(frame.id))

    # tasks

    async def _compute(self, task: Task) -> object:
        """Compute a task when it is its turn, and return the payload of the next frame. Raises PeerError."""
        async with self.turns.take(task.kind):
            result = await self._computer.compute(task)
            self._note_computed(task)
        return None if result is None else await self._computer.encoded(task.kind, result)

    def _note_computed(self, task: Task) -> None:
        """Count the gradients of a task, before a step can close."""

    def _note_backward(self, trip: AnyTrip) -> None:
        self.num_done += 1
        self.num_late += trip.step < self.num_steps

    def _look(self) -> None:
        """Close a step if it is due. This is called after each event that can change it, and every TICK_S."""

    def _begin_step(self) -> None:
        self._is_closing = True
        self._tasks.start(self._close_step())

    async def _close_step(self) -> None:
        raise NotImplementedError

    async def _tick(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(TICK_S)
