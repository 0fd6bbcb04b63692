"""This module implements an inner replica of the pipeline.

It is a pure state machine. Its inputs are events and their times, and its outputs are actions.

A microbatch holds one slot from its Credit until its backward pass is computed here:

    RESERVED -> FORWARD -> AWAY -> BACKWARD -> counted
    slot       computed   later     computed
    reserved   here       stages    here

Slots are reserved in the order of the stages, and a backward pass needs no further slot, so full replicas never wait
for each other. Until its Backward arrives, a microbatch is lost if its deadline passes, the stream to a neighbour
closes or a Lost arrives. It is then lost at this replica and at all earlier stages. Later stages that have finished
their backward pass keep their gradients, which are valid.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import Enum, auto

from noloco_p2p.flow.actions import Action, Broadcast, CloseStep, Compute, Kind, Send
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
from noloco_p2p.flow.limits import LONGEST_DEADLINE_S, MAX_HEADS, MAX_SINKS, SEEN_NUMBERS
from noloco_p2p.flow.routing import Routing, Rule
from noloco_p2p.flow.steps import FINAL_MARK, MedianSteps
from noloco_p2p.flow.tasks import Machine
from noloco_p2p.flow.wants import Waiting, Wants


class ReplicaPhase(Enum):
    RESERVED = auto()
    FORWARD = auto()
    AWAY = auto()
    BACKWARD = auto()


@dataclass(slots=True, eq=False)
class Stashed:
    """A microbatch that a replica holds.

    `data` is the encoded input exactly as received, from which the backward pass recomputes the activations. `gradient`
    is the encoded gradient.
    """

    ticket: MicrobatchTicket
    sinks: tuple[str, ...]
    upstream: str  # "" once its stream has closed
    deadline_s: float
    phase: ReplicaPhase = ReplicaPhase.RESERVED
    step: int = 0  # the step in which its forward pass was computed
    data: object = None
    gradient: object = None


class Replica(Machine):
    """The state machine of an inner replica. Its methods handle events and return actions.

    `heads` contains the heads that the directory lists now; frames with tickets of other heads are refused.
    `num_rooms` is the number of slots, from `limits.num_rooms`. `rng` draws the path.
    """

    def __init__(
        self,
        *,
        stage: int,
        num_stages: int,
        heads: Container[str],
        num_rooms: int,
        batch_tokens: int,
        rng: random.Random,
        rule: Rule = "random",
        progress: float = 0.0,
    ) -> None:
        assert 0 < stage < num_stages, (
            "the stage must be at least 1 and less than num_stages: stage 0 belongs to the head"
        )
        super().__init__()
        self.stash: dict[MicrobatchId, Stashed] = {}
        self.steps = MedianSteps(heads=heads, batch_tokens=batch_tokens, progress=progress)
        self.wants = Wants()
        self.seen = SeenForwards()
        self._num_rooms = num_rooms
        self._is_first = stage == 1
        self._draws_sinks = stage == num_stages - 2
        self._neighbours: frozenset[str] = frozenset()
        self.departures = Departures(
            routing=Routing(rng, rule), candidates=self._candidates, returns=stage == num_stages - 1
        )

    def _candidates(self, departure: Departure) -> Collection[str]:
        return departure.sinks if self._draws_sinks else self._neighbours

    @property
    def is_idle(self) -> bool:
        """Return whether no microbatch is held, so that a replica that is leaving can stop."""
        return not self.stash and self.tasks.running is None

    def is_over(self, now_s: float) -> bool:
        """Return whether no head is training any more and the last step is closed."""
        return self.is_idle and self.steps.is_over(now_s)

    # events

    def neighbours_changed(self, downstream: Collection[str], now_s: float) -> list[Action]:
        """Set the peers to ask for slots from now on. Microbatches that other peers already hold are not affected."""
        self._neighbours = frozenset(downstream)
        return self._settle(self.departures.look_again(now_s), now_s)

    def received(self, peer: str, frame: Frame, now_s: float) -> list[Action]:
        """Handle a frame from a neighbour.

        The frame must be complete, and the driver must have verified its size and ticket.
        """
        match frame:
            case Want(ticket) if ticket.id.head not in self.steps.heads:
                actions: list[Action] = [_drop(peer, ticket.id)]
            case Want():
                actions = self._want(peer, frame, now_s)
            case Forward():
                actions = self._forward(peer, frame, now_s)
            case Backward():
                actions = self._backward(peer, frame)
            case Credit():
                actions = self.departures.credit(peer, frame, now_s)
            case Answer():
                actions = self._answered(peer, frame, now_s)
            case Lost(id):
                actions = self._lost(peer, id, now_s)
            case Mark():
                actions = self._mark(peer, frame, now_s)
        return self._settle(actions, now_s)

    def stream_closed(self, peer: str, now_s: float) -> list[Action]:
        """Handle a closed stream to a neighbour, or a neighbour that cannot be reached.

        The driver reports this before any frames of a new stream.
        """
        self.wants.remove_peer(peer)
        actions = self.departures.closed(peer, now_s)
        for id, held in list(self.stash.items()):
            if held.upstream != peer:
                continue
            held.upstream = ""
            if self.departures.place(id) is not Place.TAKEN and held.phase is not ReplicaPhase.BACKWARD:
                actions += self._lose(id)  # no later stage has it, and all earlier ones give it up
        return self._settle(actions, now_s)

    def computed(self, task: Compute, result: object, now_s: float) -> list[Action]:
        if not self.tasks.end(task):
            return []
        held = self.stash.get(task.id)
        if held is None:  # it was lost while its forward pass was being computed
            return self._settle([], now_s)
        if task.kind is Kind.BACKWARD:
            self.steps.count(held.ticket.num_tokens)
            self.num_done += 1
            self.num_late += held.step < self._num_steps
            actions = self._release(task.id)
            if held.upstream:
                actions.append(Send(held.upstream, Backward(task.id, result)))
            return self._settle(actions, now_s)
        held.phase, held.step = ReplicaPhase.AWAY, self._num_steps
        if not held.ticket.is_training:
            held.data = None
        actions = self.departures.begin(held.ticket, result, sinks=held.sinks, deadline_s=held.deadline_s, now_s=now_s)
        return self._settle(actions, now_s)

    def compute_failed(self, task: Compute, now_s: float) -> list[Action]:
        """Give up a microbatch whose task failed because memory ran out or a gate refused its input or output.

        Only this microbatch loses its gradients.
        """
        if not self.tasks.end(task):
            return []
        return self._settle(self._lose(task.id), now_s)

    def step_closed(self, now_s: float) -> list[Action]:
        assert isinstance(self.tasks.running, CloseStep)
        self.tasks.end()
        self._num_steps += 1
        return self._settle([], now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Give up microbatches whose deadline has passed, and ask neighbours again. Call this every TICK_S."""
        self.wants.expire(now_s)
        actions: list[Action] = []
        for id, held in list(self.stash.items()):
            if held.deadline_s <= now_s and held.phase is not ReplicaPhase.BACKWARD:
                actions += self._lose(id)
        return self._settle(actions + self.departures.look_again(now_s), now_s)

    def leave(self, now_s: float) -> list[Action]:
        """Stop accepting Wants, but finish the microbatches that hold a slot."""
        self._is_leaving = True
        refused = self.wants.take_all()
        return self._settle([_drop(waiting.peer, waiting.want.ticket.id) for waiting in refused], now_s)

    # frames

    def _want(self, peer: str, want: Want, now_s: float) -> list[Action]:
        id = want.ticket.id
        if want.ticket.is_training:
            self.steps.vote(want.ticket, now_s)
        held = self.stash.get(id)
        if held is not None and held.upstream == peer:  # repeated
            return [Send(peer, Credit(id, has_room=True))] if held.phase is ReplicaPhase.RESERVED else []
        if held is not None or id in self.seen or self._is_leaving:
            return [_drop(peer, id)]
        deadline_s = now_s + min(want.remaining_s, LONGEST_DEADLINE_S)
        if len(want.sinks) > MAX_SINKS or not self.wants.add(Waiting(want, peer, deadline_s)):
            return [_drop(peer, id)]
        granted = self._grant(now_s)
        return granted if id in self.stash else [*granted, Send(peer, Credit(id, has_room=False))]

    def _grant(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        # Only stage 1 delays heads that are ahead, because their microbatches hold no slots yet. In later stages they
        # would wait in slots that the slower heads need.
        barred = {head for head in self.wants.heads if self.steps.is_ahead(head, now_s)} if self._is_first else set()
        while len(self.stash) < self._num_rooms and (waiting := self.wants.next(barred)):
            want, id = waiting.want, waiting.want.ticket.id
            self.stash[id] = Stashed(want.ticket, want.sinks, waiting.peer, waiting.deadline_s)
            actions.append(Send(waiting.peer, Credit(id, has_room=True)))
        return actions

    def _forward(self, peer: str, forward: Forward, now_s: float) -> list[Action]:
        id = forward.id
        held = self.stash.get(id)
        if held is None or held.upstream != peer:
            return [_drop(peer, id)]
        if held.phase is not ReplicaPhase.RESERVED:  # repeated
            return [Send(peer, Answer(id, is_taken=True))]
        if forward.payload is None:
            return [*self._release(id), _drop(peer, id)]
        self.seen.add(id)
        held.phase, held.data = ReplicaPhase.FORWARD, forward.payload
        held.deadline_s = now_s + min(forward.remaining_s, LONGEST_DEADLINE_S)
        self.tasks.add(Kind.FORWARD, id)
        return [Send(peer, Answer(id, is_taken=True))]

    def _backward(self, peer: str, backward: Backward) -> list[Action]:
        held = self.stash.get(backward.id)
        # The departure ends here, so a Backward that is repeated or comes from another peer has no effect.
        if held is None or self.departures.peer(backward.id) != peer or not held.ticket.is_training:
            return []
        if backward.payload is None:
            return self._lose(backward.id)
        held.phase, held.gradient = ReplicaPhase.BACKWARD, backward.payload
        self.tasks.add(Kind.BACKWARD, backward.id)
        return self.departures.end(backward.id)

    def _answered(self, peer: str, answer: Answer, now_s: float) -> list[Action]:
        actions = self.departures.answered(peer, answer, now_s)
        held = self.stash.get(answer.id)
        is_taken = held is not None and self.departures.place(answer.id) is Place.TAKEN
        if held is not None and is_taken and not held.ticket.is_training:
            actions += self._release(answer.id)  # an evaluation has no backward pass
        return actions

    def _lost(self, peer: str, id: MicrobatchId, now_s: float) -> list[Action]:
        self.wants.remove(id, peer)
        held = self.stash.get(id)
        if held is not None and held.upstream == peer and held.phase is ReplicaPhase.RESERVED:
            return self._release(id)
        return self.departures.lost_there(peer, id, now_s)

    def _mark(self, peer: str, mark: Mark, now_s: float) -> list[Action]:
        ticket, has_finished = mark.ticket, mark.ticket.mark >= FINAL_MARK
        # A ticket with tokens and a mark below 1 belongs to a microbatch. Its head sent it in a Want, never as a Mark.
        is_news = (has_finished or ticket.num_tokens == 0) and self.steps.vote(ticket, now_s, is_away=not has_finished)
        return [Broadcast(mark, but=peer)] if is_news else []

    # the end of a microbatch

    def _release(self, id: MicrobatchId) -> list[Action]:
        del self.stash[id]
        self.tasks.remove(id)
        return self.departures.end(id)

    def _lose(self, id: MicrobatchId) -> list[Action]:
        held = self.stash.get(id)
        if held is None:
            return []
        self.num_lost += 1
        upstream: list[Action] = [Send(held.upstream, Lost(id))] if held.upstream else []
        return [*self._release(id), *upstream]

    def _settle(self, actions: list[Action], now_s: float) -> list[Action]:
        """Complete an event by adding the actions that have become possible."""
        while self.departures.lost:
            actions += self._lose(self.departures.lost.pop())
        actions += self.departures.start(now_s)
        actions += self._grant(now_s)
        if self.tasks.running is None and (num_tokens := self.steps.take_step(now_s)):
            self.wants.new_step()
            return actions + self.tasks.close(CloseStep(num_tokens, self.steps.progress))
        return actions + self.tasks.take(self._task)

    def _task(self, kind: Kind, id: MicrobatchId) -> Compute:
        held = self.stash[id]
        return Compute(kind, id, held.data, held.gradient, held.ticket.is_training)


def _drop(peer: str, id: MicrobatchId) -> Send:
    return Send(peer, Answer(id, is_taken=False))


class SeenForwards:
    """The Forwards that a replica has accepted, in a sliding window per head. Each Forward is processed at most once.

    A number below the window counts as seen. Backwards need no window, because each one consumes the stash entry of its
    Forward.
    """

    def __init__(self) -> None:
        # by head: the highest number, and bits of all numbers seen in the window
        self._windows: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __contains__(self, id: MicrobatchId) -> bool:
        if id.head not in self._windows:
            return False
        highest, bits = self._windows[id.head]
        age = highest - id.number
        return age >= SEEN_NUMBERS or (age >= 0 and bool(bits >> age & 1))

    def add(self, id: MicrobatchId) -> None:
        highest, bits = self._windows.get(id.head, (id.number, 0))
        if id.number > highest:
            # The shift is limited, because numbers jump when a head restarts with a new clock value.
            distance = min(id.number - highest, SEEN_NUMBERS)
            highest, bits = id.number, (bits << distance) & ((1 << SEEN_NUMBERS) - 1)
        if highest - id.number < SEEN_NUMBERS:
            bits |= 1 << (highest - id.number)
        self._windows[id.head] = (highest, bits)
        self._windows.move_to_end(id.head)
        if len(self._windows) > MAX_HEADS:
            self._windows.popitem(last=False)

    def __len__(self) -> int:
        return len(self._windows)
