from __future__ import annotations

from noloco_p2p.swarm.dial_plan import ENOUGH_NEIGHBOURS, LONGEST_PAUSE_LOST_S, LOST_PEERS, DialPlan

BOOT = {"boot": ["/boot/1"]}
BOOK = {"b": ("/b/1",), "me": ("/me/1",)}


def plan() -> DialPlan:
    return DialPlan("me", BOOT, longest_pause_s=10.0)


def test_the_missing_are_due_bootstraps_first() -> None:
    assert plan().due(BOOK, [], now_s=0) == {"boot": ("/boot/1",), "b": ("/b/1",)}
    assert plan().due(BOOK, ["boot"], now_s=0) == {"b": ("/b/1",)}
    assert list(plan().due(BOOK, [], now_s=0, most=1)) == ["boot"]


def test_what_is_remembered_of_a_bootstrap_is_tried_too() -> None:
    assert plan().due({"boot": ("/boot/2", "/boot/1")}, [], now_s=0) == {"boot": ("/boot/1", "/boot/2")}


def test_a_bootstrap_is_tried_for_ever_with_a_bounded_pause() -> None:
    dialing, now_s, pauses_s = plan(), 0.0, []
    for _ in range(100):
        dialing.failed("boot", "refused", now_s=now_s)
        start_s = now_s
        while not dialing.due({}, [], now_s=now_s):
            now_s += 0.5
        pauses_s.append(now_s - start_s)
    assert pauses_s[:6] == [1, 2, 4, 8, 10, 10]
    assert max(pauses_s) == 10


def test_remembered_peers_are_tried_ever_more_rarely_but_for_those_lost_last() -> None:
    dialing, book = plan(), {f"old{n}": (f"/old/{n}",) for n in range(2 * LOST_PEERS)}
    for peer in ("boot", *book):
        for _ in range(100):
            dialing.failed(peer, "refused", now_s=0)
    lost, others = list(book)[:LOST_PEERS], list(book)[LOST_PEERS:]
    assert not dialing.due(book, ["boot"], now_s=LONGEST_PAUSE_LOST_S - 1)
    assert list(dialing.due(book, ["boot"], now_s=LONGEST_PAUSE_LOST_S)) == lost
    assert set(dialing.due(book, ["boot"], now_s=299, most=99)) == set(lost)
    assert set(dialing.due(book, ["boot"], now_s=300, most=99)) == {*lost, *others}


def test_with_many_neighbours_bootstraps_and_silent_peers_are_dialled() -> None:
    near = [f"n{n}" for n in range(ENOUGH_NEIGHBOURS)]
    assert list(plan().due(BOOK, near, heard_of=["b"], now_s=0)) == ["boot"]
    assert list(plan().due(BOOK, near, now_s=0)) == ["boot", "b"]
    assert list(plan().due(BOOK, [], heard_of=["b"], now_s=0)) == ["boot", "b"]


def test_one_that_answered_is_not_dialled_again_at_once() -> None:
    dialing = plan()
    dialing.reached("boot", now_s=0)
    assert dialing.due({}, [], now_s=9) == {}
    assert list(dialing.due({}, [], now_s=10)) == ["boot"]
    assert dialing.failures() == {}


def test_failures_are_told_until_the_bootstrap_is_there() -> None:
    dialing = plan()
    dialing.failed("boot", "refused", now_s=0)
    dialing.failed("b", "refused", now_s=0)
    assert dialing.failures() == {"boot": "refused"}
    dialing.due({}, ["boot"], now_s=0)
    assert dialing.failures() == {}


def test_those_that_the_book_has_forgotten_are_forgotten() -> None:
    made = plan()
    for number in range(100):
        peer = f"invented {number}"
        assert peer in made.due({peer: ("/x",)}, (), now_s=number)
        made.failed(peer, "closed", now_s=number)
    made.due({}, (), now_s=100.0)
    assert len(made._attempts) == 0


def test_after_a_restart_everybody_is_due() -> None:
    dialing = plan()
    dialing.failed("boot", "refused", now_s=0)
    assert dialing.due({}, [], now_s=0) == {}
    dialing.forget_failures()
    assert list(dialing.due({}, [], now_s=0)) == ["boot"]
