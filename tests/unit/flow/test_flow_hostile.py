"""Neighbours that send anything in any order cause no exception, no growth, and no gradient that counts twice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.flow.actions import Action, CloseStep, Compute, Kind
from noloco_p2p.flow.frames import Answer, Backward, Credit, Forward, Lost, Mark, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import LONGEST_DEADLINE_S, MAX_UNDER_WAY, MAX_WANTS_PER_PEER
from noloco_p2p.flow.replica import Replica

PEERS = ["a", "b", "x", "y", "h"]
IDS = st.builds(MicrobatchId, st.sampled_from(["h", "i"]), st.integers(1, 4))
TICKETS = st.builds(
    MicrobatchTicket, IDS, st.sampled_from([0.0, 0.5, 1.0]), st.just(10), st.sampled_from([True, True, False])
)
SECONDS = st.sampled_from([-1.0, 0.0, 5.0, 1e9])
PAYLOADS = st.sampled_from(["payload", "payload", None])
FRAMES = st.one_of(
    st.builds(Want, TICKETS, SECONDS, st.just(("x", "y"))),
    st.builds(Forward, IDS, SECONDS, PAYLOADS),
    st.builds(Backward, IDS, PAYLOADS),
    st.builds(Credit, IDS, st.booleans()),
    st.builds(Answer, IDS, st.booleans()),
    st.builds(Lost, IDS),
    st.builds(Mark, TICKETS),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("frame"), st.sampled_from(PEERS), FRAMES),
        st.tuples(st.sampled_from(["computed", "failed", "step", "launch"])),
        st.tuples(st.just("closed"), st.sampled_from(PEERS)),
        st.tuples(st.just("time"), st.sampled_from([0.3, 1.0, 5.0, 150.0])),
    ),
    max_size=80,
)


class Driver:
    """Performs the tasks of a machine, and counts them."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.now_s = 0.0
        self.task: Compute | CloseStep | None = None
        self.num_done: Counter[tuple[Kind, MicrobatchId]] = Counter()

    def do(self, actions: list[Action]) -> None:
        tasks = [action for action in actions if isinstance(action, Compute | CloseStep)]
        assert len(tasks) <= 1
        assert not tasks or self.task is None, "two tasks at a time"
        self.task = tasks[0] if tasks else self.task

    def event(self, kind: str, *arguments: Any) -> None:
        machine, task = self.machine, self.task
        match kind:
            case "frame":
                self.do(machine.received(*arguments, self.now_s))
            case "closed":
                self.do(machine.stream_closed(*arguments, self.now_s))
            case "time":
                self.now_s += arguments[0]
                self.do(machine.tick(self.now_s))
            case "launch" if isinstance(machine, Head) and machine.can_launch(self.now_s):
                self.do(machine.launch("data", 10, self.now_s)[1])
            case "computed" | "failed" if isinstance(task, Compute):
                self.task = None
                if kind == "computed":
                    self.num_done[task.kind, task.id] += 1
                    self.do(machine.computed(task, "result", self.now_s))
                else:
                    self.do(machine.compute_failed(task, self.now_s))
            case "step" if isinstance(task, CloseStep):
                self.task = None
                if isinstance(machine, Head):
                    self.do(machine.step_closed(machine.progress + 0.1, self.now_s))
                else:
                    self.do(machine.step_closed(self.now_s))

    def finish(self) -> None:
        """Let the machine finish while no more frames arrive."""
        self.do(self.machine.leave(self.now_s))
        for _ in range(30):
            self.event("time", LONGEST_DEADLINE_S / 10)
            for kind in ("computed", "step"):
                self.event(kind)
        assert self.machine.is_idle
        assert not len(self.machine.departures)
        assert not len(self.machine.tasks)


def num_under_way(machine: Any) -> int:
    return sum(bool(departure.waiting) for departure in machine.departures._departures.values())


@given(events=EVENTS, stage=st.integers(1, 3), seed=st.integers(0, 100))
@settings(max_examples=150, deadline=None)
def test_a_replica_bears_any_neighbours(events: list[Any], stage: int, seed: int) -> None:
    replica = Replica(stage=stage, num_stages=4, heads={"h"}, num_rooms=2, batch_tokens=40, rng=random.Random(seed))
    driver = Driver(replica)
    driver.do(replica.neighbours_changed(["x", "y"], 0.0))
    for event in events:
        driver.event(*event)
        assert len(replica.stash) <= 2
        assert len(replica.wants) <= MAX_WANTS_PER_PEER * len(PEERS)
        assert num_under_way(replica) <= MAX_UNDER_WAY
    driver.finish()
    assert not driver.num_done or max(driver.num_done.values()) == 1, "a task of one microbatch ran twice"


@pytest.mark.parametrize("num_stages", [2, 4])
@given(events=EVENTS, seed=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_a_head_bears_any_neighbours(num_stages: int, events: list[Any], seed: int) -> None:
    head = Head(
        peer_id="h",
        num_stages=num_stages,
        max_in_flight=4,
        batch_tokens=40,
        first_number=1,
        rng=random.Random(seed),
    )
    driver = Driver(head)
    driver.do(head.neighbours_changed(["x", "y"], ["a", "b"], 0.0))
    head.window.size = 3
    for event in events:
        driver.event(*event)
        assert len(head.in_flight) <= 4
    driver.finish()
    assert not driver.num_done or max(driver.num_done.values()) == 1, "a task of one microbatch ran twice"
