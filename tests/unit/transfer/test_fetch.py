"""The first fetch in memory uses as many donors as it needs, keeps only verified chunks, and fetches none twice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from admitting import admission_of
from harness.specs import published

from noloco_p2p.errors import Refused, Unreachable
from noloco_p2p.gossip.frames import (
    STATE_CHUNK_BYTES,
    FetchItem,
    FetchWant,
    Hello,
    PeerStatus,
    RefuseCode,
    SpecJson,
    StateChunk,
    StateManifest,
    WantChunks,
    WantManifest,
)
from noloco_p2p.gossip.seams import Candidate, FrameStream
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.memory import MemoryNetwork, MemoryTransport
from noloco_p2p.transfer import fetch
from noloco_p2p.transfer.donor import StateServer, describe_state
from noloco_p2p.transfer.fetch import fetch_spec, fetch_state

SPEC = RunSpec(name="fetch", outer=published())
NUM_BYTES = 3 * STATE_CHUNK_BYTES + 500  # four chunks
Alter = Callable[[AsyncGenerator[FetchItem]], AsyncGenerator[FetchItem]]  # changes what a donor serves


class Donor:
    """Serves a state; `alter` wraps the items that it serves."""

    def __init__(self, states: StateServer, alter: Alter) -> None:
        self._states = states
        self._alter = alter
        self.asked: list[FetchWant] = []

    def admit(self, hello: Hello) -> None: ...

    async def on_swap(self, stream: FrameStream) -> None: ...

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        raise Unreachable("not asked here")

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        self.asked.append(want)
        return self._alter(self._states.serve(want))


def as_it_is(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
    return items


async def breaks_after_two_chunks(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
    num_chunks = 0
    async for item in items:
        if isinstance(item, StateChunk):
            num_chunks += 1
            if num_chunks > 2:
                raise Unreachable("the connection broke")
        yield item


def dies_after_two_chunks() -> Alter:
    is_dead = False

    async def alter(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
        nonlocal is_dead
        if is_dead:
            raise Unreachable("the donor is dead")
        try:
            async for item in breaks_after_two_chunks(items):
                yield item
        except Unreachable:
            is_dead = True
            raise

    return alter


async def damages_the_second_chunk(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
    async for item in items:
        if isinstance(item, StateChunk) and item.index == 1:
            item = StateChunk(1, bytes(STATE_CHUNK_BYTES))
        yield item


async def sends_chunks_backwards(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
    for item in reversed([item async for item in items]):
        yield item


async def stops_early(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
    async for item in items:
        if not isinstance(item, StateChunk) or item.index == 0:
            yield item


async def sends_nothing(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
    async for _ in items:
        return
    yield SpecJson(b"")


class Fetching:
    """A newcomer and its donors on a MemoryNetwork."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork()
        self.transport = MemoryTransport(self.network, lambda: Hello("newcomer", SPEC.name, SPEC.digest()))
        self.donors: list[Donor] = []

    def donor(
        self,
        seed: int,
        alter: Alter = as_it_is,
        *,
        progress: float | None = None,
    ) -> tuple[Donor, bytes]:
        data = bytes([seed]) + os.urandom(NUM_BYTES - 1)
        path = self.folder / f"state-{seed}"
        path.write_bytes(data)
        states = StateServer(SPEC)
        progress = seed / 10 if progress is None else progress
        states.saved = describe_state(path, layout="layout", num_elements=10, progress=progress)
        donor = Donor(states, alter)
        self.donors.append(donor)
        self.network.add(f"donor-{seed}", donor)
        return donor, data

    def candidates(self) -> Sequence[Candidate]:
        return [Candidate(peer, address=peer) for peer in self.network.listed]

    async def fetch(self, **changes: object) -> tuple[StateManifest | None, bytes]:
        settings: dict[str, Any] = {"target": self.folder / "fetched", **changes}
        admission = admission_of(SPEC, self.transport, num_bytes=NUM_BYTES)
        for name in settings.keys() & vars(admission).keys():
            setattr(admission, name, settings.pop(name))
        donors = settings.pop("donors", self.candidates())
        manifest = await fetch_state(self.transport, donors, admission, **settings)
        return manifest, settings["target"].read_bytes()

    def run(self, **changes: object) -> tuple[StateManifest | None, bytes]:
        return asyncio.run(self.fetch(**changes))


@pytest.fixture
def fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    monkeypatch.setattr(fetch, "RETRY_S", (0.01, 0.01))
    monkeypatch.setattr(fetch, "WINDOW_S", 9.0)
    return Fetching(tmp_path)


def test_verified_chunks_are_kept_when_a_donor_dies_and_the_rest_comes_from_another(fetching: Fetching) -> None:
    (_, first), (second_donor, second) = fetching.donor(1, dies_after_two_chunks()), fetching.donor(2)
    manifest, fetched = fetching.run()
    kept = 2 * STATE_CHUNK_BYTES
    assert fetched == first[:kept] + second[kept:]
    assert manifest is not None
    assert manifest.progress == 0.2, "the place in the run is that of the last donor"
    assert [want.indices for want in second_donor.asked if isinstance(want, WantChunks)] == [(2, 3)], "nothing twice"


