"""A peer notices that it is behind from records, and from calls, as a record may be old in a short run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.errors import Left, ModelError, Refused, TimedOut, Unreachable
from noloco_p2p.gossip.frames import LayoutJson, PeerStatus, StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.peer import membership
from noloco_p2p.peer.membership import Membership
from noloco_p2p.peer.network_thread import NetworkThread
from noloco_p2p.presets import PRESETS
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.transfer.fetch import Admission

SPEC = PRESETS["tiny"]
OWN = 0.1
LAYOUT = ModelLayout((("weight", (3, 4)),))
NEAR, FAR = OWN + 0.9 * SPEC.furthest, OWN + 1.1 * SPEC.furthest


class Others:
    """Peers whose answers may differ from their records; one of them does not answer."""

    def __init__(self, *, recorded: float, told: float) -> None:
        self.candidates = [Candidate(name, f"{name}:1", progress=recorded) for name in ("a", "b", "silent")]
        self.told = told
        self.num_asked = self.num_fetches = 0
        self.stage: int | None = None
        self.layout = LAYOUT

    async def wait_for_peers(self, timeout_s: float) -> None:
        """Return at once, as the peers are known."""

    def live(self) -> list[Candidate]:
        outbound = [replace(each, peer_id="outbound", can_be_called=False) for each in self.candidates[:1]]
        return self.candidates + outbound

    mates = live

    def reached(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Need a running loop, as `Tunnels` does when it creates a task for a missing tunnel."""
        asyncio.get_running_loop()
        return [replace(each, can_be_called=True) if each.peer_id == "relayed" else each for each in candidates]

    async def fetch(self, candidate: Candidate, want: object, *, timeout_s: float) -> AsyncGenerator[LayoutJson]:
        if candidate.peer_id == "silent":
            raise TimedOut("no answer", peer="silent")
        yield LayoutJson(self.layout.as_json())

    async def status(self, candidate: Candidate, *, timeout_s: float) -> PeerStatus:
        self.num_asked += 1
        if candidate.peer_id == "silent":
            raise TimedOut("no answer", peer="silent")
        return PeerStatus(cast(Any, None), "training", self.told)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nobody between two tries."""
    monkeypatch.setattr(membership, "ASK_AGAIN_S", 0.0)


Fetch = Callable[..., Coroutine[Any, Any, StateManifest | None]]


def asked_of(others: Others, *, is_told_stale: bool, num_tries: int = 1) -> list[Candidate]:
    """Return the peers whose state this peer would fetch."""
    found: list[Candidate] = []

    async def fetch(transport: object, donors: list[Candidate], *_: object, **rest: Any) -> None:
        found.extend(donors)

    catch_up(others, is_told_stale=is_told_stale, num_tries=num_tries, fetch=fetch)
    return found


def catch_up(others: Others, *, num_tries: int = 1, is_told_stale: bool = False, fetch: Fetch) -> None:
    """Try to catch up, without getting a state."""
    with membership_to(others, is_told_stale=is_told_stale, fetch=fetch) as made:
        for _ in range(num_tries):
            assert made.catch_up(progress=OWN, target=Path("nowhere")) is None
            if made._asked:
                futures.wait([made._asked], 10.0)


@contextmanager
def membership_to(others: Others, *, is_told_stale: bool = False, fetch: Fetch) -> Iterator[Membership]:
    thread = NetworkThread()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(membership, "fetch_state", fetch)
            network = SimpleNamespace(
                spec=SPEC,
                thread=thread,
                target=SPEC,
                transport=others,
                expects_others=True,
                progress=Progress(),
                leaving=threading.Event(),
                directory=others,
                live_peers=others,
                states=SimpleNamespace(layout=LAYOUT),
                service=SimpleNamespace(take_refused_as_stale=lambda: is_told_stale),
            )
            yield Membership(cast(Any, network))
    finally:
        thread.stop()


def test_what_the_records_say_is_believed_without_a_call() -> None:
    others = Others(recorded=FAR, told=FAR)
    assert len(asked_of(others, is_told_stale=False)) == 3
    assert others.num_asked == 0
    assert not asked_of(Others(recorded=NEAR, told=FAR), is_told_stale=False)


def test_one_of_two_peers_cannot_claim_that_the_swarm_is_far_ahead() -> None:
    others = Others(recorded=NEAR, told=NEAR)
    others.mates = lambda: [Candidate("honest", "", progress=NEAR), Candidate("liar", "", progress=1e9)]
    assert not asked_of(others, is_told_stale=False)


def test_who_is_reached_by_a_tunnel_alone_gives_its_state_to_the_thread_that_trains() -> None:
    others = Others(recorded=FAR, told=FAR)
    others.candidates = [Candidate("relayed", "", progress=FAR, can_be_called=False)]
    assert [donor.peer_id for donor in asked_of(others, is_told_stale=False)] == ["relayed"]


def test_who_was_refused_for_its_place_asks_where_the_others_are() -> None:
    donors = asked_of(Others(recorded=NEAR, told=FAR), is_told_stale=True, num_tries=5)
    assert {(donor.peer_id, donor.progress) for donor in donors} == {("a", FAR), ("b", FAR)}


def test_training_does_not_wait_for_those_who_are_asked() -> None:
    others, answered = Others(recorded=NEAR, told=NEAR), threading.Event()

    async def status(candidate: Candidate, *, timeout_s: float) -> PeerStatus:
        await asyncio.to_thread(answered.wait)
        raise TimedOut("no answer")

    others.status = status
    with membership_to(others, is_told_stale=True, fetch=cast(Any, None)) as made:
        assert made.catch_up(progress=OWN, target=Path("nowhere")) is None
        assert made._asked
        assert not made._asked.done()
        answered.set()


def test_one_refusal_moves_nobody() -> None:
    others = Others(recorded=NEAR, told=NEAR)
    assert not asked_of(others, is_told_stale=True, num_tries=5)
    assert others.num_asked == 3, "once, however often it is refused"


def test_training_does_not_wait_for_a_donor_without_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "CATCH_UP_TIMEOUT_S", 0.05)

    async def fetch(*_: object, **rest: object) -> None:
        await asyncio.Event().wait()

    catch_up(Others(recorded=FAR, told=FAR), num_tries=2, fetch=fetch)
    assert caplog.text.count("did not arrive within") == 1, "the second try is not at once"


def test_a_newcomer_with_another_model_learns_so_from_a_run_that_has_trained() -> None:
    """The peers refuse its layout in every call but the one for theirs, so they do not count as silent."""

    class Refusing(Others):
        async def status(self, candidate: Candidate, *, timeout_s: float) -> PeerStatus:
            raise Refused("another model", peer=candidate.peer_id, code="OTHER_MODEL", retry_after_s=60.0)

    others = Refusing(recorded=FAR, told=FAR)
    others.candidates = [Candidate("a", "a:1", progress=FAR)]
    others.layout = ModelLayout((("weight", (3, 5)),))

    async def fetch(*_: object, **rest: object) -> None:
        """No state fits."""

    with membership_to(others, fetch=fetch) as made, pytest.raises(ModelError, match="weight"):
        made._fetch_first(Path("nowhere"))


@pytest.mark.parametrize("stage", [None, 2])
def test_a_newcomer_waits_while_those_who_are_listed_are_dead(
    stage: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage that has been trained never restarts from its first weights; a whole model does when nobody is left."""
    others = Others(recorded=FAR, told=FAR)
    others.candidates = [Candidate("silent", "silent:1", progress=FAR)]
    others.stage = stage

    async def fetch(*_: object, **rest: object) -> None:
        others.num_fetches += 1
        if others.num_fetches == 3:  # the record has expired
            others.candidates = []

    with membership_to(others, fetch=fetch) as made:
        if stage is None:
            assert made._fetch_first(Path("nowhere")) is None
        else:
            with pytest.raises(Unreachable, match="the peers that held this stage are gone"):
                made._fetch_first(Path("nowhere"))
    assert others.num_fetches == 3
    assert caplog.text.count("no peer of the run is answering") == 1


