"""A head as a table, its window and its deadlines."""

from __future__ import annotations

import pytest
from pipeline_table import HeadBench, play, rows

from noloco_p2p.flow.frames import Forward, Mark, Want
from noloco_p2p.flow.head import HeadDeadlines, Window
from noloco_p2p.flow.limits import (
    DEADLINE_LATENCIES,
    FIRST_DEADLINE_S,
    FIRST_PAUSE_S,
    LONGEST_DEADLINE_S,
    LONGEST_PAUSE_S,
    MAX_SINKS,
    NUM_LATENCIES,
    SHORTEST_DEADLINE_S,
)

ASKING = "launch -> compute forward h.1; computed -> want x h.1"
TAKEN = f"{ASKING}; credit x h.1 -> forward x h.1; taken x h.1 -> nothing"
LOSS = f"{TAKEN}; forward v h.1 -> taken v h.1, compute loss h.1"
BEHIND = f"{LOSS}; computed -> backward v h.1"
BACKWARD = f"{BEHIND}; backward x h.1 -> compute backward h.1"
BEGINNINGS = {"ASKING": ASKING, "TAKEN": TAKEN, "LOSS": LOSS, "BEHIND": BEHIND, "BACKWARD": BACKWARD}

TABLE = rows(
    """

# the ring

a microbatch goes round
    BACKWARD; is_idle -> no; computed -> nothing; is_idle -> yes; counted -> loss 10 done 10
the return may overtake the answer to the forward
    ASKING; credit x h.1 -> forward x h.1; forward v h.1 -> taken v h.1, compute loss h.1; taken x h.1 -> nothing
in a pipeline of two stages the sinks are the neighbours
    begin 2; launch; computed -> want v h.1; credit v h.1 -> forward v h.1; taken v h.1;
    forward v h.1 -> taken v h.1, compute loss h.1; computed -> backward v h.1;
    backward v h.1 -> compute backward h.1; computed -> nothing; is_idle -> yes
backwards are computed first, then losses
    window 3; BEHIND; launch -> compute forward h.2; forward w h.2 -> drop w h.2; backward x h.1 -> nothing;
    computed -> want x h.2, compute backward h.1
a head takes nothing but what it launched
    want a i.1 -> drop a i.1; forward v h.1 -> drop v h.1; forward v i.1 -> drop v i.1; mark a i.1 -> nothing

# at most once

a repeated return does nothing
    LOSS; forward v h.1 -> taken v h.1; computed -> backward v h.1; forward v h.1 -> taken v h.1
a return by another path is refused
    LOSS; forward w h.1 -> drop w h.1; computed -> backward v h.1; forward w h.1 -> drop w h.1
a return of what was not sent is refused
    ASKING; forward v h.1 -> drop v h.1
a damaged return is refused
    TAKEN; damaged_forward v h.1 -> drop v h.1; forward v h.1 -> taken v h.1, compute loss h.1
a backward before the loss does nothing
    LOSS; backward x h.1 -> nothing; computed -> backward v h.1, compute backward h.1

# launching

one is launched at first, and the window grows
    can_launch -> yes; BEHIND; can_launch -> no; backward x h.1; computed; can_launch -> yes; size -> 2
the next one is launched when the last has left
    window 3; launch; can_launch -> no; computed; can_launch -> no; credit x h.1; can_launch -> yes;
    launch -> compute forward h.2
without a stream for the return nothing is launched
    sinks; can_launch -> no; sinks v; can_launch -> yes
a full pipeline holds the data back
    ASKING; wait x h.1 -> want y h.1; wait y h.1; at 5 -> want x h.1; can_launch -> no;
    credit y h.1 -> forward y h.1, lost x h.1; at 6 -> nothing; is_idle -> no
a head that all neighbours refuse keeps its microbatch
    ASKING; drop x h.1 -> want y h.1; drop y h.1 -> nothing; at 5 -> want x h.1
sinks that came meanwhile are told
    launch; computed -> want x h.1; sinks w; wait x h.1 -> want y h.1

a forward that all refuse is given up with its deadline
    ASKING; credit x h.1; drop x h.1 -> want y h.1; credit y h.1; drop y h.1 -> want x h.1; at 100;
    lost_so_far -> 0; at 120; lost_so_far -> 1

# loss

a path that dies before the loss
    window 4; TAKEN; closed x -> nothing; size -> 2; can_launch -> no; at 1; can_launch -> yes;
    forward v h.1 -> drop v h.1
a path that dies after the loss: the tail counts, and the front has none
    window 4; BEHIND; lost x h.1 -> nothing; size -> 2; counted -> loss 10 done 10; is_idle -> yes;
    backward x h.1 -> nothing
a path that dies before the loss is computed: later stages get their gradients
    LOSS; closed x -> nothing; computed -> backward v h.1; counted -> loss 10 done 10; is_idle -> yes
losses of one window halve it once
    window 4; TAKEN; launch; computed; credit x h.2; taken x h.2; lost x h.1 -> nothing; size -> 2;
    lost x h.2 -> nothing; size -> 2
the deadline passes before the loss
    TAKEN; at 121 -> compute forward h.2; forward v h.1 -> drop v h.1; lost_so_far -> 1
the deadline passes after the loss
    BEHIND; at 121 -> nothing; counted -> loss 10 done 10; is_idle -> yes
what is computed here does not expire
    LOSS; at 121 -> nothing; computed -> backward v h.1
a backward that is here does not expire
    BACKWARD; at 121 -> nothing; computed -> nothing; counted -> loss 10 done 10
out of memory in the front's forward
    launch; failed -> nothing
out of memory in the loss: the path frees its rooms
    LOSS; failed -> lost v h.1; counted -> loss 0 done 0; is_idle -> yes
out of memory in the front's backward
    BACKWARD; failed -> nothing; counted -> loss 10 done 10; size -> 1
a return after the end is refused
    BACKWARD; computed; forward v h.1 -> drop v h.1

# steps

a head closes on its own batch, and launches nothing meanwhile
    trained; BACKWARD; computed -> close 40; can_launch -> no; step_closed 0.1 -> nothing; can_launch -> yes
no task runs while a step closes
    trained; window 2; BEHIND; launch; computed; credit x h.2; taken x h.2; backward x h.1; computed -> close 40;
    forward v h.2 -> taken v h.2; step_closed 0.1 -> compute loss h.2
it divides by the tokens in its losses
    trained; window 2; LOSS; launch;  computed -> backward v h.1, compute forward h.2; computed; credit x h.2;
    forward v h.2; computed -> backward v h.2; backward x h.1; computed -> close 50; counted -> loss 0 done 0
a lost backward of the front counts as zero
    trained; BEHIND; lost x h.1 -> close 40
a head that has finished tells all
    trained; BACKWARD; computed -> close 40; step_closed 1 -> tell all 1; can_launch -> no;
    evaluate -> compute forward h.3
a head that has finished repeats its final mark
    trained; BACKWARD; computed -> close 40; step_closed 1 -> tell all 1; at 29 -> nothing;
    at 31 -> tell all 1; at 61 -> tell all 1
a neighbour that comes after the end hears of it, and an evaluation does not keep a head from its end
    opened x -> nothing; trained; BACKWARD; computed -> close 40; is_over -> no; step_closed 1 -> tell all 1
    opened x -> tell x 1; is_over -> yes; evaluate; computed; is_over -> yes

# evaluation

an evaluation ends with its loss
    evaluate -> compute forward h.1; computed -> want y h.1; credit y h.1 -> forward y h.1; taken y h.1;
    forward v h.1 -> taken v h.1, compute loss h.1; computed -> nothing; counted -> loss 0 done 0; is_idle -> yes

# leaving

a head that leaves finishes what is on its way
    window 3; TAKEN; launch; leave -> tell all 0; computed -> nothing; can_launch -> no; is_idle -> no;
    forward v h.1 -> taken v h.1, compute loss h.1; computed; backward x h.1; computed; is_idle -> yes
a head that leaves gives up what has no room
    ASKING; leave -> tell all 0, lost x h.1; is_idle -> yes
a head that comes back launches again
    ASKING; leave -> tell all 0, lost x h.1; can_launch -> no; at 2; rejoin -> compute forward h.3
a head that has finished does not take its mark back
    begin 4 1; leave -> nothing
""",
    BEGINNINGS,
)