def test_a_donor_whose_connection_broke_is_asked_again_for_the_rest(fetching: Fetching) -> None:
    donor, data = fetching.donor(1, breaks_after_two_chunks)
    assert fetching.run()[1] == data
    assert [want.indices for want in donor.asked if isinstance(want, WantChunks)] == [(0, 1, 2, 3), (2, 3)]


@pytest.mark.parametrize("alter", [damages_the_second_chunk, sends_chunks_backwards, stops_early, sends_nothing])
def test_what_a_bad_donor_sends_is_not_kept(fetching: Fetching, alter: Alter) -> None:
    (_, first), (_, second) = fetching.donor(1, alter), fetching.donor(2)
    manifest, fetched = fetching.run()
    assert manifest is not None
    for start in range(0, NUM_BYTES, STATE_CHUNK_BYTES):
        chunk = fetched[start : start + STATE_CHUNK_BYTES]
        assert chunk in (first[start : start + STATE_CHUNK_BYTES], second[start : start + STATE_CHUNK_BYTES])


@pytest.mark.parametrize(
    "changes", [{"layout": "other"}, {"num_elements": 11}, {"num_bytes": NUM_BYTES + 1}], ids=lambda c: next(iter(c))
)
def test_a_state_of_another_model_is_refused_before_a_chunk_is_asked_for(
    fetching: Fetching, changes: dict[str, object]
) -> None:
    donor, _ = fetching.donor(1)
    manifest, _ = fetching.run(**changes)
    assert manifest is None
    assert [type(want) for want in donor.asked] == [WantManifest]


def test_a_chunk_longer_than_its_place_is_refused_though_its_digest_fits(fetching: Fetching) -> None:
    """Otherwise a donor whose manifest lies about the size of a chunk could overwrite the chunks behind it."""
    donor, _ = fetching.donor(1)
    path = fetching.folder / "long"
    path.write_bytes(bytes(2 * NUM_BYTES))
    longer = describe_state(path, layout="layout", num_elements=10, progress=0.5)
    digests = (longer.manifest.chunk_digests[-1], *longer.manifest.chunk_digests[:3])
    lying = replace(longer.manifest, num_bytes=NUM_BYTES, chunk_digests=digests)

    async def serve(want: FetchWant) -> AsyncGenerator[FetchItem]:
        if isinstance(want, WantManifest):
            yield lying
        else:
            yield StateChunk(0, bytes(2 * NUM_BYTES - 6 * STATE_CHUNK_BYTES))

    donor._states.serve = serve  # type: ignore[method-assign,assignment]
    manifest, fetched = fetching.run()
    assert manifest is None
    assert len(fetched) == NUM_BYTES


# the spec