@pytest.mark.parametrize("callable_", [True, False])
def test_a_newcomer_does_not_start_from_its_own_weights_while_the_run_trains(
    callable_: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record may say 0, because it is old. Nobody has a state to give, for example because a disk is full."""
    others = Others(recorded=0.0 if callable_ else FAR, told=FAR)
    others.candidates = [replace(each, can_be_called=callable_) for each in others.candidates]
    manifest = StateManifest("", 0, FAR, 0, ())

    async def fetch(transport: object, donors: object, admission: Admission, **rest: object) -> StateManifest | None:
        others.num_fetches += 1
        admission.refused["a"] = "I have no saved state yet"
        return manifest if others.num_fetches == 4 else None

    with membership_to(others, fetch=fetch) as made:
        if callable_:
            assert made._fetch_first(Path("nowhere")) is manifest
            assert caplog.text.count("I have no saved state yet") == 1, "it says once why it waits"
        else:
            threading.Timer(0.2, made._network.leaving.set).start()
            with pytest.raises(Left):
                made._fetch_first(Path("nowhere"))


def test_peers_that_begin_together_do_not_wait_for_each_other() -> None:
    async def fetch(*_: object, **rest: object) -> None:
        """Nobody has saved yet."""

    with membership_to(Others(recorded=0.0, told=0.0), fetch=fetch) as made:
        assert made._fetch_first(Path("nowhere")) is None


def test_a_state_arrives_while_the_model_is_built() -> None:
    manifest, is_built = StateManifest("", 0, FAR, 0, ()), threading.Event()

    async def fetch(*_: object, **rest: object) -> StateManifest:
        assert await asyncio.to_thread(is_built.wait, 30.0)
        return manifest

    async def enter() -> None:
        """Publish nothing."""

    with membership_to(Others(recorded=FAR, told=FAR), fetch=fetch) as made:
        made._network.enter = enter
        with made.fetching(LAYOUT, Path("nowhere")):
            assert made.is_fetching
            is_built.set()
            assert made.enter(layout=LAYOUT, target=Path("nowhere")) is manifest
            assert not made.is_fetching
        assert not made._network.leaving.is_set()


def test_a_state_is_no_longer_fetched_if_the_model_cannot_be_built() -> None:
    async def fetch(*_: object, **rest: object) -> None:
        await asyncio.get_running_loop().create_future()

    with membership_to(Others(recorded=FAR, told=FAR), fetch=fetch) as made:
        with pytest.raises(MemoryError, match="too large"), made.fetching(LAYOUT, Path("nowhere")):
            raise MemoryError("too large")
        assert not made.is_fetching
    assert not any(thread.name.startswith("noloco-fetch") for thread in threading.enumerate())
