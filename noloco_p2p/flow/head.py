"""This module implements a head of the pipeline (stage 0), which launches microbatches and drives all other stages.

It is a pure state machine.

    FORWARD -> AWAY -> LOSS -> BEHIND -> BACKWARD -> done
    front     other   tail    gradient  front
    computed  stages  computed  returns  computed

The window of microbatches in flight doubles until the first losses, grows by one from then on, and halves when losses
occur in quick succession. If no slot is free for a microbatch, it waits at the head, and no other microbatch is
launched until it has been sent. A full pipeline therefore wastes no training data.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median

from noloco_p2p.flow.actions import Action, Broadcast, CloseStep, Compute, GaveUp, Kind, Send
from noloco_p2p.flow.departures import Departure, Departures, Place
from noloco_p2p.flow.frames import (
    Answer,
    Backward,
    Credit,
    Forward,
    Frame,
    Lost,
    Mark,
    MicrobatchId,
    MicrobatchTicket,
    Want,
)
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
)
from noloco_p2p.flow.routing import Routing, Rule
from noloco_p2p.flow.steps import FINAL_MARK, BatchSteps
from noloco_p2p.flow.tasks import Machine


class HeadPhase(Enum):
    FORWARD = auto()
    AWAY = auto()  # sent to the other stages; no loss yet
    LOSS = auto()
    BEHIND = auto()  # the loss is counted from here on
    BACKWARD = auto()


@dataclass(slots=True, eq=False)
class InFlight:
    ticket: MicrobatchTicket
    microbatch: object
    sent_s: float  # when it was sent, or the last tick at which it was still unsent
    deadline_s: float
    phase: HeadPhase = HeadPhase.FORWARD
    step: int = 0  # the step in which its forward pass was computed
    is_lost_upstream: bool = False  # whether no gradient for the front will arrive
    returned_by: str = ""  # the replica of the last stage that returned it
    received: object = None  # returned activations, then the gradient for the front


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
    def seconds(self) -> float:
        if not self._latencies_s:
            return FIRST_DEADLINE_S
        return min(max(DEADLINE_LATENCIES * median(self._latencies_s), SHORTEST_DEADLINE_S), LONGEST_DEADLINE_S)

    def measured(self, seconds: float) -> None:
        self._latencies_s.append(seconds)


class Head(Machine):
    """The state machine of a head. Its methods handle events and return actions.

    `max_in_flight` comes from `limits.num_rooms`, and `rng` draws the path. `first_number` must be larger than every
    number that this head has used, even before a restart. Unix time in milliseconds meets this condition.
    """

    def __init__(
        self,
        *,
        peer_id: str,
        num_stages: int,
        max_in_flight: int,
        batch_tokens: int,
        first_number: int,
        rng: random.Random,
        rule: Rule = "random",
        progress: float = 0.0,
    ) -> None:
        assert num_stages > 1, "a pipeline must have at least two stages"
        super().__init__()
        self.in_flight: dict[MicrobatchId, InFlight] = {}
        self.steps = BatchSteps(batch_tokens=batch_tokens)
        self.window = Window(max_in_flight)
        self.deadlines = HeadDeadlines()
        self.progress = progress
        self._peer_id = peer_id
        self._draws_sinks = num_stages == 2
        self._next_number = first_number
        self._told_s = 0.0  # when it last told everybody that it has finished
        self._rng = rng
        self._neighbours: frozenset[str] = frozenset()
        self._sinks: tuple[str, ...] = ()
        self.departures = Departures(routing=Routing(rng, rule), candidates=self._candidates, gives_up=False)

    def _candidates(self, departure: Departure) -> Collection[str]:
        return self._sinks if self._draws_sinks else self._neighbours

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is in flight, so that a head that is leaving can stop."""
        return not self.in_flight and self.tasks.running is None

    @property
    def is_over(self) -> bool:
        """Return whether the head has finished training. Evaluations may still be in flight."""
        trains = any(flying.ticket.is_training for flying in self.in_flight.values())
        return self.progress >= FINAL_MARK and not trains and self.tasks.running is None

    # events

    def neighbours_changed(self, downstream: Collection[str], sinks: Collection[str], now_s: float) -> list[Action]:
        """Set the neighbours.

        `downstream` holds the replicas of stage 1. `sinks` holds the replicas of the last stage to which this head has
        streams.
        """
        self._neighbours = frozenset(downstream)
        self._sinks = tuple(self._rng.sample(sorted(sinks), min(MAX_SINKS, len(sinks))))
        self.departures.offer_sinks(self._sinks)
        return self._settle(self.departures.look_again(now_s), now_s)

    def can_launch(self, now_s: float, *, is_training: bool = True) -> bool:
        """Return whether the next microbatch is due.

        Call this after each event, because any event can change the result.
        """
        if self._is_leaving or (is_training and self.progress >= FINAL_MARK):
            return False
        if isinstance(self.tasks.running, CloseStep) or not self._sinks:
            return False
        return not any(map(self._is_unsent, self.in_flight)) and self.window.is_open(len(self.in_flight), now_s)

    def launch(
        self, microbatch: object, num_tokens: int, now_s: float, *, is_training: bool = True
    ) -> tuple[MicrobatchId, list[Action]]:
        """Launch a microbatch whose loss covers `num_tokens` tokens. Return its id and the actions."""
        assert self.can_launch(now_s, is_training=is_training)
        id = self._new_id()
        ticket = MicrobatchTicket(id, min(self.progress, FINAL_MARK), num_tokens, is_training)
        self.in_flight[id] = InFlight(ticket, microbatch, now_s, now_s + self.deadlines.seconds)
        self.tasks.add(Kind.FORWARD, id)
        return id, self._settle([], now_s)

    def received(self, peer: str, frame: Frame, now_s: float) -> list[Action]:
        """Handle a frame from a neighbour. The frame must be complete and have the size that the spec implies."""
        actions: list[Action] = []
        match frame:
            case Forward():
                actions = self._returned(peer, frame)
            case Backward():
                actions = self._backward(peer, frame, now_s)
            case Credit():
                actions = self.departures.credit(peer, frame, now_s)
            case Answer():
                actions = self.departures.answered(peer, frame, now_s)
            case Lost(id):
                actions = self.departures.lost_there(peer, id, now_s)
            case Want(ticket):
                actions = [Send(peer, Answer(ticket.id, is_taken=False))]  # it accepts only its own microbatches
            case Mark():
                pass  # from another head
        return self._settle(actions, now_s)

    def stream_closed(self, peer: str, now_s: float) -> list[Action]:
        """Handle a closed stream to a neighbour, or a neighbour that cannot be reached.

        The driver reports this before any frames of a new stream.
        """
        return self._settle(self.departures.closed(peer, now_s), now_s)

    def computed(self, task: Compute, result: object, now_s: float) -> list[Action]:
        if not self.tasks.end(task):
            return []
        flying = self.in_flight.get(task.id)
        if flying is None:  # it has been given up in the meantime
            return self._settle([], now_s)
        actions: list[Action] = []
        if task.kind is Kind.FORWARD:
            flying.phase, flying.step = HeadPhase.AWAY, self._num_steps
            flying.sent_s, flying.deadline_s = now_s, now_s + self.deadlines.seconds
            actions = self.departures.begin(
                flying.ticket, result, sinks=self._sinks, deadline_s=flying.deadline_s, now_s=now_s
            )
        elif task.kind is Kind.LOSS:
            actions = self._has_loss(flying, result, now_s)
        else:
            actions = self._done(flying, now_s)
        return self._settle(actions, now_s)

    def compute_failed(self, task: Compute, now_s: float) -> list[Action]:
        """Give up a microbatch whose task failed because memory ran out or a gate refused its input or output.

        Only this microbatch loses its gradients.
        """
        if not self.tasks.end(task):
            return []
        return self._settle(self._lose(task.id, now_s), now_s)

    def step_closed(self, progress: float, now_s: float) -> list[Action]:
        """Record the end of a step and the new progress of this head. At a progress of 1, the head has finished.

        The next microbatches carry this progress as their mark.
        """
        assert isinstance(self.tasks.running, CloseStep)
        self.tasks.end()
        self._num_steps += 1
        self.progress = progress
        return self._settle(self._tell_the_end(now_s), now_s)

    def stream_opened(self, peer: str, now_s: float) -> list[Action]:
        """Notify a neighbour that was absent when this head finished. The neighbour forwards the notice."""
        return self._settle([Send(peer, self._last_mark())] if self.progress >= FINAL_MARK else [], now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Give up microbatches whose deadline has passed, and ask neighbours again. Call this every TICK_S."""
        actions = self._tell_the_end(now_s) if now_s - self._told_s >= TELL_AGAIN_S else []
        for id, flying in list(self.in_flight.items()):
            if flying.phase is HeadPhase.AWAY and not self.departures.has_left(id):
                # The deadline counts from the first Forward, so that repeated refusals cannot extend it forever.
                flying.sent_s, flying.deadline_s = now_s, now_s + self.deadlines.seconds
                self.departures.postpone(id, flying.deadline_s)
            elif flying.deadline_s <= now_s and flying.phase in (HeadPhase.AWAY, HeadPhase.BEHIND):
                self.deadlines.measured(self.deadlines.seconds)
                actions += self._lose(id, now_s)
        return self._settle(actions + self.departures.look_again(now_s), now_s)

    def leave(self, now_s: float) -> list[Action]:
        """Stop launching, finish the microbatches that have been sent, and give up all others.

        All replicas are notified, because this head's mark must not hold up the median.
        """
        self._is_leaving = True
        actions: list[Action] = [] if self.progress >= FINAL_MARK else [Broadcast(self._last_mark())]
        for id in list(self.in_flight):
            if self._is_unsent(id):
                actions += self._lose(id, now_s)
        return self._settle(actions, now_s)

    def _tell_the_end(self, now_s: float) -> list[Action]:
        self._told_s = now_s
        return [Broadcast(self._last_mark())] if self.progress >= FINAL_MARK else []

    def _last_mark(self) -> Mark:
        return Mark(MicrobatchTicket(self._new_id(), min(self.progress, FINAL_MARK), num_tokens=0))

    def _new_id(self) -> MicrobatchId:
        self._next_number += 1
        return MicrobatchId(self._peer_id, self._next_number - 1)

    def _is_unsent(self, id: MicrobatchId) -> bool:
        return self.in_flight[id].phase is HeadPhase.FORWARD or self.departures.place(id) is Place.ASKING

    # frames

    def _returned(self, peer: str, forward: Forward) -> list[Action]:
        """Handle a microbatch that the last stage returns.

        Its slot was reserved at launch, so it is refused only if it was given up, arrived damaged, or took another
        path.
        """
        flying = self.in_flight.get(forward.id)
        if flying is not None and flying.returned_by == peer:  # repeated
            return [Send(peer, Answer(forward.id, is_taken=True))]
        is_away = flying is not None and flying.phase is HeadPhase.AWAY and bool(self.departures.peer(forward.id))
        if flying is None or not is_away or forward.payload is None:
            return [Send(peer, Answer(forward.id, is_taken=False))]
        flying.phase, flying.returned_by, flying.received = HeadPhase.LOSS, peer, forward.payload
        self.tasks.add(Kind.LOSS, forward.id)
        return [Send(peer, Answer(forward.id, is_taken=True))]

    def _has_loss(self, flying: InFlight, gradient: object, now_s: float) -> list[Action]:
        flying.received = None
        if not flying.ticket.is_training:
            return self._done(flying, now_s)
        self.steps.count_loss(flying.ticket.num_tokens)
        flying.phase = HeadPhase.BEHIND
        actions: list[Action] = [Send(flying.returned_by, Backward(flying.ticket.id, gradient))]
        return actions + self._lose(flying.ticket.id, now_s) if flying.is_lost_upstream else actions

    def _backward(self, peer: str, backward: Backward, now_s: float) -> list[Action]:
        flying = self.in_flight.get(backward.id)
        if flying is None or flying.phase is not HeadPhase.BEHIND or self.departures.peer(backward.id) != peer:
            return []
        if backward.payload is None:
            return self._lose(backward.id, now_s)
        flying.phase, flying.received = HeadPhase.BACKWARD, backward.payload
        self.tasks.add(Kind.BACKWARD, backward.id)
        return self.departures.end(backward.id)

    # the end of a microbatch

    def _done(self, flying: InFlight, now_s: float) -> list[Action]:
        self.num_done += 1
        self.window.ended_well()
        if flying.ticket.is_training:  # an evaluation takes less time and would shorten the deadlines
            self.num_late += flying.step < self._num_steps
            self.deadlines.measured(now_s - flying.sent_s)
            self.steps.count_done(flying.ticket.num_tokens)
        return self._release(flying.ticket.id)

    def _path_lost(self, id: MicrobatchId, now_s: float) -> list[Action]:
        flying = self.in_flight.get(id)
        if flying is None or flying.phase is not HeadPhase.LOSS:
            return self._lose(id, now_s)
        flying.is_lost_upstream = True  # the loss is still valid, and so are the gradients of later stages
        return []

    def _lose(self, id: MicrobatchId, now_s: float) -> list[Action]:
        flying = self.in_flight.get(id)
        if flying is None:
            return []
        self.num_lost += 1
        self.window.lost(flying.sent_s, now_s)
        actions = self._release(id)
        if flying.phase in (HeadPhase.BEHIND, HeadPhase.BACKWARD):
            self.steps.count_done(flying.ticket.num_tokens)
            return actions
        if flying.phase is HeadPhase.LOSS:
            actions.append(Send(flying.returned_by, Lost(id)))  # so that the replicas on the path free their slots
        return [*actions, GaveUp(id, flying.microbatch, flying.ticket.is_training)]

    def _release(self, id: MicrobatchId) -> list[Action]:
        del self.in_flight[id]
        self.tasks.remove(id)
        return self.departures.end(id)

    def _settle(self, actions: list[Action], now_s: float) -> list[Action]:
        """Complete an event by adding the actions that have become possible."""
        while self.departures.lost:
            actions += self._path_lost(self.departures.lost.pop(), now_s)
        actions += self.departures.start(now_s)
        if self.tasks.running is None and (num_tokens := self.steps.take_step()):
            return actions + self.tasks.close(CloseStep(num_tokens))
        return actions + self.tasks.take(self._task)

    def _task(self, kind: Kind, id: MicrobatchId) -> Compute:
        flying = self.in_flight[id]
        return Compute(kind, id, flying.microbatch, flying.received, flying.ticket.is_training)
