"""Tables of events and what a node does next, in words.

A step reads `event arguments -> frames and tasks`, in any order. A row may start with the steps of a named beginning.
Microbatch h.3 is number 3 of head h. A microbatch has 10 tokens, a batch 40. `at 5` lets time pass until 5.5 s.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

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
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.node import MicrobatchLost, Task
from noloco_p2p.flow.replica import Replica
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.spec import TrainerSpec

MICROBATCH_TOKENS, BATCH_TOKENS = 10, 40
AFTER_S = 0.5  # timers and ticks of a moment have fired
TURNS = 20  # of the loop, after which nothing can happen without time or an event


class InOrder(random.Random):
    """A random generator that keeps neighbours in the order of their names."""

    def shuffle(self, x: Any) -> None:
        pass

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        return list(population[:k])


@functools.cache
def spec_of(num_stages: int, *, batch_size: int = BATCH_TOKENS // MICROBATCH_TOKENS) -> TrainerSpec:
    """Return the spec of a run whose microbatches have 10 tokens."""
    stages = {"model.num_layers": num_stages, "pipeline.stages": num_stages, "pipeline.cut": [1] * num_stages}
    sizes = {"data.sequence_length": 1 + MICROBATCH_TOKENS, "train.batch_size": batch_size}
    return TrainerSpec(name="stages").with_changes({"model.parameter_seeds": True, **stages, **sizes})


def microbatch(text: str) -> MicrobatchId:
    head, _, number = text.partition(".")
    return MicrobatchId(head, int(number))


def ticket(text: str, mark: float, *, is_training: bool = True) -> MicrobatchTicket:
    return MicrobatchTicket(microbatch(text), mark, MICROBATCH_TOKENS, is_training)


def word(to: str, frame: Frame) -> str:
    if isinstance(frame, Mark):
        return f"tell {to} {frame.ticket.mark:g}"
    if isinstance(frame, Credit):
        name = "credit" if frame.has_room else "wait"
    elif isinstance(frame, Answer):
        name = "taken" if frame.is_taken else "drop"
    else:
        name = type(frame).__name__.lower()
    id = frame.ticket.id if isinstance(frame, Want) else frame.id
    return f"{name} {to} {id.head}.{id.number}"


def want(id: str, mark: str = "0", remaining_s: str = "60") -> Want:
    return Want(ticket(id, float(mark)), float(remaining_s), ("y", "z"))


FRAMES: dict[str, Callable[..., Frame]] = {
    "want": want,
    "evaluation": lambda id: Want(ticket(id, 0.9, is_training=False), 60.0, ("y", "z")),
    "credit": lambda id: Credit(microbatch(id), has_room=True),
    "wait": lambda id: Credit(microbatch(id), has_room=False),
    "forward": lambda id, remaining_s="60": Forward(microbatch(id), float(remaining_s), f"input {id}"),
    "damaged_forward": lambda id: Forward(microbatch(id), 60.0, None),
    "backward": lambda id: Backward(microbatch(id), f"gradient {id}"),
    "damaged_backward": lambda id: Backward(microbatch(id), None),
    "taken": lambda id: Answer(microbatch(id), is_taken=True),
    "drop": lambda id: Answer(microbatch(id), is_taken=False),
    "lost": lambda id: Lost(microbatch(id)),
    "mark": lambda id, mark="1": Mark(ticket(id, float(mark))),
    "away": lambda id, mark: Mark(MicrobatchTicket(microbatch(id), float(mark), 0)),
}


class Bench:
    """One node, with the links and the computer that it uses. Tasks run one at a time, until `computed` or `failed`."""

    node: Any
    begin: Any  # starts the node. A row that does not begin with this event starts it without arguments
    data: asyncio.Queue[object]

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.tasks: list[Task] = []
        self.num_ended = Counter[tuple[Kind, MicrobatchId]]()
        self.stages: dict[str, int] = {}
        self.is_closing = False
        self._words: list[str] = []
        self._result: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._result.set_result(None)

    # the links

    def send(self, to: str, frame: Frame) -> None:
        self.frames.append(frame)
        self._words.append(word(to, frame))

    def broadcast(self, frame: Frame, *, but: str = "") -> None:
        self.frames.append(frame)
        self._words.append(word("all" + (f" but {but}" if but else ""), frame))

    def open(self, peer: str) -> None:
        """Streams are always open."""

    def look(self) -> None:
        """Streams never grow too old."""

    # the computer

    async def compute(self, task: Task) -> object:
        self.tasks.append(task)
        self._words.append(f"compute {task.kind.name.lower()} {task.id.head}.{task.id.number}")
        self._result = asyncio.get_running_loop().create_future()
        result = await self._result
        self.num_ended[task.kind, task.id] += 1
        return result

    @property
    def is_computing(self) -> bool:
        return not self._result.done()

    async def encoded(self, kind: Kind, result: object) -> object:
        return result

    async def close_step(self, num_tokens: int, progress: float | None) -> float:
        self._words.append(f"close {num_tokens}{'' if progress is None else f' at {progress:g}'}")
        self._result = asyncio.get_running_loop().create_future()
        self.is_closing = True
        closed = await self._result
        self.is_closing = False
        assert isinstance(closed, float)
        return closed

    async def next_microbatch(self) -> object:
        return await self.data.get()

    # events

    async def at(self, seconds: str) -> None:
        await asyncio.sleep(float(seconds) + AFTER_S - asyncio.get_running_loop().time())

    def closed(self, peer: str) -> None:
        self.stages.pop(peer, None)
        self.node.closed(peer)

    def computed(self) -> None:
        if not self._result.cancelled():  # its microbatch was lost in the meantime
            self._result.set_result("result")

    def failed(self) -> None:
        self._result.set_exception(MicrobatchLost("out of memory"))

    def step_closed(self, progress: str = "0.5") -> None:
        self._result.set_result(float(progress))

    def leave(self) -> None:
        self.node.leave()

    def rejoin(self) -> None:
        self.node.rejoin()

    def is_idle(self) -> str:
        return "yes" if self.node.is_idle else "no"

    def is_over(self) -> str:
        return "yes" if self.node.is_over else "no"

    async def step(self, text: str) -> None:
        event, _, expected = text.partition(" -> ")
        name, *arguments = event.split()
        if name in FRAMES:
            peer, *values = arguments
            self.node.received(peer, FRAMES[name](*values))
            did = None
        else:
            did = getattr(self, name)(*arguments)
        if asyncio.iscoroutine(did):
            did = await did
        for _ in range(TURNS):
            await asyncio.sleep(0)
        words, self._words = [did] if did else sorted(self._words), []
        if expected:
            assert words == ([] if expected == "nothing" else sorted(expected.split(", "))), text


class ReplicaBench(Bench):
    """A replica in stage 1 of 4, with 2 rooms, and neighbours x and y in the next stage. Peers a and b are upstream."""

    node: Replica

    async def begin(self, stage: str = "1", num_stages: str = "4", rooms: str = "2") -> None:
        self.listed = set("hij")
        spec = spec_of(int(num_stages))
        self.node = Replica(spec, self, self, stage=int(stage), heads=self.listed, num_rooms=int(rooms), rng=InOrder(0))
        self.node.turns.number = 1
        self.neighbours("x", "y")
        self.node.start()

    def want_and_close(self, peer: str, id: str) -> None:
        self.node.received(peer, want(id))
        self.closed(peer)

    def list(self, head: str) -> None:
        self.listed.add(head)

    def unlist(self, head: str) -> None:
        self.listed.remove(head)

    def neighbours(self, *peers: str) -> None:
        self.node.neighbours_changed(peers)

    def count(self, num_microbatches: str) -> None:
        self.node.steps.count(int(num_microbatches) * MICROBATCH_TOKENS)

    def mail(self, id: str) -> str:
        return str(self.node.trips[microbatch(id)].mail.qsize())

    def num_tokens(self) -> str:
        return str(self.node.steps.num_tokens)


class HeadBench(Bench):
    """Head h of 4 stages, with at most 4 microbatches in flight, neighbours x and y in stage 1, and sinks v and w."""

    node: Head

    async def begin(self, num_stages: str = "4", progress: str = "0") -> None:
        self.data = asyncio.Queue()
        self.stages = dict.fromkeys("vw", int(num_stages) - 1)
        self.node = Head(
            spec_of(int(num_stages)),
            self,
            self,
            peer_id="h",
            num_rooms=4,
            first_number=1,
            rng=InOrder(0),
            progress=float(progress),
        )
        self.node.turns.number = 1
        self.node.neighbours_changed("xy")
        self.node.start()

    def sinks(self, *peers: str) -> None:
        self.stages = dict.fromkeys(peers, 3)
        self.node.neighbours_changed("xy")

    def opened(self, peer: str) -> None:
        self.stages[peer] = 3
        self.node.opened(peer)

    def window(self, size: str) -> None:
        self.node.window.size = int(size)

    def size(self) -> str:
        return str(self.node.window.size)

    def launch(self) -> None:
        self.data.put_nowait("data")

    def can_launch(self) -> str:
        return "yes" if self.node.can_launch() else "no"

    def evaluate(self) -> None:
        self.node.evaluate(["held-out"])

    def counted(self) -> str:
        return f"loss {self.node.loss_tokens} done {self.node.done_tokens}"

    def lost_so_far(self) -> str:
        return str(self.node.num_lost)

    def trained(self) -> None:
        """Count all but one microbatch of a batch as done."""
        self.node.loss_tokens = self.node.done_tokens = BATCH_TOKENS - MICROBATCH_TOKENS


def rows(table: str, beginnings: dict[str, str]) -> dict[str, list[str]]:
    """Parse the table into a mapping from titles to steps."""
    found: dict[str, list[str]] = {}
    for line in table.splitlines():
        if line.startswith("    "):
            found[next(reversed(found))].extend(_steps(line, beginnings))
        elif line and not line.startswith("#"):
            assert line not in found, line
            found[line] = []
    return found


def _steps(text: str, beginnings: dict[str, str]) -> Iterator[str]:
    for step in text.strip(" ;").split("; "):
        yield from _steps(beginnings[step], beginnings) if step in beginnings else [step]


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on a virtual clock."""
    return functools.wraps(test)(lambda: run_virtual(test()))


def play(bench: Callable[[], Bench], steps: Sequence[str]) -> Bench:
    """Take the steps of a row, and return the bench."""

    async def main() -> Bench:
        made = bench()
        if not steps[0].startswith("begin"):
            await made.begin()
        for step in steps:
            await made.step(step)
        await made.node.stop()
        return made

    return run_virtual(main())
