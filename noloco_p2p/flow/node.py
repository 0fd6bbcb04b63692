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

The same code runs over sockets (`peer/stage_flow.py`) and on the virtual clock of a simulation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from noloco_p2p.errors import PeerError
from noloco_p2p.flow.frames import (
    Answer,
    Backward,
    Credit,
    Forward,
    Frame,
    Lost,
    MicrobatchId,
    MicrobatchTicket,
    Want,
)
from noloco_p2p.flow.limits import ASK_AGAIN_S, ASK_PATIENCE_S, MAX_MAIL, MAX_UNDER_WAY, TICK_S
from noloco_p2p.flow.rooms import Kind, Turns
from noloco_p2p.flow.routing import Routing, Rule
from noloco_p2p.owned_tasks import OwnedTasks


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

    `num_done` counts the microbatches whose backward pass was computed here, and `num_late` those of them whose forward
    pass was in an earlier step. If `gives_up` is true, a microbatch that all neighbours refuse is lost, to free its
    slot. A head keeps such a microbatch and asks again, because no other microbatch is waiting for that slot.
    """

    def __init__(self, links: Links, computer: Computer, *, rng: random.Random, rule: Rule, gives_up: bool) -> None:
        self.trips: dict[MicrobatchId, AnyTrip] = {}
        self.turns = Turns()
        self.num_done = self.num_late = self.num_lost = self.num_steps = 0
        self.is_over = False  # whether no head is training any more, and nothing is left to do
        self._links, self._computer = links, computer
        self._routing = Routing(rng, rule)
        self._gives_up = gives_up
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
        head = self._returns_to(trip)
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
        """Return the peers from which to request a slot."""
        return self._neighbours

    def _returns_to(self, trip: AnyTrip) -> str:
        """Return the peer to which a microbatch goes without a request for a slot, or ""."""
        return ""

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
                    elif asked and not waiting and self._gives_up:
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
            elif isinstance(frame, Lost | Backward) or (not isinstance(frame, Credit) and self._returns_to(trip)):
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
