"""An inner replica of the pipeline. It serves a microbatch in one coroutine.

A microbatch holds a slot from its Credit until its backward pass is computed here. Slots are reserved in the order of
the stages, and a backward pass needs no further slot, so full replicas never wait for each other.

Until its Backward arrives, a microbatch is lost if its deadline passes, the stream to a neighbour closes or a Lost
arrives. It is then lost at this replica and at all earlier stages. Later stages that have finished their backward pass
keep their gradients, which are valid.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Container

from noloco_p2p.errors import PeerError
from noloco_p2p.flow.frames import Answer, Backward, Credit, Forward, Frame, Lost, Mark, MicrobatchId, Want
from noloco_p2p.flow.limits import LONGEST_DEADLINE_S, MAX_HEADS, MAX_SINKS, SEEN_NUMBERS
from noloco_p2p.flow.node import Computer, Links, Node, Task, Trip
from noloco_p2p.flow.rooms import Kind, Rooms
from noloco_p2p.flow.steps import FINAL_MARK, MedianSteps
from noloco_p2p.spec import TrainerSpec


class Visit(Trip):
    """A microbatch that a replica holds, or that waits for a slot. `upstream` is "" once nobody waits for its gradient.

    The payload of `forward` is the encoded input, from which the backward pass recomputes the activations.
    """

    def __init__(self, want: Want, upstream: str) -> None:
        super().__init__(want.ticket, min(want.remaining_s, LONGEST_DEADLINE_S), sinks=want.sinks)
        self.upstream = upstream
        self.forward: Forward | None = None
        self.has_arrived = asyncio.Event()  # whether there is a forward
        self.has_gradient = False
        self.set_timer(self.allowed_s)


class Replica(Node[Visit]):
    """An inner replica.

    `heads` contains the heads that the directory lists now; frames with tickets of other heads are refused.
    `num_rooms` is the number of slots, from `limits.num_rooms`.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        links: Links,
        computer: Computer,
        *,
        stage: int,
        heads: Container[str],
        num_rooms: int,
        rng: random.Random,
        progress: float = 0.0,
    ) -> None:
        assert stage > 0, "stage 0 belongs to the head"
        super().__init__(spec, links, computer, stage=stage, rng=rng)
        self.steps = MedianSteps(heads=heads, batch_tokens=self._batch_tokens, progress=progress)
        # Only stage 1 delays heads that are ahead, because their microbatches hold no slots yet. In later stages they
        # would wait in slots that the slower heads need.
        self.rooms = Rooms(num_rooms, is_barred=lambda head: stage == 1 and self.steps.is_ahead(head, self._now_s()))
        self.seen = SeenForwards()

    @property
    def num_held(self) -> int:
        return len(self.rooms.held)

    def received(self, peer: str, frame: Frame) -> bool:
        match frame:
            case Want():
                self._want(peer, frame)
            case Mark(ticket):
                has_finished = ticket.mark >= FINAL_MARK
                # A ticket with tokens and a mark below 1 belongs to a microbatch. Its head sent it in a Want.
                is_mark = has_finished or ticket.num_tokens == 0
                if is_mark and self.steps.vote(ticket, self._now_s(), is_away=not has_finished):
                    self._links.broadcast(frame, but=peer)
                self._look()
            case Lost(id) if (visit := self.trips.get(id)) and visit.upstream == peer and not visit.forward:
                visit.upstream = ""
                visit.abandon()
            case _:
                return super().received(peer, frame)
        return True

    def closed(self, peer: str) -> None:
        super().closed(peer)
        for visit in self.trips.values():
            if visit.upstream == peer:
                visit.upstream = ""
                if not visit.is_taken and not visit.has_gradient:
                    visit.abandon()  # no later stage has it, and all earlier ones give it up

    def leave(self) -> None:
        super().leave()
        for visit in self.trips.values():
            if visit.id not in self.rooms.held:
                self._drop(visit.upstream, visit.id)
                visit.upstream = ""
                visit.abandon()

    def _want(self, peer: str, want: Want) -> None:
        id = want.ticket.id
        if id.head not in self.steps.heads:
            self._drop(peer, id)
            return
        if want.ticket.is_training:
            self.steps.vote(want.ticket, self._now_s())
            self._look()  # a step that ends with this mark must close before the microbatch is computed
        visit = self.trips.get(id)
        if visit is not None and visit.upstream == peer:  # repeated
            if not visit.forward:
                self._links.send(peer, Credit(id, has_room=id in self.rooms.held))
            return
        is_unwanted = visit is not None or id in self.seen or self._is_leaving
        if is_unwanted or len(want.sinks) > MAX_SINKS or self.rooms.is_crowded(peer):
            self._drop(peer, id)
        else:
            self.trips[id] = visit = Visit(want, peer)
            self._tasks.start(self._serve(visit, self.rooms.ask(id, peer)))

    def _forward(self, peer: str, forward: Forward) -> bool:
        id = forward.id
        visit = self.trips.get(id)
        if visit is None or visit.upstream != peer or id not in self.rooms.held:
            self._drop(peer, id)
            return False
        if visit.forward:  # repeated
            self._links.send(peer, Answer(id, is_taken=True))
        elif forward.payload is None:  # a gate refused it
            self._drop(peer, id)
            visit.upstream = ""
            visit.abandon()
            return False
        else:
            self.seen.add(id)
            visit.forward = forward
            visit.has_arrived.set()
            self._links.send(peer, Answer(id, is_taken=True))
        return True

    async def _serve(self, visit: Visit, slot: asyncio.Future[None]) -> None:
        """Serve a microbatch, from its request for a slot to the answer with its gradient."""
        id, ticket = visit.id, visit.ticket
        try:
            gradient = await self._gradient(visit, slot)
            if ticket.is_training:
                assert visit.forward
                visit.has_gradient = True
                task = Task(Kind.BACKWARD, id, visit.forward.payload, gradient)
                passed = await self._compute(task)
                self._note_backward(visit)
                if visit.upstream:
                    self._links.send(visit.upstream, Backward(id, passed))
        except (PeerError, TimeoutError):
            self.num_lost += visit.forward is not None
            if visit.upstream:
                self._links.send(visit.upstream, Lost(id))
        finally:
            del self.trips[id]
            self.rooms.release(id)

    async def _gradient(self, visit: Visit, slot: asyncio.Future[None]) -> object:
        """Wait for a slot and for the activations, compute, and return the gradient from the stages beyond.

        Raises PeerError or TimeoutError.
        """
        id, ticket = visit.id, visit.ticket
        async with visit.begin():
            if not slot.done():
                self._credit(visit, has_room=False)
                await slot
            self._credit(visit, has_room=True)
            await visit.has_arrived.wait()
            forward = visit.forward
            assert forward
            visit.set_timer(min(forward.remaining_s, LONGEST_DEADLINE_S))
            payload = await self._compute(Task(Kind.FORWARD, id, forward.payload, is_training=ticket.is_training))
            visit.step = self.num_steps
            return await self._beyond(visit, payload)

    def _credit(self, visit: Visit, *, has_room: bool) -> None:
        if visit.upstream:
            self._links.send(visit.upstream, Credit(visit.id, has_room=has_room))

    def _note_computed(self, task: Task) -> None:
        if task.kind is Kind.BACKWARD:
            self.steps.count(self.trips[task.id].ticket.num_tokens)

    # steps

    def _look(self) -> None:
        now_s = self._now_s()
        if not self._is_closing and self.steps.is_due(now_s):
            self._begin_step()
        self.rooms.grant()
        self.is_over = self.is_idle and self.steps.is_over(now_s)

    async def _close_step(self) -> None:
        async with self.turns.take(Kind.CLOSE_STEP):
            self.rooms.new_step()
            await self._computer.close_step(self.steps.take(), self.steps.progress)
            self.num_steps += 1
        self._is_closing = False
        self._look()

    def _drop(self, peer: str, id: MicrobatchId) -> None:
        self._links.send(peer, Answer(id, is_taken=False))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


class SeenForwards:
    """The Forwards that a replica has accepted, in a sliding window per head. Each Forward is processed at most once.

    A number below the window counts as seen.
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
