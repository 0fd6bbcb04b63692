"""A head as a table: each row is a sequence of events and the actions that its driver must take.

The head h has 4 stages unless a row says otherwise, and may have 4 microbatches in flight. Its neighbours are x and y
in stage 1, and its sinks v and w in stage 3. A microbatch has 10 tokens, a batch 40.
"""

from __future__ import annotations

import pytest
from pipeline_table import BATCH_TOKENS, MICROBATCH_TOKENS, Bench, InOrder, events_without_a_row, microbatch, rows

from noloco_p2p.flow.actions import Broadcast, GaveUp, Send
from noloco_p2p.flow.frames import Credit, Forward, Mark, MicrobatchId, MicrobatchTicket, Want
from noloco_p2p.flow.head import Head, HeadDeadlines, Window
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


class HeadBench(Bench):
    machine: Head

    def __init__(self) -> None:
        super().__init__()
        self.head("4")

    def head(self, num_stages: str, progress: str = "0") -> None:
        self.machine = Head(
            peer_id="h",
            num_stages=int(num_stages),
            max_in_flight=4,
            batch_tokens=BATCH_TOKENS,
            first_number=1,
            rng=InOrder(0),
            progress=float(progress),
        )
        self.neighbours("x,y", "v,w")

    def neighbours(self, downstream: str, sinks: str = "v,w") -> str:
        names = [peer for peer in sinks.split(",") if peer]
        return self.words(self.machine.neighbours_changed(downstream.split(","), names, self.now_s))

    def window(self, size: str) -> None:
        self.machine.window.size = int(size)

    def size(self) -> str:
        return str(self.machine.window.size)

    def can_launch(self) -> str:
        return "yes" if self.machine.can_launch(self.now_s) else "no"

    def launch(self) -> str:
        id, actions = self.machine.launch("data", MICROBATCH_TOKENS, self.now_s)
        return self.words(actions) or f"{id.head}.{id.number}"

    def can_evaluate(self) -> str:
        return "yes" if self.machine.can_launch(self.now_s, is_training=False) else "no"

    def evaluate(self) -> str:
        return self.words(self.machine.launch("data", MICROBATCH_TOKENS, self.now_s, is_training=False)[1])

    def step_closed(self, progress: str) -> str:
        return self.words(self.machine.step_closed(float(progress), self.now_s))

    def stream_opened(self, peer: str) -> str:
        return self.words(self.machine.stream_opened(peer, self.now_s))

    def is_over(self) -> str:
        return "yes" if self.machine.is_over else "no"

    def counted(self) -> str:
        return f"loss {self.machine.steps.loss_tokens} done {self.machine.steps.done_tokens}"

    def trained(self) -> None:
        """Count all but one microbatch of a batch as done."""
        self.machine.steps.count_loss(BATCH_TOKENS - MICROBATCH_TOKENS)
        self.machine.steps.count_done(BATCH_TOKENS - MICROBATCH_TOKENS)


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
    head 2; launch; computed -> want v h.1; credit v h.1 -> forward v h.1; taken v h.1;
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
a repeated backward does nothing
    BACKWARD; backward x h.1 -> nothing; computed; backward x h.1 -> nothing; counted -> loss 10 done 10
a backward from elsewhere does nothing
    BEHIND; backward y h.1 -> nothing; backward x h.1 -> compute backward h.1
a backward before the loss does nothing
    LOSS; backward x h.1 -> nothing; computed -> backward v h.1
a task that is reported twice counts once
    BACKWARD; computed; computed -> nothing; failed -> nothing; counted -> loss 10 done 10

# launching

one is launched at first, and the window grows
    can_launch -> yes; BEHIND; can_launch -> no; backward x h.1; computed; can_launch -> yes; size -> 2
the next one is launched when the last has left
    window 3; launch; can_launch -> no; computed; can_launch -> no; credit x h.1; can_launch -> yes;
    launch -> compute forward h.2
at most the window is in flight
    window 1; TAKEN; can_launch -> no
without a stream for the return nothing is launched
    neighbours x,y ,; can_launch -> no; neighbours x,y v; can_launch -> yes
a full pipeline holds the data back
    ASKING; wait x h.1 -> want y h.1; wait y h.1; at 300; tick -> want x h.1; can_launch -> no;
    credit y h.1 -> forward y h.1, lost x h.1; at 301; tick -> nothing; is_idle -> no
a head that all neighbours refuse keeps its microbatch
    ASKING; drop x h.1 -> want y h.1; drop y h.1 -> nothing; at 5; tick -> want x h.1
