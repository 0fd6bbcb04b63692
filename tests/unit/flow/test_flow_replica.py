"""An inner replica as a table, and the routes of microbatches."""

from __future__ import annotations

import random

import pytest
from pipeline_table import FRAMES, ReplicaBench, play, rows, spec_of, ticket

from noloco_p2p.flow.frames import Forward, Want
from noloco_p2p.flow.limits import (
    ASK_AGAIN_S,
    ASK_PATIENCE_S,
    MAX_MAIL,
    MAX_SINKS,
    MAX_WANTS_PER_PEER,
    SHORTEST_VOTE_S,
    VOTE_S,
    num_rooms,
)
from noloco_p2p.flow.neighbours import Few, Routing

FORWARD = "want a h.1 -> credit a h.1; forward a h.1 -> taken a h.1, compute forward h.1"
ASKING = f"{FORWARD}; computed -> want x h.1"
SENT = f"{ASKING}; credit x h.1 -> forward x h.1"
TAKEN = f"{SENT}; taken x h.1 -> nothing"
FULL = f"{TAKEN}; want a h.2 -> credit a h.2; forward a h.2; computed -> want x h.2"
BEGINNINGS = {"FORWARD": FORWARD, "ASKING": ASKING, "SENT": SENT, "TAKEN": TAKEN, "FULL": FULL}