@pytest.mark.parametrize("steps", TABLE.values(), ids=TABLE)
def test_a_row(steps: list[str]) -> None:
    play(HeadBench, steps)


def test_the_window_doubles_until_it_was_halved_and_grows_by_one_from_then_on() -> None:
    window, sizes = Window(4), []
    for _ in range(4):
        window.ended_well()
        sizes.append(window.size)
    assert sizes == [2, 3, 4, 4]  # one more for each microbatch, so a window doubles the size
    window.lost(1.0, 1.0)  # after a successful window, so this loss has no effect
    window.lost(2.0, 2.0)
    assert window.size == 2
    window.lost(1.5, 2.1)  # sent before the window was halved: part of the same loss
    assert window.size == 2
    sizes.clear()
    for _ in range(6):
        window.ended_well()
        sizes.append(window.size)
    assert sizes == [2, 3, 3, 3, 4, 4]


def test_a_loss_after_a_whole_window_that_ended_well_changes_nothing() -> None:
    window = Window(4)
    for _ in range(9):
        window.ended_well()
    window.lost(1.0, 1.0)
    assert window.size == 4
    assert window.is_open(3, 1.0)
    for _ in range(3):
        window.ended_well()
    window.lost(2.0, 2.0)
    assert window.size == 2
    assert not window.is_open(0, 2.0)


