"""Neighbours that send anything in any order cause no exception, no growth, and no gradient that counts twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_table import TURNS, Bench, HeadBench, ReplicaBench

from noloco_p2p.flow.frames import Answer, Backward, Credit, Forward, Lost, Mark, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.flow.limits import MAX_WANTS_PER_PEER
from noloco_p2p.simulate.clock import run_virtual

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
        st.tuples(st.sampled_from(["computed", "failed", "launch"])),
        st.tuples(st.just("closed"), st.sampled_from(PEERS)),
        st.tuples(st.just("later"), st.sampled_from([0.3, 1.0, 5.0, 150.0])),
    ),
    max_size=80,
)


async def suffer(bench: Bench, events: list[Any]) -> None:
    """Take the events, then let the node finish while no more frames arrive."""
    node, is_replica = bench.node, isinstance(bench, ReplicaBench)
    for kind, *arguments in [*events, ("leave",), *[("later", 60.0), ("computed",)] * 15]:
        match kind:
            case "frame":
                node.received(*arguments)
            case "later":
                await asyncio.sleep(arguments[0])
            case "launch" if isinstance(bench, HeadBench):
                bench.launch()
            case "computed" | "failed" if bench.is_computing:
                (bench.step_closed if bench.is_closing else getattr(bench, kind))()
            case "closed" | "leave":
                getattr(bench, kind)(*arguments)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if is_replica:
            assert len(node.rooms.held) <= 2
            assert len(node.rooms) <= MAX_WANTS_PER_PEER * len(PEERS)
        else:
            assert len(node.trips) <= 4
    assert node.is_idle, vars(node)
    await node.stop()
    assert not bench.num_ended or max(bench.num_ended.values()) == 1, "a task of one microbatch ran twice"


@pytest.mark.parametrize("stage", [1, 2, 3])
@given(events=EVENTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_replica_bears_any_neighbours(stage: int, events: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench = ReplicaBench()
        await bench.node.stop()
        bench.replica(str(stage), "4")
        await suffer(bench, events)

    run_virtual(main())
    assert not caplog.records


@pytest.mark.parametrize("num_stages", [2, 4])
@given(events=EVENTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_head_bears_any_neighbours(num_stages: int, events: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench = HeadBench()
        await bench.node.stop()
        bench.head(str(num_stages))
        bench.window("3")
        await suffer(bench, events)

    run_virtual(main())
    assert not caplog.records