TABLE = rows(
    f"""

# the way there and back

a microbatch goes on, comes back and is counted
    TAKEN; backward x h.1 -> compute backward h.1; is_idle -> no; computed -> backward a h.1; is_idle -> yes;
    num_tokens -> 10
backwards are computed first
    TAKEN; want a h.2; forward a h.2 -> taken a h.2, compute forward h.2; want b h.3 -> wait b h.3;
    backward x h.1 -> nothing; computed -> want x h.2, compute backward h.1;
    computed -> backward a h.1, credit b h.3
backwards are computed before forwards that came earlier
    begin 1 4 3; TAKEN; want a h.2; want a h.3; forward a h.2 -> taken a h.2, compute forward h.2;
    forward a h.3 -> taken a h.3; backward x h.1 -> nothing; computed -> want x h.2, compute backward h.1;
    computed -> backward a h.1, compute forward h.3
the last stage returns to the head, unasked
    begin 3 4; want a h.1; forward a h.1; computed -> forward h h.1; taken h h.1;
    backward h h.1 -> compute backward h.1; computed -> backward a h.1
the stage before the last draws among the sinks
    begin 2 4; want a h.1; forward a h.1; computed -> want y h.1
in a pipeline of two stages the head is on both sides
    begin 1 2; want h h.1; forward h h.1; computed -> forward h h.1; taken h h.1;
    backward h h.1 -> compute backward h.1; computed -> backward h h.1; is_idle -> yes

# room

without room a want is queued until there is
    FULL; want b h.3 -> wait b h.3; backward x h.1 -> compute backward h.1; computed -> backward a h.1, credit b h.3
room goes to heads in turn
    FULL; want a h.3 -> wait a h.3; want b i.1 -> wait b i.1; backward x h.1; computed -> backward a h.1, credit b i.1
a forward without a credit is refused
    forward a h.1 -> drop a h.1
a forward with the credit of another neighbour is refused
    want a h.1; forward b h.1 -> drop b h.1; forward a h.1 -> taken a h.1, compute forward h.1
a microbatch that has arrived is not taken back
    FULL; lost a h.2 -> nothing
a credit that is not needed is free again
    begin 1 4 1; want a h.1 -> credit a h.1; want b h.2 -> wait b h.2;
    lost a h.1 -> credit b h.2
a want that is not needed is forgotten
    FULL; want b h.3; lost b h.3; backward x h.1; computed -> backward a h.1
nobody else can release a credit
    begin 1 4 1; want a h.1; want b h.2; lost b h.1 -> nothing; forward a h.1 -> taken a h.1, compute forward h.1
a want expires with its microbatch
    FULL; want b h.3 0 5 -> wait b h.3; at 6; backward x h.1; computed -> backward a h.1
a credit expires with its microbatch
    begin 1 4 1; want a h.1 0 5 -> credit a h.1; want b h.2 -> wait b h.2; at 6 -> lost a h.1, credit b h.2;
    forward a h.1 -> drop a h.1
a want whose stream closes at once is not answered
    begin 1 4 1; want_and_close a h.1 -> nothing; is_idle -> yes; want b h.2 -> credit b h.2
a microbatch waits with one upstream neighbour alone
    FULL; want a h.3 -> wait a h.3; want b h.3 -> drop b h.3
a damaged forward gives its room back
    want a h.1; damaged_forward a h.1 -> drop a h.1; is_idle -> yes; want a h.1 -> credit a h.1

# at most once

a repeated want does nothing
    want a h.1 -> credit a h.1; want a h.1 -> credit a h.1; forward a h.1; want a h.1 -> nothing
a repeated forward does nothing
    FORWARD; forward a h.1 -> taken a h.1; computed -> want x h.1; forward a h.1 -> taken a h.1
a forward that comes again after its end is refused
    TAKEN; backward x h.1; computed -> backward a h.1; want a h.1 -> drop a h.1; forward a h.1 -> drop a h.1
a forward that comes again by another path is refused
    FORWARD; want b h.1 -> drop b h.1; forward b h.1 -> drop b h.1
a repeated backward does nothing
    TAKEN; backward x h.1 -> compute backward h.1; backward x h.1 -> nothing; computed -> backward a h.1;
    backward x h.1 -> nothing; num_tokens -> 10
a backward from elsewhere does nothing
    TAKEN; backward y h.1 -> nothing; backward x h.1 -> compute backward h.1

# asking

a neighbour without room: the next one is asked, and the first with room gets it
    ASKING; wait x h.1 -> want y h.1; wait y h.1 -> nothing; credit x h.1 -> forward x h.1, lost y h.1
a neighbour that refuses is not waited for
    ASKING; drop x h.1 -> want y h.1; credit y h.1 -> forward y h.1
all neighbours refuse: the room is needed for others
    ASKING; drop x h.1 -> want y h.1; drop y h.1 -> lost a h.1; is_idle -> yes
a neighbour that says nothing is not waited for
    ASKING; at {ASK_PATIENCE_S} -> want y h.1; credit x h.1 -> forward x h.1, lost y h.1
all are asked again
    ASKING; wait x h.1 -> want y h.1; wait y h.1; at 4 -> nothing; at {ASK_AGAIN_S} -> want x h.1
a second credit is given back
    ASKING; wait x h.1 -> want y h.1; credit y h.1 -> forward y h.1, lost x h.1; credit x h.1 -> lost x h.1
a credit for what is not here is given back
    credit x h.1 -> lost x h.1
a credit of a neighbour that was not asked is given back
    ASKING; credit y h.1 -> lost y h.1
without neighbours a microbatch waits for one
    neighbours; want a h.1; forward a h.1; computed -> nothing; at 2; neighbours y -> want y h.1
a want to a former neighbour is taken back when all are asked again
    ASKING; neighbours y; at {ASK_PATIENCE_S} -> want y h.1; at {ASK_AGAIN_S} -> lost x h.1, want y h.1
four are under way at a time, in their order
    begin 1 4 6; ASKING; want a h.2; forward a h.2; computed -> want x h.2; want a h.3; forward a h.3;
    computed -> want x h.3; want a h.4; forward a h.4; computed -> want x h.4; want a h.5; forward a h.5;
    computed -> nothing; want a h.6; forward a h.6; computed -> nothing; credit x h.1 -> forward x h.1;
    taken x h.1 -> want x h.5; credit x h.2; lost x h.2 -> lost a h.2, want x h.6
TAKEN is the word of the receiver alone
    SENT; taken y h.1 -> nothing; closed x -> want y h.1
before TAKEN another replica is drawn
    SENT; drop x h.1 -> want y h.1; taken x h.1 -> nothing; backward x h.1 -> nothing; credit y h.1 -> forward y h.1

# death and loss

a receiver dies before TAKEN: another one is drawn
    SENT; closed x -> want y h.1; credit y h.1 -> forward y h.1
a receiver dies after TAKEN: lost upstream
    TAKEN; closed x -> lost a h.1; is_idle -> yes; num_tokens -> 0
a later stage has lost it
    TAKEN; lost x h.1 -> lost a h.1; is_idle -> yes
only the neighbour that has it can lose it
    TAKEN; lost y h.1 -> nothing; backward x h.1 -> compute backward h.1
a loss may overtake the answer to its forward
    SENT; lost x h.1 -> lost a h.1
the sender dies before it sends
    begin 1 4 1; want a h.1; want a h.2; want b h.3 -> wait b h.3; closed a -> credit b h.3; forward b h.3
the sender dies while its microbatch is here: all before give it up
    ASKING; closed a -> lost x h.1; is_idle -> yes
the sender dies while its microbatch is further on: the gradients are valid here
    TAKEN; closed a -> nothing; backward x h.1 -> compute backward h.1; computed -> nothing; num_tokens -> 10
the head dies
    begin 3 4; want a h.1; forward a h.1; computed -> forward h h.1; closed h -> lost a h.1
the head has given it up
    begin 3 4; want a h.1; forward a h.1; computed -> forward h h.1; drop h h.1 -> lost a h.1; is_idle -> yes
a microbatch expires
    TAKEN; at 61 -> lost a h.1; backward x h.1 -> nothing; is_idle -> yes
a backward that is here does not expire
    TAKEN; backward x h.1 -> compute backward h.1; at 61 -> nothing; computed -> backward a h.1
a microbatch is lost while its forward is computed
    FORWARD; closed a -> nothing; computed -> nothing; is_idle -> yes
out of memory in a backward discards this microbatch alone
    TAKEN; want b i.1; forward b i.1; backward x h.1; computed; failed -> lost a h.1; num_tokens -> 0;
    credit x i.1 -> forward x i.1; taken x i.1; backward x i.1 -> compute backward i.1;
    computed -> backward b i.1; num_tokens -> 10
a damaged backward
    TAKEN; damaged_backward x h.1 -> lost a h.1; is_idle -> yes

# steps

a rise of the median closes a step
    count 4; want a h.1 0.1 -> credit a h.1, close 40 at 0.1; num_tokens -> 0
no task runs while a step closes
    count 4; want a h.1 0.1; forward a h.1 -> taken a h.1; step_closed -> compute forward h.1
a step closes when the task that runs is over
    TAKEN; count 4; backward x h.1; want a h.2 0.1 -> credit a h.2; computed -> backward a h.1, close 50 at 0.1
a rise by several steps closes one
    count 4; want a h.1 0.3 -> credit a h.1, close 40 at 0.3; step_closed -> nothing
less than half a batch waits for the next mark
    count 1; want a h.1 0.1 -> credit a h.1; count 1; want a h.2 0.2 -> credit a h.2, close 20 at 0.2
the median is over one vote a head
    count 4; want a h.1 0; want a i.1 0 -> credit a i.1; want a h.2 0.2 -> wait a h.2; want a h.3 0.2 -> wait a h.3;
    want a i.2 0.1 -> wait a i.2, close 40 at 0.1
a head that is not heard from has no vote
    count 4; want a h.1 0; want a i.1 0.1; at {VOTE_S - 1}; lost a h.1; want a i.2 0.1; lost a i.1;
    lost a i.2; at {VOTE_S + 1} -> close 40 at 0.1
a head that pauses or leaves has no vote from then on
    count 4; want a h.1 0; want a i.1 0.1; away a h.2 0 -> tell all but a 0, close 40 at 0.1
a head that comes back votes again, and the time of its pause does not count
    want a h.1 0; at 1; want a h.2 0; away a h.3 0; at 500; count 4; want a h.4 0; want a i.1 0.1;
    at {500 + SHORTEST_VOTE_S} -> nothing; at {501 + SHORTEST_VOTE_S} -> close 40 at 0.1
what was on its way when a head left is no vote
    count 4; away a h.3 0 -> tell all but a 0; want a i.1 0.1 -> credit a i.1, close 40 at 0.1; step_closed; count 4;
    want a h.2 0 -> credit a h.2; want a i.2 0.2 -> wait a i.2, close 40 at 0.2
that a head leaves is passed on once
    away a h.2 0.5 -> tell all but a 0.5; away b h.2 0.5 -> nothing; away b h.1 0.5 -> nothing
nobody makes a head leave with the ticket of one of its microbatches
    count 4; want a h.1 0; want a i.1 0.1; mark a h.2 0 -> nothing
without the heads that left, what remains has finished
    want a h.1 0.9; lost a h.1; mark a i.1 -> tell all but a 1; is_over -> no; away a h.2 0.9 -> tell all but a 0.9;
    is_over -> yes
a mark that was overtaken is no vote
    count 4; want a h.2 0.1 -> credit a h.2, close 40 at 0.1; step_closed; count 4; want a h.1 0 -> credit a h.1;
    want a h.3 0.1 -> wait a h.3
a median that fell rises again
    count 4; want a h.1 0.2 -> credit a h.1, close 40 at 0.2; step_closed; count 4; want a i.1 0 -> credit a i.1;
    want a i.2 0.1 -> wait a i.2, close 40 at 0.2
at four batches a head that is ahead waits, and no other
    want a h.1 0; want b i.1 0.1; lost a h.1; lost b i.1; count 16; want b i.2 0.1 -> wait b i.2;
    want a h.2 0 -> credit a h.2; want a h.3 0.1 -> credit b i.2, wait a h.3, close 160 at 0.1
behind stage 1 nobody waits for marks
    begin 2 4; want a h.1 0; want b i.1 0.1; lost a h.1; lost b i.1; count 16; want b i.2 0.1 -> credit b i.2
the end of training closes what there is
    count 1; want a h.1 0.9 -> credit a h.1; lost a h.1; mark a h.2 -> tell all but a 1, close 10 at 1; is_over -> no;
    step_closed -> nothing; is_over -> yes
a final mark is passed on once
    mark a h.2 -> tell all but a 1; mark b h.2 -> nothing
after the end the others are served
    mark a h.2; mark a i.2; want b j.1 0.9 -> credit b j.1; is_over -> no;
    forward b j.1 -> taken b j.1, compute forward j.1; computed; closed b; is_over -> no;
    at {VOTE_S + 1}; is_over -> yes

# heads that are not listed

invented heads have no vote, and nobody hears of them
    count 4; want a h.1 0.1 -> credit a h.1, close 40 at 0.1; step_closed; mark a u.1 -> nothing; mark a v.1 -> nothing;
    mark a w.1 -> nothing; away a u.2 0.2 -> nothing; count 4; want a h.2 0.2 -> credit a h.2, close 40 at 0.2
a microbatch or evaluation of an invented head gets no slot
    want a u.1 -> drop a u.1; evaluation a u.1 -> drop a u.1; want a h.1 -> credit a h.1
a head counts from its next frame on once its record is seen
    want a u.1 0.1 -> drop a u.1; mark a u.1 -> nothing; list u; count 4;
    want a u.1 0.1 -> credit a u.1, close 40 at 0.1; step_closed; mark a u.2 -> tell all but a 1
no vote outlives the record of its head
    want a h.1 0; want a i.1 0.1; lost a h.1; lost a i.1; count 4; unlist h; at 1 -> close 40 at 0.1
no final vote outlives the record of its head
    want a h.1 0.1; lost a h.1; mark a i.1 -> tell all but a 1; unlist i; at {VOTE_S + 1}; count 4;
    want a h.2 0.2 -> credit a h.2, close 40 at 0.2
the end is not forgotten when the last head goes
    TAKEN; count 4; backward x h.1; mark a h.2 -> tell all but a 1; unlist h; computed -> backward a h.1, close 50 at 1
    step_closed; is_over -> yes

# evaluation

an evaluation has no backward, and its mark is no vote
    count 4; evaluation a h.1 -> credit a h.1; forward a h.1 -> taken a h.1, compute forward h.1;
    computed -> want y h.1; credit y h.1 -> forward y h.1; taken y h.1 -> nothing; is_idle -> yes
an evaluation waits for its path
    evaluation a h.1; forward a h.1; computed -> want y h.1; wait y h.1 -> nothing; at 2 -> nothing;
    credit y h.1 -> forward y h.1; drop y h.1 -> lost a h.1

# leaving

a replica that leaves finishes what it has
    FULL; want b h.3 -> wait b h.3; leave -> drop b h.3; want b h.4 -> drop b h.4; is_idle -> no;
    credit x h.2 -> forward x h.2; backward x h.1; computed; taken x h.2; backward x h.2;
    computed -> backward a h.2; is_idle -> yes
a replica that comes back takes what is new
    leave -> nothing; want a h.1 -> drop a h.1; rejoin -> nothing; want a h.2 -> credit a h.2
a replica that leaves keeps its promises
    want a h.1 -> credit a h.1; leave -> nothing; forward a h.1 -> taken a h.1, compute forward h.1
""",
    BEGINNINGS,
)


