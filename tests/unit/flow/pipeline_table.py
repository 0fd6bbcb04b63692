"""Tables of events and actions in words, as in `tests/unit/gossip/test_round_state.py`.

A step reads `event arguments -> actions`; the actions are checked. A row may start with the steps of a named beginning.
Microbatch h.3 is number 3 of head h.
"""

from __future__ import annotations

import random
from typing import Any

from noloco_p2p.flow.actions import Action, Broadcast, CloseStep, Compute, GaveUp, Send
from noloco_p2p.flow.frames import Answer, Backward, Credit, Forward, Lost, Mark, MicrobatchId, MicrobatchTicket, Want

MICROBATCH_TOKENS, BATCH_TOKENS = 10, 40


class InOrder(random.Random):
    """A random generator that keeps neighbours in the order of their names."""

    def shuffle(self, x: Any) -> None:
        pass

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        return list(population[:k])


def microbatch(text: str) -> MicrobatchId:
    head, _, number = text.partition(".")
    return MicrobatchId(head, int(number))


def ticket(text: str, mark: float, *, is_training: bool = True) -> MicrobatchTicket:
    return MicrobatchTicket(microbatch(text), mark, MICROBATCH_TOKENS, is_training)


def word(action: Action) -> str:
    match action:
        case Send(to, frame):
            names = {Want: "want", Forward: "forward", Backward: "backward", Lost: "lost", Mark: "tell"}
            if isinstance(frame, Credit):
                name = "credit" if frame.has_room else "wait"
            elif isinstance(frame, Answer):
                name = "taken" if frame.is_taken else "drop"
            else:
                name = names[type(frame)]
            id = frame.ticket.id if isinstance(frame, Want | Mark) else frame.id
            return f"{name} {to} {id.head}.{id.number}"
        case Broadcast(frame, but):
            assert isinstance(frame, Mark)
            return f"tell all{f' but {but}' if but else ''} {frame.ticket.mark:g}"
        case Compute(kind, id):
            return f"compute {kind.name.lower()} {id.head}.{id.number}"
        case CloseStep(num_tokens, progress):
            return f"close {num_tokens}{'' if progress is None else f' at {progress:g}'}"
        case GaveUp(id, _):
            return f"give up {id.head}.{id.number}"


class Bench:
    """Feeds frames and task results to one machine; each event returns the actions in words."""

    machine: Any

    def __init__(self) -> None:
        self.now_s = 0.0
        self.task: Compute | None = None

    def words(self, actions: list[Action]) -> str:
        for action in actions:
            if isinstance(action, Compute):
                self.task = action
        return ", ".join(map(word, actions))

    def at(self, seconds: str) -> None:
        self.now_s = float(seconds)

    def _frame(self, peer: str, frame: Any) -> str:
        return self.words(self.machine.received(peer, frame, self.now_s))

    def want(self, peer: str, id: str, mark: str = "0", remaining_s: str = "60") -> str:
        return self._frame(peer, Want(ticket(id, float(mark)), float(remaining_s), ("y", "z")))

    def credit(self, peer: str, id: str) -> str:
        return self._frame(peer, Credit(microbatch(id), has_room=True))

    def wait(self, peer: str, id: str) -> str:
        return self._frame(peer, Credit(microbatch(id), has_room=False))

    def forward(self, peer: str, id: str, remaining_s: str = "60") -> str:
        return self._frame(peer, Forward(microbatch(id), float(remaining_s), f"input {id}"))

    def damaged_forward(self, peer: str, id: str) -> str:
        return self._frame(peer, Forward(microbatch(id), 60.0, None))

    def backward(self, peer: str, id: str) -> str:
        return self._frame(peer, Backward(microbatch(id), f"gradient {id}"))

    def damaged_backward(self, peer: str, id: str) -> str:
        return self._frame(peer, Backward(microbatch(id), None))

    def taken(self, peer: str, id: str) -> str:
        return self._frame(peer, Answer(microbatch(id), is_taken=True))

    def drop(self, peer: str, id: str) -> str:
        return self._frame(peer, Answer(microbatch(id), is_taken=False))

    def lost(self, peer: str, id: str) -> str:
        return self._frame(peer, Lost(microbatch(id)))

    def mark(self, peer: str, id: str, mark: str = "1") -> str:
        return self._frame(peer, Mark(ticket(id, float(mark))))

    def away(self, peer: str, id: str, mark: str) -> str:
        return self._frame(peer, Mark(MicrobatchTicket(microbatch(id), float(mark), 0)))

    def closed(self, peer: str) -> str:
        return self.words(self.machine.stream_closed(peer, self.now_s))

    def computed(self) -> str:
        assert self.task
        return self.words(self.machine.computed(self.task, "result", self.now_s))

    def failed(self) -> str:
        assert self.task
        return self.words(self.machine.compute_failed(self.task, self.now_s))

    def tick(self) -> str:
        return self.words(self.machine.tick(self.now_s))

    def leave(self) -> str:
        return self.words(self.machine.leave(self.now_s))

    def rejoin(self) -> str:
        return self.words(self.machine.rejoin(self.now_s))

    def is_idle(self) -> str:
        return "yes" if self.machine.is_idle else "no"

    def step(self, text: str) -> None:
        event, _, actions = text.partition(" -> ")
        name, *arguments = event.split()
        did = getattr(self, name)(*arguments)
        if actions:
            assert (did or "nothing") == actions, f"{text}: {did}"


def rows(table: str, beginnings: dict[str, str]) -> dict[str, list[str]]:
    """Parse the table into a mapping from titles to steps."""
    found: dict[str, list[str]] = {}
    for line in table.splitlines():
        if line.startswith("    "):
            for step in line.strip(" ;").split("; "):
                list(found.values())[-1].extend(beginnings[step].split("; ") if step in beginnings else [step])
        elif line and not line.startswith("#"):
            assert line not in found, line
            found[line] = []
    return found


def events_without_a_row(machine: type, bench: type[Bench], table: dict[str, list[str]]) -> list[str]:
    """Return the public methods of the machine that no step of the table calls."""
    import inspect

    used = {step.split()[0] for steps in table.values() for step in steps} | {"_frame", "__init__"}
    called = "".join(inspect.getsource(getattr(bench, name)) for name in used)
    events = [name for name, value in vars(machine).items() if not name.startswith("_") and callable(value)]
    return [name for name in events if f"machine.{name}(" not in called]