sinks that came meanwhile are told
    launch; computed -> want x h.1; neighbours x,y w; wait x h.1 -> want y h.1
before TAKEN another replica is drawn
    ASKING; credit x h.1; closed x -> want y h.1; credit y h.1 -> forward y h.1; size -> 1

a forward that all refuse is given up with its deadline
    ASKING; credit x h.1; drop x h.1 -> want y h.1; credit y h.1; drop y h.1 -> want x h.1; at 100; tick -> want x h.1;
    at 121; tick -> lost x h.1, give up h.1

# loss

a path that dies before the loss
    window 4; TAKEN; closed x -> give up h.1; size -> 2; can_launch -> no; at 1; can_launch -> yes;
    forward v h.1 -> drop v h.1
a path that dies after the loss: the tail counts, and the front has none
    window 4; BEHIND; lost x h.1 -> nothing; size -> 2; counted -> loss 10 done 10; is_idle -> yes;
    backward x h.1 -> nothing
a path that dies before the loss is computed: later stages get their gradients
    LOSS; closed x -> nothing; computed -> backward v h.1; counted -> loss 10 done 10; is_idle -> yes
only the neighbour that has it can lose it
    BEHIND; lost y h.1 -> nothing; backward x h.1 -> compute backward h.1
losses of one window halve it once
    window 4; TAKEN; launch; computed; credit x h.2; taken x h.2; lost x h.1 -> give up h.1; size -> 2;
    lost x h.2 -> give up h.2; size -> 2
the deadline passes before the loss
    TAKEN; at 121; tick -> give up h.1; forward v h.1 -> drop v h.1; is_idle -> yes
the deadline passes after the loss
    BEHIND; at 121; tick -> nothing; counted -> loss 10 done 10; is_idle -> yes
what is computed here does not expire
    LOSS; at 121; tick -> nothing; computed -> backward v h.1
a backward that is here does not expire
    BACKWARD; at 121; tick -> nothing; computed -> nothing; counted -> loss 10 done 10
out of memory in the front's forward
    launch; failed -> give up h.1
out of memory in the loss: the path frees its rooms
    LOSS; failed -> lost v h.1, give up h.1; counted -> loss 0 done 0; is_idle -> yes
out of memory in the front's backward
    BACKWARD; failed -> nothing; counted -> loss 10 done 10; size -> 1
a damaged backward
    BEHIND; damaged_backward x h.1 -> nothing; counted -> loss 10 done 10
a return after the end is refused
    BACKWARD; computed; forward v h.1 -> drop v h.1

# steps

a head closes on its own batch, and launches nothing meanwhile
    trained; BACKWARD; computed -> close 40; can_launch -> no; step_closed 0.1 -> nothing; can_launch -> yes
no task runs while a step closes
    trained; window 2; BEHIND; launch; computed; credit x h.2; taken x h.2; backward x h.1; computed -> close 40;
    forward v h.2 -> taken v h.2; step_closed 0.1 -> compute loss h.2
it divides by the tokens in its losses
    trained; window 2; LOSS; launch -> h.2; computed -> backward v h.1, compute forward h.2; computed; credit x h.2;
    forward v h.2; computed -> backward v h.2; backward x h.1; computed -> close 50; counted -> loss 0 done 0
a lost backward of the front counts as zero
    trained; BEHIND; lost x h.1 -> close 40
a head that has finished tells all
    trained; BACKWARD; computed -> close 40; step_closed 1 -> tell all 1; can_launch -> no; can_evaluate -> yes
a head that has finished repeats its final mark
    trained; BACKWARD; computed -> close 40; step_closed 1 -> tell all 1; at 29; tick -> nothing;
    at 31; tick -> tell all 1; tick -> nothing; at 61; tick -> tell all 1
a neighbour that comes after the end hears of it, and an evaluation does not keep a head from its end
    stream_opened x -> nothing; trained; BACKWARD; computed -> close 40; is_over -> no; step_closed 1 -> tell all 1
    stream_opened x -> tell x h.3; is_over -> yes; evaluate; computed; is_over -> yes
a head that was finished launches nothing
    head 4 1; can_launch -> no

# evaluation

an evaluation ends with its loss
    evaluate -> compute forward h.1; computed -> want y h.1; credit y h.1 -> forward y h.1; taken y h.1;
    forward v h.1 -> taken v h.1, compute loss h.1; computed -> nothing; counted -> loss 0 done 0; is_idle -> yes

# leaving

a head that leaves finishes what is on its way
    window 3; TAKEN; launch; leave -> tell all 0, give up h.2; computed -> nothing; can_launch -> no; is_idle -> no;
    forward v h.1 -> taken v h.1, compute loss h.1; computed; backward x h.1; computed; is_idle -> yes