@pytest.mark.parametrize("steps", TABLE.values(), ids=TABLE)
def test_a_row(steps: list[str]) -> None:
    play(ReplicaBench, steps)


def test_each_hop_subtracts_the_time_that_it_held_a_microbatch() -> None:
    row = "want a h.1; at 5; forward a h.1 50; at 12; computed; at 20; credit x h.1"
    bench = play(ReplicaBench, row.split("; "))
    want = next(frame for frame in bench.frames if isinstance(frame, Want))
    (forward,) = [frame for frame in bench.frames if isinstance(frame, Forward)]
    assert want.ticket == ticket("h.1", 0.0)
    assert want.sinks == ("y", "z")
    assert (want.remaining_s, forward.remaining_s) == pytest.approx((43.0, 35.0))


def test_the_backward_recomputes_from_the_input_as_it_was_received() -> None:
    bench = play(ReplicaBench, [*BEGINNINGS["TAKEN"].split("; "), "backward x h.1"])
    assert (bench.tasks[-1].data, bench.tasks[-1].received) == ("input h.1", "gradient h.1")


def test_wants_of_one_neighbour_are_bounded() -> None:
    row = ["want a h.1", "want a h.2"]
    row += [f"want a h.{number} -> wait a h.{number}" for number in range(3, 3 + MAX_WANTS_PER_PEER)]
    play(ReplicaBench, [*row, "want a h.1000 -> drop a h.1000", "want b h.1001 -> wait b h.1001"])


