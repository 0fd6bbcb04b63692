"""Buckets of a swarm of any size are uniform and bounded, and all peers settle on the same depth by themselves."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType

import pytest
from harness.bucket_swarm import BucketSwarm, Member, Stored
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.swarm.buckets import (
    ALSO_SHALLOWER_BELOW,
    EVIDENCE,
    LINGER_S,
    LOOKS_THAT_AGREE,
    MAX_BUCKET_BYTES,
    MAX_DEPTH,
    ROOT,
    SPLIT_ABOVE,
    WINDOW_READS,
    Bucket,
    Census,
    Found,
    best_depth,
    bucket_of,
    buckets_at,
    random_bucket,
    run_key,
    within_limit,
)

DIGEST = "ab" * 32
clock_s = [0.0]


def census_at(depth: int = 0, *, finds: dict[int, list[int]] | None = None) -> Census:
    """Return a census of a peer that reads at a depth.

    `finds` has the numbers of peers that it finds at each depth, of which the last one repeats. They are announced only
    there.
    """
    left = {where: list(numbers) for where, numbers in (finds or {}).items()}

    async def read(buckets: Sequence[Bucket]) -> list[Found]:
        reads = []
        for bucket in buckets:
            numbers = left.get(bucket.depth, [0])
            number = numbers.pop(0) if len(numbers) > 1 else numbers[0]
            reads.append(Found({f"{bucket}-{each}": (bucket.depth,) for each in range(number)}))
        return reads

    clock_s[0] = 0.0
    made = Census(read, rng=random.Random(0), clock=lambda: clock_s[0])
    made.depth = depth
    return made


def count(census: Census, number: float) -> None:
    """Let a census read a bucket with this many peers."""
    census.took(census.next(), Found({"peer": (census.depth,)} if number else {}, share=1 / (number or 1)))


@given(st.text(max_size=60), st.integers(0, MAX_DEPTH - 1))
def test_a_bucket_lies_in_that_of_the_depth_above(peer_id: str, depth: int) -> None:
    outer, inner = bucket_of(peer_id, depth), bucket_of(peer_id, depth + 1)
    assert (outer.depth, inner.index >> 1) == (depth, outer.index)
    assert outer.holds(peer_id)
    assert inner.index < 1 << inner.depth


def test_keys_differ_by_run_depth_and_index() -> None:
    buckets = [bucket for depth in range(4) for bucket in buckets_at(depth)]
    assert len({bucket.key(run_key(digest)) for bucket in buckets for digest in (DIGEST, "cd" * 32)}) == 2 * len(
        buckets
    )
    assert ROOT.key(run_key(DIGEST)) == f"noloco_p2p/1/{DIGEST}"


def test_peers_spread_evenly_over_buckets() -> None:
    """Chi-square with 63 degrees of freedom exceeds 103 once in a thousand."""
    sizes = Counter(bucket_of(f"peer-{number}", 6) for number in range(6400))
    assert sum((sizes[bucket] - 100) ** 2 / 100 for bucket in buckets_at(6)) < 103


def test_two_buckets_are_drawn_and_one_at_a_time_is_drawn_anew() -> None:
    census, before = census_at(3), ROOT
    for turn in range(50):
        bucket = census.next()
        assert bucket != before
        census.took(bucket, Found({f"{bucket.index}": (3,)}, share=1 / 32))
        assert census.drawn() == ({f"{bucket.index}", f"{before.index}"} if turn else {f"{bucket.index}"})
        before = bucket


def test_a_single_bucket_is_read_again_and_brought_up_to_date() -> None:
    census = census_at()
    for found in (["a", "b"], ["b"], ["b", "c"]):
        assert census.next() == ROOT
        census.took(ROOT, Found(dict.fromkeys(found, (0,))))
        assert census.drawn() == set(found)


def test_every_bucket_is_drawn_with_the_same_chance() -> None:
    rng = random.Random(3)
    drawn = Counter(random_bucket(3, rng) for _ in range(8_000))
    assert sum((drawn[bucket] - 1_000) ** 2 / 1_000 for bucket in buckets_at(3)) < 24.3  # 7 degrees, 1 in 1,000


def test_an_over_full_bucket_is_read_in_part_and_at_random() -> None:
    entries = {f"peer-{number}": (bytes(1000), 0.0) for number in range(200)}
    drawn = Counter(peer for seed in range(100) for peer in within_limit(entries, random.Random(seed)))
    assert sum(drawn.values()) == 100 * (MAX_BUCKET_BYTES // 1000)
    assert len(drawn) == 200
    few = dict(list(entries.items())[:60])
    assert within_limit(few, random.Random(0)) == few


@pytest.mark.parametrize(
    ("size", "depth"), [(0, 0), (1, 0), (32, 0), (45, 0), (46, 1), (1024, 5), (10**6, 15), (1e9, MAX_DEPTH)]
)
def test_the_best_depth(size: float, depth: int) -> None:
    assert best_depth(size) == depth


def test_a_swarm_of_up_to_48_peers_has_one_bucket_and_is_counted_exactly() -> None:
    census = census_at()
    for size in (1, 4, 32, SPLIT_ABOVE):
        count(census, size)
        assert (census.depth, census.size) == (0, size)
    count(census, 4)
    assert census.depths() == (0,)


def test_near_a_limit_a_peer_is_announced_on_both_sides_of_it() -> None:
    census = census_at()
    count(census, SPLIT_ABOVE - 1)
    assert census.depths() == (0, 1)
    count(census, SPLIT_ABOVE + 2)
    assert census.depth == 1
    clock_s[0] = LINGER_S + 1
    assert census.depths() == (1, 0), f"{SPLIT_ABOVE / 2} in a bucket is below {ALSO_SHALLOWER_BELOW}"


def test_after_a_change_of_depth_a_peer_can_be_found_at_the_old_one_for_a_while() -> None:
    census = census_at()
    count(census, 1000)
    clock_s[0] = LINGER_S - 1
    assert census.depths() == (5, 0)
    clock_s[0] = LINGER_S + 1
    assert census.depths() == (5,)


def test_one_odd_bucket_changes_nothing() -> None:
    census = census_at()
    count(census, 1000)
    for number in (32, 30, 33, 31, 70, 5):
        count(census, number)
        assert census.depth == 5


@pytest.mark.parametrize("finds", [[EVIDENCE - 1], [40, 40, 0], [40, 40, EVIDENCE - 1, 40]])
def test_a_few_records_elsewhere_are_no_evidence(finds: list[int]) -> None:
    census = census_at(finds={12: finds})
    asyncio.run(census.look_aside(12))
    assert census.depth == 0


def test_who_goes_elsewhere_stays_at_its_base_until_it_finds_its_peers_there() -> None:
    census = census_at(finds={16: [EVIDENCE] * LOOKS_THAT_AGREE})
    count(census, 4)
    asyncio.run(census.look_aside(16))
    assert (census.depth, census.base) == (13, 0)
    clock_s[0] = LINGER_S + 1
    for is_there in [True] * (WINDOW_READS - 1) + [False] + [True] * WINDOW_READS:
        assert 0 in census.depths()
        census.took(ROOT, Found({"other": (0,)}))
        assert census.witness == "other"
        found = {"other": (13,)} if is_there else {"somebody": (13,)}
        census.took(bucket_of("other", 13), Found(found, share=1 / 32))
    assert 0 not in census.depths()


def test_where_nobody_is_found_after_all_the_way_back_is_short() -> None:
    census, reads = census_at(finds={16: [EVIDENCE] * LOOKS_THAT_AGREE}), 0
    asyncio.run(census.look_aside(16))
    while census.depth > 0:
        count(census, 0)
        reads += 1
    assert reads <= WINDOW_READS, "it was 51"
    assert census.base is None


def test_a_neighbour_that_reads_elsewhere_says_where_to_look() -> None:
    looks: list[int] = []

    async def read(buckets: Sequence[Bucket]) -> list[Found]:
        looks.append(buckets[0].depth)
        return []

    census = Census(read)
    census.took(ROOT, Found({str(number): (home,) for number, home in enumerate([0, 0, 4, 4, 7])}))
    for _ in range(MAX_DEPTH + 1):
        asyncio.run(census.look_aside())
    assert looks[0] == 4
    assert sorted(looks[1:]) == list(range(1, MAX_DEPTH + 1)), "then all others, each once"


# many peers, each of which decides by itself


def test_a_swarm_that_grows_slowly_stays_visible_to_everybody() -> None:
    swarm = BucketSwarm(seed=1)
    swarm.join(30)
    swarm.run(60)
    assert {member.census.depth for member in swarm.members.values()} == {0}
    depths = set()
    for _ in range(9):
        swarm.join(10, within_s=30)
        swarm.run(60)
        seen = [swarm.visible_share(member) for member in list(swarm.members.values())[::10]]
        assert min(seen) > 0.9
        assert median(seen) > 0.98
        depths |= {member.census.depth for member in swarm.members.values()}
    assert depths == {0, 1, 2}


def test_a_rush_and_a_collapse_are_followed_within_minutes() -> None:
    swarm = BucketSwarm(seed=2)
    swarm.join(10)
    swarm.run(30)
    for change in (lambda: swarm.join(290, within_s=5), lambda: swarm.kill(270)):
        change()
        swarm.run(300)  # records of the dead live for a minute, and the window of reads for another
        members = list(swarm.members.values())
        assert median(member.census.size for member in members) == pytest.approx(len(members), rel=0.2)
        assert all(abs(member.census.depth - best_depth(len(members))) <= 1 for member in members)
        assert median(swarm.visible_share(member) for member in members[::10]) > 0.98


def test_islands_that_settled_at_different_depths_find_each_other() -> None:
    swarm = BucketSwarm(seed=3)
    swarm.join(20)
    swarm.join(150, group=1)
    swarm.run(90)
    depths = {peer: member.census.depth for peer, member in swarm.members.items()}
    assert all(depth == 0 for depth in list(depths.values())[:20])
    assert min(list(depths.values())[20:]) >= 2
    swarm.heal()
    swarm.run(240)
    members = list(swarm.members.values())
    assert median(swarm.visible_share(member) for member in members) > 0.98
    assert min(swarm.visible_share(member) for member in members[:20]) > 0.9


class LiedTo(BucketSwarm):
    """A liar answers for all buckets at some depths: with this many invented peers, and without honest ones."""

    lies: Mapping[int, int] = MappingProxyType({})

    def _read(self, member: Member, bucket: Bucket) -> dict[str, Stored]:
        honest = super()._read(member, bucket)
        invented = Stored((bucket.depth,), float("inf"))
        number = self.lies.get(bucket.depth)
        return {f"invented-{each}": invented for each in range(number)} if number else honest


@pytest.mark.parametrize(("seed", "lies"), [(1, {8: 20}), (2, dict.fromkeys(range(1, 9), 40)), (3, {4: 5, 16: 40})])
def test_a_liar_at_other_depths_hides_no_peer_from_another(seed: int, lies: dict[int, int]) -> None:
    swarm = LiedTo(seed=seed)
    swarm.join(10)
    swarm.run(20)
    swarm.lies = lies
    swarm.join(10, within_s=30)
    swarm.run(40)
    for _ in range(60):
        swarm.run(10)
        members = list(swarm.members.values())
        assert min(swarm.visible_share(member) for member in members) == 1.0
        drawn = [member.census.drawn() & {*swarm.members} - {member.peer_id} for member in members]
        assert min(map(len, drawn)) >= len(members) // 2
    swarm.lies = {}
    swarm.run(LINGER_S)
    assert {member.census.depth for member in swarm.members.values()} == {0}


def test_the_depth_of_a_bucket_is_bounded() -> None:
    census = census_at()
    count(census, 10**9)
    assert max(census.depths()) == MAX_DEPTH
    assert Bucket(MAX_DEPTH, (1 << MAX_DEPTH) - 1).holds("x") in (True, False)