a head that leaves gives up what has no room
    ASKING; leave -> tell all 0, lost x h.1, give up h.1; is_idle -> yes
a head that comes back launches again
    ASKING; leave -> tell all 0, lost x h.1, give up h.1; can_launch -> no; at 2; rejoin -> nothing; can_launch -> yes;
    launch -> compute forward h.3
a head that has finished does not take its mark back
    head 4 1; leave -> nothing
""",
    BEGINNINGS,
)


@pytest.mark.parametrize("steps", TABLE.values(), ids=TABLE)
def test_a_row(steps: list[str]) -> None:
    bench = HeadBench()
    for step in steps:
        bench.step(step)


def test_every_event_has_a_row() -> None:
    assert not events_without_a_row(Head, HeadBench, TABLE)


def steps(text: str) -> HeadBench:
    bench = HeadBench()
    for step in text.split("; "):
        bench.step(step)
    return bench


def test_a_want_carries_the_progress_of_the_head_and_its_sinks() -> None:
    bench = HeadBench()
    bench.head("4", "0.25")
    bench.neighbours("x,y", ",".join(f"v{i}" for i in range(2 * MAX_SINKS)))
    bench.launch()
    assert bench.task
    (want,) = bench.machine.computed(bench.task, "output", bench.now_s)
    sinks = tuple(sorted(f"v{i}" for i in range(2 * MAX_SINKS)))[:MAX_SINKS]
    assert want == Send(
        "x", Want(MicrobatchTicket(microbatch("h.1"), 0.25, MICROBATCH_TOKENS), FIRST_DEADLINE_S, sinks)
    )


def test_the_time_of_a_microbatch_begins_when_it_leaves() -> None:
    bench = steps(f"{ASKING}; wait x h.1; wait y h.1; at 100; tick -> want x h.1")
    for step in ["credit y h.1 -> forward y h.1, lost x h.1", "at 219", "tick -> nothing", "at 221"]:
        bench.step(step)
    bench.step("tick -> give up h.1")


def test_what_is_given_up_may_be_launched_again() -> None:
    bench = steps(TAKEN)
    (gave_up,) = bench.machine.stream_closed("x", 0.0)
    assert gave_up == GaveUp(microbatch("h.1"), "data")


def test_the_final_mark_has_a_number_of_its_own() -> None:
    """Replicas use the mark with the highest number."""
    bench = steps(f"trained; {BACKWARD}; computed -> close 40")
    (told,) = bench.machine.step_closed(1.0, 0.0)
    assert told == Broadcast(Mark(MicrobatchTicket(MicrobatchId("h", 2), 1.0, 0)))


def test_a_head_that_leaves_says_so_without_the_tokens_of_a_microbatch() -> None:
    """Peers on the path could replay the ticket of a microbatch, so the mark is signed for zero tokens."""
    bench = steps(ASKING)
    bench.machine.progress = 0.25
    assert bench.machine.leave(0.0)[0] == Broadcast(Mark(MicrobatchTicket(MicrobatchId("h", 2), 0.25, 0)))


def test_an_evaluation_after_the_end_carries_the_final_mark() -> None:
    """Swaps and the last step may take a head slightly beyond 1, and replicas ban a head that signs more than 1."""
    bench = steps(f"trained; {BACKWARD}; computed -> close 40; step_closed 1.025")
    id, _ = bench.machine.launch("data", 10, 0.0, is_training=False)
    assert bench.machine.in_flight[id].ticket.mark == 1


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


def test_deadlines_grow_when_all_microbatches_miss_them() -> None:
    bench = HeadBench()
    for _ in range(NUM_LATENCIES):
        bench.machine.deadlines.measured(5.0)
    before_s = bench.machine.deadlines.seconds
    for _ in range(NUM_LATENCIES):
        number = bench.machine._next_number
        for step in ("launch", "computed", f"credit x h.{number}", f"taken x h.{number}"):
            bench.step(step)
        bench.now_s += bench.machine.deadlines.seconds
        assert bench.tick() == f"give up h.{number}"
        bench.now_s += LONGEST_PAUSE_S
    assert bench.machine.deadlines.seconds >= 2 * before_s


def test_a_forward_says_how_long_its_microbatch_may_take() -> None:
    bench = steps(ASKING)
    (forward,) = bench.machine.received("x", Credit(microbatch("h.1"), has_room=True), 0.0)
    assert forward == Send("x", Forward(microbatch("h.1"), FIRST_DEADLINE_S, "result"))