def test_what_a_neighbour_says_about_a_microbatch_is_bounded() -> None:
    row = [*BEGINNINGS["FORWARD"].split("; "), *["backward x h.1", "taken x h.1"] * (10 * MAX_MAIL)]
    play(ReplicaBench, [*row, f"mail h.1 -> {MAX_MAIL}"])


def test_a_want_with_too_many_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = tuple(f"z{i}" for i in range(MAX_SINKS + 1))
    monkeypatch.setitem(FRAMES, "want", lambda id: Want(ticket(id, 0.0), 60.0, sinks))
    play(ReplicaBench, ["want a h.1 -> drop a h.1"])


@pytest.mark.parametrize(("batch_size", "most", "rooms"), [(80, 100, 20), (80, 7, 7), (1, 0, 1), (80, None, 20)])
def test_room_is_a_quarter_of_a_batch_or_what_memory_holds(batch_size: int, most: int | None, rooms: int) -> None:
    assert num_rooms(spec_of(2, batch_size=batch_size), most=most) == rooms


def test_an_evaluation_takes_one_path() -> None:
    routing, peers = Routing(random.Random(0)), ["x", "y", "z", "w"]
    orders = {tuple(routing.order(peers, ticket(f"h.{i}", 0.0, is_training=False))) for i in range(10)}
    assert len(orders) == 1
    firsts = {routing.order(peers, ticket(f"h{i}.1", 0.0, is_training=False))[0] for i in range(50)}
    assert firsts == set(peers)


