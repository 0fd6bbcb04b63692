"""This module sends the microbatches of one node to the next stage.

For each microbatch, the node asks for a slot, sends the payload and receives TAKEN:

    ASKING -> SENT -> TAKEN -> (Backward)
       ^         |        |
       +--DROP---+        +--Lost, or the stream closed--> lost

If a microbatch is refused, or its receiver dies before answering TAKEN, it is offered to another peer. If its receiver
dies after answering TAKEN, the microbatch is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from noloco_p2p.flow.actions import Action, Send
from noloco_p2p.flow.frames import Answer, Credit, Forward, Lost, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.flow.limits import ASK_AGAIN_S, ASK_PATIENCE_S, MAX_UNDER_WAY
from noloco_p2p.flow.routing import Routing


class Place(Enum):
    ASKING = auto()
    SENT = auto()
    TAKEN = auto()


@dataclass(slots=True, eq=False)
class Departure:
    ticket: MicrobatchTicket
    payload: object  # None after TAKEN
    sinks: tuple[str, ...]
    deadline_s: float
    place: Place = Place.ASKING
    peer: str = ""  # the peer that it was sent to
    has_left: bool = False  # whether it was ever sent, even unsuccessfully
    asked: set[str] = field(default_factory=set)  # the peers asked in this pass over the neighbours
    # peers asked in any pass that may still send a Credit
    waiting: set[str] = field(default_factory=set)
    last: str = ""  # the peer that was asked last
    since_s: float = 0.0  # when the last Want, or the Forward, was sent
    pass_began_s: float = 0.0


class Departures:
    """The microbatches that a node is sending to the next stage.

    `candidates` returns the peers from which to request a slot for a microbatch. `returns` is true at the last stage,
    which sends microbatches to the head without asking. If `gives_up` is true, a microbatch that all neighbours refuse
    is dropped to free its slot. A head keeps such a microbatch and asks again, because no other microbatch is waiting
    for that slot.
    """

    def __init__(
        self,
        *,
        routing: Routing,
        candidates: Callable[[Departure], Collection[str]],
        returns: bool = False,
        gives_up: bool = True,
    ) -> None:
        # Microbatches that no peer accepted, or whose Backward will not arrive. The owner clears the list.
        self.lost: list[MicrobatchId] = []
        self._routing = routing
        self._candidates = candidates
        self._returns = returns
        self._gives_up = gives_up
        self._departures: dict[MicrobatchId, Departure] = {}

    def __len__(self) -> int:
        return len(self._departures)

    def place(self, id: MicrobatchId) -> Place | None:
        departure = self._departures.get(id)
        return departure.place if departure else None

    def peer(self, id: MicrobatchId) -> str:
        """Return the only peer from which a Backward is accepted, or "" while no peer has the microbatch."""
        departure = self._departures.get(id)
        return departure.peer if departure else ""

    def begin(
        self, ticket: MicrobatchTicket, payload: object, *, sinks: tuple[str, ...], deadline_s: float, now_s: float
    ) -> list[Action]:
        """Add a microbatch.

        The last stage sends it at once; any other stage first asks for a slot when `start` is called.
        """
        departure = Departure(ticket, payload, sinks, deadline_s)
        self._departures[ticket.id] = departure
        return self._send(departure, ticket.id.head, now_s) if self._returns else []

    def start(self, now_s: float) -> list[Action]:
        """Ask for slots for the next microbatches, in order. Call this method after each event."""
        departures = self._departures.values()
        num_under_way = sum(bool(other.waiting) or other.place is Place.SENT for other in departures)
        actions: list[Action] = []
        for departure in departures:
            if num_under_way >= MAX_UNDER_WAY:
                break
            if departure.place is Place.ASKING and not departure.asked:
                departure.pass_began_s = now_s
                asked = self._ask_next(departure, now_s)
                num_under_way += len(asked)
                actions += asked
        return actions

    def end(self, id: MicrobatchId) -> list[Action]:
        """Forget a microbatch and cancel its requests for slots."""
        departure = self._departures.pop(id, None)
        return [Send(peer, Lost(id)) for peer in sorted(departure.waiting)] if departure else []

    def postpone(self, id: MicrobatchId, deadline_s: float) -> None:
        self._departures[id].deadline_s = deadline_s

    def has_left(self, id: MicrobatchId) -> bool:
        return id in self._departures and self._departures[id].has_left

    # events

    def credit(self, peer: str, credit: Credit, now_s: float) -> list[Action]:
        departure = self._departures.get(credit.id)
        is_wanted = departure is not None and peer in departure.waiting
        if departure is not None and is_wanted and credit.has_room:
            return self._send(departure, peer, now_s)
        if departure is not None and is_wanted:
            return self._ask_next(departure, now_s) if peer == departure.last else []
        is_repeated = departure is not None and departure.peer == peer
        return [Send(peer, Lost(credit.id))] if credit.has_room and not is_repeated else []

    def answered(self, peer: str, answer: Answer, now_s: float) -> list[Action]:
        departure = self._departures.get(answer.id)
        if departure is None:
            return []
        if not answer.is_taken:
            return self._refused(departure, peer, now_s)
        if departure.place is Place.SENT and departure.peer == peer:
            self._routing.measured(peer, now_s - departure.since_s)
            departure.place, departure.payload = Place.TAKEN, None
        return []

    def lost_there(self, peer: str, id: MicrobatchId, now_s: float) -> list[Action]:
        """Handle a neighbour's report that there will be no Backward. The neighbour's TAKEN may have been lost."""
        departure = self._departures.get(id)
        if departure is None:
            return []
        if departure.place is Place.ASKING:
            return self._refused(departure, peer, now_s)
        if departure.peer == peer:
            self.lost.append(id)
        return []

    def closed(self, peer: str, now_s: float) -> list[Action]:
        self._routing.forget(peer)
        actions: list[Action] = []
        for departure in list(self._departures.values()):
            if departure.place is Place.TAKEN and departure.peer == peer:
                self.lost.append(departure.ticket.id)
            else:
                actions += self._refused(departure, peer, now_s)
        return actions

    def look_again(self, now_s: float) -> list[Action]:
        """If the peers that were asked do not answer or have no free slot, ask others.

        Call this method when time has passed or the neighbours have changed.
        """
        actions: list[Action] = []
        for departure in list(self._departures.values()):
            is_asking = departure.place is Place.ASKING and departure.asked
            if not is_asking or now_s - departure.since_s < ASK_PATIENCE_S:
                continue
            if now_s - departure.pass_began_s >= ASK_AGAIN_S:
                actions += self._begin_pass(departure, now_s)
            actions += self._ask_next(departure, now_s)
        return actions

    def offer_sinks(self, sinks: tuple[str, ...]) -> None:
        """Set the sinks of all microbatches. A head needs this because its streams change while a microbatch waits."""
        for departure in self._departures.values():
            departure.sinks = sinks

    def _begin_pass(self, departure: Departure, now_s: float) -> list[Action]:
        departure.asked.clear()
        departure.pass_began_s = now_s
        former = departure.waiting - set(self._candidates(departure))
        departure.waiting -= former
        return [Send(peer, Lost(departure.ticket.id)) for peer in sorted(former)]

    def _refused(self, departure: Departure, peer: str, now_s: float) -> list[Action]:
        departure.waiting.discard(peer)
        if departure.place is Place.SENT and departure.peer == peer:
            if self._returns:
                self.lost.append(departure.ticket.id)
                return []
            departure.place, departure.peer = Place.ASKING, ""
            departure.asked, departure.pass_began_s = {peer}, now_s
        elif departure.place is not Place.ASKING or peer not in departure.asked:
            return []
        if departure.waiting and peer != departure.last:
            return []  # another peer was already asked
        actions = self._ask_next(departure, now_s)
        if not actions and not departure.waiting and self._gives_up:
            self.lost.append(departure.ticket.id)
        return actions

    def _ask_next(self, departure: Departure, now_s: float) -> list[Action]:
        order = self._routing.order(self._candidates(departure), departure.ticket)
        peer = next((peer for peer in order if peer not in departure.asked), "")
        if not peer:
            return []
        departure.last = peer
        departure.asked.add(peer)
        departure.waiting.add(peer)
        departure.since_s = now_s
        return [Send(peer, Want(departure.ticket, max(0.0, departure.deadline_s - now_s), departure.sinks))]

    def _send(self, departure: Departure, peer: str, now_s: float) -> list[Action]:
        id = departure.ticket.id
        departure.waiting.discard(peer)
        released: list[Action] = [Send(other, Lost(id)) for other in sorted(departure.waiting)]
        departure.waiting.clear()
        departure.place, departure.peer, departure.since_s, departure.has_left = Place.SENT, peer, now_s, True
        return [Send(peer, Forward(id, max(0.0, departure.deadline_s - now_s), departure.payload)), *released]