def test_a_head_that_loses_again_and_again_pauses_longer_each_time() -> None:
    window, now_s, pauses = Window(4), 0.0, []
    for _ in range(8):
        now_s += 0.01
        window.lost(now_s, now_s)
        began_s = now_s
        while not window.is_open(0, now_s):
            now_s += 0.5
        pauses.append(now_s - began_s)
    assert pauses == pytest.approx([min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(8)])
    window.ended_well()
    window.lost(now_s + 1, now_s + 1)
    assert window.is_open(0, now_s + 1 + FIRST_PAUSE_S)


def test_a_deadline_is_a_multiple_of_the_median_latency_within_bounds() -> None:
    deadlines = HeadDeadlines()
    assert deadlines.seconds == FIRST_DEADLINE_S
    for seconds, deadline_s in [
        (5.0, DEADLINE_LATENCIES * 5.0),
        (0.1, SHORTEST_DEADLINE_S),
        (1e4, LONGEST_DEADLINE_S),
    ]:
        for _ in range(NUM_LATENCIES):
            deadlines.measured(seconds)
        assert deadlines.seconds == deadline_s


def test_a_want_carries_the_progress_of_the_head_its_sinks_and_its_deadline() -> None:
    sinks = " ".join(f"v{i}" for i in range(2 * MAX_SINKS))
    bench = play(HeadBench, ["begin 4 0.25", f"sinks {sinks}", "launch", "computed", "credit x h.1"])
    want, forward = bench.frames
    assert isinstance(want, Want)
    assert isinstance(forward, Forward)
    assert (want.ticket.mark, want.remaining_s, len(want.sinks)) == (0.25, FIRST_DEADLINE_S, MAX_SINKS)
    assert forward.remaining_s == pytest.approx(FIRST_DEADLINE_S)


def test_the_time_of_a_microbatch_begins_when_it_leaves() -> None:
    row = f"{ASKING}; wait x h.1; wait y h.1; at 100; credit y h.1; at 219; lost_so_far -> 0; at 221; lost_so_far -> 1"
    play(HeadBench, row.split("; "))


@pytest.mark.parametrize("end", ["leave", "step_closed 1"])
def test_a_mark_has_a_number_of_its_own_and_no_tokens(end: str) -> None:
    """Replicas use the mark with the highest number, and could replay the ticket of a microbatch."""
    bench = play(HeadBench, f"trained; {BACKWARD}; computed -> close 40; {end}".split("; "))
    mark = bench.frames[-1]
    assert isinstance(mark, Mark)
    assert (mark.ticket.id.number, mark.ticket.num_tokens) == (2, 0)


def test_an_evaluation_after_the_end_carries_the_final_mark() -> None:
    """Swaps and the last step may take a head slightly beyond 1, and replicas ban a head that signs more than 1."""
    row = f"trained; {BACKWARD}; computed -> close 40; step_closed 1.025; evaluate; computed"
    (want,) = [
        frame
        for frame in play(HeadBench, row.split("; ")).frames
        if isinstance(frame, Want) and not frame.ticket.is_training
    ]
    assert want.ticket.mark == 1


def test_deadlines_grow_when_all_microbatches_miss_them() -> None:
    row = ["launch"]
    for number, at_s in enumerate((200, 700, 1400, 2100), 1):
        row += ["computed", f"credit x h.{number}", f"taken x h.{number}", f"at {at_s}"]
    bench = play(HeadBench, row)
    assert isinstance(bench, HeadBench)
    assert bench.node.num_lost == 4
    assert bench.node.deadlines.seconds > 2 * FIRST_DEADLINE_S