def test_random_routing_asks_each_neighbour_first_equally_often() -> None:
    routing = Routing(random.Random(0))
    firsts = [routing.order({"x", "y", "z"}, ticket("h.1", 0.0))[0] for _ in range(3000)]
    assert all(abs(firsts.count(peer) - 1000) < 120 for peer in "xyz")


def test_fast_routing_asks_in_proportion_to_the_measured_rate() -> None:
    routing = Routing(random.Random(0), "fast")
    for _ in range(30):
        routing.measured("x", 1.0)
        routing.measured("y", 3.0)
    firsts = [routing.order({"x", "y"}, ticket("h.1", 0.0))[0] for _ in range(4000)]
    assert abs(firsts.count("x") - 3000) < 150


def test_a_few_of_those_who_live_are_kept_while_they_do() -> None:
    neighbours = Few(random.Random(0), most=3)
    neighbours.update({"a", "b"})
    assert sorted(neighbours.chosen) == ["a", "b"]
    neighbours.update({"a", "b", "c", "d", "e"})
    first = neighbours.chosen
    assert len(first) == 3
    assert {"a", "b"} < set(first)
    neighbours.update({"a", "b", "c", "d", "e"})
    assert neighbours.chosen == first
    neighbours.update({"b", "d", "e"})
    assert sorted(neighbours.chosen) == ["b", "d", "e"]
    neighbours.update(set())
    assert neighbours.chosen == ()


def test_one_place_is_drawn_anew_so_that_each_peer_is_met_in_time() -> None:
    everybody = {f"peer-{number}" for number in range(12)}
    neighbours, met = Few(random.Random(0), most=4), set[str]()
    for _ in range(100):
        neighbours.update(everybody)
        assert len(neighbours.chosen) == 4
        met.update(neighbours.chosen)
        neighbours.drop_one()
        assert len(neighbours.chosen) == 3
    assert met == everybody
