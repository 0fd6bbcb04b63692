"""A donor serves its spec and its newest saved state: to two newcomers at a time, and never parts of two states."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from harness.specs import published

from noloco_p2p.errors import CorruptPayload, Refused, Unreachable
from noloco_p2p.gossip.frames import (
    STATE_CHUNK_BYTES,
    FetchItem,
    RefuseCode,
    SpecJson,
    StateChunk,
    WantChunks,
    WantManifest,
    WantSpec,
)
from noloco_p2p.spec import RunSpec
from noloco_p2p.transfer.donor import NUM_SLOTS, SAVING_S, STALLED_S, SavedState, StateServer, describe_state

SPEC = RunSpec(name="fetch", outer=published())
NUM_BYTES = 3 * STATE_CHUNK_BYTES + 500  # four chunks


async def listed(items: AsyncGenerator[FetchItem]) -> list[FetchItem]:
    return [item async for item in items]


def saved(folder: Path, num_bytes: int = NUM_BYTES, *, progress: float = 0.5) -> SavedState:
    path = folder / "state"
    path.write_bytes(os.urandom(num_bytes))
    return describe_state(path, layout="layout", num_elements=10, progress=progress)


def test_a_donor_without_a_state_says_when_to_come_back() -> None:
    with pytest.raises(Refused, match="no saved state yet") as refusal:
        asyncio.run(listed(StateServer(SPEC).serve(WantManifest())))
    assert refusal.value.retry_after_s > 0
    assert asyncio.run(listed(StateServer(SPEC).serve(WantSpec()))) == [SpecJson(SPEC.canonical_json())]


async def test_a_newcomer_waits_for_a_state_that_is_not_far_behind(tmp_path: Path) -> None:
    now_s, position = 0.0, 0.5
    states = StateServer(SPEC, position=lambda: position, clock=lambda: now_s)
    states.saved = old = saved(tmp_path)
    assert await listed(states.serve(WantManifest())) == [old.manifest]
    assert not states.take_wanted()
    position += SPEC.furthest
    for _ in range(2):
        with pytest.raises(Refused, match="saving a newer state") as refusal:
            await listed(states.serve(WantManifest()))
        assert refusal.value.code == RefuseCode.BUSY.name
    assert [states.take_wanted(), states.take_wanted()] == [True, False], "once for all newcomers"
    (tmp_path / "newer").mkdir()
    states.saved = newer = saved(tmp_path / "newer", progress=position)
    assert await listed(states.serve(WantManifest())) == [newer.manifest]
    position += SPEC.furthest
    with pytest.raises(Refused, match="saving a newer state"):
        await listed(states.serve(WantManifest()))
    assert states.take_wanted()
    now_s += SAVING_S + 1  # as on a full disk
    assert await listed(states.serve(WantManifest())) == [newer.manifest]
    assert not states.take_wanted()


async def test_early_in_a_run_a_newcomer_waits_for_a_state_that_is_not_from_its_start(tmp_path: Path) -> None:
    position = 0.0
    states = StateServer(SPEC, position=lambda: position)
    states.saved = first = saved(tmp_path, progress=0.0)
    assert await listed(states.serve(WantManifest())) == [first.manifest]
    position = SPEC.furthest / 10
    with pytest.raises(Refused, match="saving a newer state"):
        await listed(states.serve(WantManifest()))
    assert states.take_wanted()
    states.saved = newer = saved(tmp_path, progress=position)
    position *= 1.5
    assert await listed(states.serve(WantManifest())) == [newer.manifest]
    assert not states.take_wanted()


async def test_a_donor_that_never_saves_is_told_once_that_newcomers_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    position, now_s = 0.0, 0.0
    states = StateServer(SPEC, position=lambda: position, clock=lambda: now_s)

    async def refused() -> bool:
        with pytest.raises(Refused, match="no saved state yet"):
            await listed(states.serve(WantManifest()))
        return states.take_wanted()

    assert not await refused(), "at the start, newcomers begin with their own weights"
    position = 0.1
    assert [await refused(), await refused()] == [True, False]
    assert not caplog.text
    now_s = SAVING_S + 1
    assert [await refused(), await refused()] == [False, False]
    assert caplog.text.count("or call `save` if save_every_s=0") == 1
    states.saved = saved(tmp_path)
    assert not states.take_wanted()


async def test_a_third_newcomer_is_refused_until_a_slot_is_free(tmp_path: Path) -> None:
    states = StateServer(SPEC)
    states.saved = saved(tmp_path)
    want = WantChunks(states.saved.manifest.digest(), (0, 1))
    running = [states.serve(want) for _ in range(NUM_SLOTS)]
    for upload in running:
        assert isinstance(await anext(upload), StateChunk)
    with pytest.raises(Refused, match="already serving 2 newcomers") as refusal:
        await anext(states.serve(want))
    assert refusal.value.code == RefuseCode.BUSY.name
    assert refusal.value.retry_after_s > 0
    assert len(await listed(running[0])) == 1, "the second of its two chunks"
    assert [type(item) for item in await listed(states.serve(want))] == [StateChunk, StateChunk]
    async with aclosing(running[1]):
        pass  # a newcomer that leaves half-way
    assert [type(item) for item in await listed(states.serve(want))] == [StateChunk, StateChunk]


async def test_an_upload_that_takes_nothing_loses_its_slot_to_the_next_caller(tmp_path: Path) -> None:
    now_s = 0.0
    states = StateServer(SPEC, clock=lambda: now_s)
    states.saved = saved(tmp_path)
    want = WantChunks(states.saved.manifest.digest(), (0, 1, 2))
    stalled, other = states.serve(want), states.serve(want)
    await anext(stalled)
    await anext(other)
    now_s = STALLED_S - 1
    await anext(other)
    with pytest.raises(Refused, match="already serving"):
        await anext(states.serve(want))
    now_s = STALLED_S + 1
    third = states.serve(want)
    await anext(third)
    with pytest.raises(Refused, match="your slot went to another newcomer"):
        await anext(stalled)
    with pytest.raises(Refused, match="already serving"):
        await anext(states.serve(want))
    assert len(await listed(other)) == 1
    assert len(await listed(third)) == 2


async def test_a_newer_state_in_the_middle_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    states = StateServer(SPEC)
    states.saved = old = saved(tmp_path)
    (tmp_path / "newer").mkdir()
    old_data = old.path.read_bytes()
    upload = states.serve(WantChunks(old.manifest.digest(), (0, 1, 2, 3)))
    first = await anext(upload)
    states.saved = saved(tmp_path / "newer")
    old.path.unlink()  # as a newer checkpoint does
    chunks = [first, *await listed(upload)]
    assert b"".join(chunk.payload for chunk in chunks if isinstance(chunk, StateChunk)) == old_data
    with pytest.raises(Refused, match="newer state"):
        await listed(states.serve(WantChunks(old.manifest.digest(), (0,))))


def test_a_chunk_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    states = StateServer(SPEC)
    states.saved = saved(tmp_path)
    with pytest.raises(CorruptPayload, match="chunk 4 does not exist"):
        asyncio.run(listed(states.serve(WantChunks(states.saved.manifest.digest(), (0, 4)))))


@pytest.mark.parametrize("indices", [(0, 0), (0, 1, 0, 1), (2, 1)])
def test_no_chunk_is_asked_for_again_and_again(tmp_path: Path, indices: tuple[int, ...]) -> None:
    """A newcomer that repeats chunks would hold a slot forever."""
    states = StateServer(SPEC)
    states.saved = saved(tmp_path)
    with pytest.raises(CorruptPayload, match="ascending order"):
        asyncio.run(listed(states.serve(WantChunks(states.saved.manifest.digest(), indices))))


def test_a_state_file_that_vanished_is_told_in_words(tmp_path: Path) -> None:
    states = StateServer(SPEC)
    states.saved = saved(tmp_path)
    states.saved.path.unlink()
    with pytest.raises(Unreachable, match="cannot be read"):
        asyncio.run(listed(states.serve(WantChunks(states.saved.manifest.digest(), (0,)))))


@pytest.mark.parametrize("num_bytes", [0, 1, STATE_CHUNK_BYTES, STATE_CHUNK_BYTES + 1])
def test_a_manifest_covers_the_file_without_a_gap(tmp_path: Path, num_bytes: int) -> None:
    manifest = saved(tmp_path, num_bytes).manifest
    ranges = [manifest.chunk_range(index) for index in range(len(manifest.chunk_digests))]
    assert [byte for start, stop in ranges for byte in (start, stop)][::2] == list(
        range(0, num_bytes, STATE_CHUNK_BYTES)
    )
    assert sum(stop - start for start, stop in ranges) == manifest.num_bytes == num_bytes