def test_the_spec_comes_from_the_first_donor_that_has_the_right_one(fetching: Fetching) -> None:
    async def another_spec(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
        async for _ in items:
            yield SpecJson(RunSpec(name="other", outer=published()).canonical_json())

    fetching.donor(1, another_spec)
    fetching.network.listed["dead"] = None
    fetching.donor(2)
    fetched = asyncio.run(fetch_spec(fetching.transport, fetching.candidates(), expected_digest=SPEC.digest()))
    assert fetched == SPEC


def test_without_a_donor_every_reason_is_told(fetching: Fetching) -> None:
    fetching.network.listed["dead-1"] = fetching.network.listed["dead-2"] = None
    with pytest.raises(Unreachable, match=r"dead-1.*dead-2"):
        asyncio.run(fetch_spec(fetching.transport, fetching.candidates(), expected_digest=SPEC.digest()))


class Clock:
    """A clock that advances with each chunk of a donor."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sends(self, bytes_per_s: float) -> Alter:
        async def alter(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
            async for item in items:
                self.now_s += STATE_CHUNK_BYTES / bytes_per_s if isinstance(item, StateChunk) else 0.0
                yield item

        return alter


def refused_first(number: int) -> Alter:
    """Return a wrapper that refuses the given number of chunk requests as busy."""
    refusals = iter(range(number))

    async def alter(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, StateChunk) and next(refusals, None) is not None:
                    raise Refused("I am already serving 2 newcomers", code=RefuseCode.BUSY.name)
                yield item

    return alter


def test_a_newcomer_goes_to_a_free_donor_before_it_waits(fetching: Fetching) -> None:
    (busy, _), (_, free) = fetching.donor(1, refused_first(3)), fetching.donor(2)
    assert fetching.run()[1] == free
    assert len(busy.asked) == 2


def test_busy_donors_are_asked_again(fetching: Fetching, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "noloco_p2p")
    (_, first), (_, second) = fetching.donor(1, refused_first(3)), fetching.donor(2, refused_first(3))
    assert fetching.run()[1] in (first, second)
    assert caplog.text.count("waiting until one has a free slot") == 1


def test_who_comes_to_the_swarm_meanwhile_is_asked_too(fetching: Fetching) -> None:
    busy, _ = fetching.donor(1, refused_first(1000))
    donors = fetching.candidates()
    _, free = fetching.donor(2)
    assert fetching.run(donors=donors, live=fetching.candidates)[1] == free
    assert len(busy.asked) == 2


def test_one_that_is_always_busy_does_not_keep_a_newcomer_from_the_others(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other donor has no state at first, as at the beginning of a run."""
    monkeypatch.setattr(fetch, "FAILED_RETRY_S", 0.05)
    first = iter([True])

    async def has_none_at_first(items: AsyncGenerator[FetchItem]) -> AsyncGenerator[FetchItem]:
        async for item in items:
            if next(first, None):
                raise Refused("I have no saved state yet", code=RefuseCode.NO_STATE.name)
            yield item

    (_, data), _ = fetching.donor(1, has_none_at_first), fetching.donor(2, refused_first(1000))
    assert fetching.run()[1] == data


def test_donors_that_stay_busy_are_given_up_where_the_caller_has_no_deadline(fetching: Fetching) -> None:
    fetching.donor(1, refused_first(1000))
    assert fetching.run(patience_s=0.05)[0] is None


@pytest.mark.parametrize(("first_rate", "is_left"), [(0.2e6, True), (0.3e6, False)])
def test_a_slow_donor_is_left_for_one_that_may_be_faster(fetching: Fetching, first_rate: float, is_left: bool) -> None:
    """A donor that was not asked counts as one of 1 MB/s."""
    clock = Clock()
    (slow, first), (_, second) = fetching.donor(1, clock.sends(first_rate)), fetching.donor(2)
    fetched = fetching.run(clock=clock)[1]
    kept = 3 * STATE_CHUNK_BYTES if is_left else NUM_BYTES
    assert fetched == first[:kept] + second[kept:], "what it gave in one window is kept"
    assert len(slow.asked) == 2


def test_a_slow_donor_is_used_while_there_is_no_other(fetching: Fetching) -> None:
    clock = Clock()
    (slow, data), _ = fetching.donor(1, clock.sends(0.01e6)), fetching.donor(2, refused_first(1000))
    assert fetching.run(clock=clock)[1] == data
    assert len(slow.asked) > 2, "it was left, and asked again while the other was busy"


def test_more_chunks_than_one_call_may_ask_for_take_several(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "CHUNKS_PER_CALL", 3)
    donor, data = fetching.donor(1)
    assert fetching.run()[1] == data
    assert [want.indices for want in donor.asked if isinstance(want, WantChunks)] == [(0, 1, 2), (3,)]


def test_a_newcomer_that_starts_again_asks_only_for_what_it_lacks(fetching: Fetching) -> None:
    _, first = fetching.donor(1, dies_after_two_chunks())
    assert fetching.run()[0] is None
    fetching.network.remove("donor-1")
    second_donor, second = fetching.donor(2)
    told: list[int] = []
    manifest, fetched = fetching.run(on_progress=lambda done, _: told.append(done))
    assert manifest is not None
    kept = 2 * STATE_CHUNK_BYTES
    assert fetched == first[:kept] + second[kept:]
    assert told[0] == kept
    assert [want.indices for want in second_donor.asked if isinstance(want, WantChunks)] == [(2, 3)]
    assert not list(fetching.folder.glob("*.digests"))


@pytest.mark.parametrize("spoil", ["torn", "old", "other size"])
def test_what_was_kept_is_not_trusted_when_it_is_torn_or_old(fetching: Fetching, spoil: str) -> None:
    fetching.donor(1, dies_after_two_chunks())
    fetching.run()
    fetching.network.remove("donor-1")
    target, digests = fetching.folder / "fetched", fetching.folder / "fetched.digests"
    if spoil == "torn":
        with target.open("r+b") as file:
            file.write(b"torn")
    elif spoil == "old":
        os.utime(digests, (0, 0))
    else:
        os.truncate(target, NUM_BYTES - 1)
    second_donor, second = fetching.donor(2)
    _, fetched = fetching.run()
    asked = [want.indices for want in second_donor.asked if isinstance(want, WantChunks)]
    assert asked == [(0, 2, 3) if spoil == "torn" else (0, 1, 2, 3)]
    assert fetched[:STATE_CHUNK_BYTES] == second[:STATE_CHUNK_BYTES]


def test_a_donor_that_saved_before_it_caught_up_is_passed_over(fetching: Fetching) -> None:
    """The donor's progress is up to date, but its saved state is from before it caught up."""
    fetching.donor(1, progress=0.2)
    _, data = fetching.donor(2, progress=0.6)
    manifest, fetched = fetching.run(newer_than=0.2)
    assert manifest is not None
    assert (manifest.progress, fetched) == (0.6, data)
    assert fetching.run(newer_than=0.6)[0] is None
