"""The update filter clips what no honest partner would send, and leaves the rest alone."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.gossip.units import Chunk
from noloco_p2p.outer import update_filter
from noloco_p2p.outer.update_filter import (
    DRAG,
    FIRST_DRAG,
    PARTNERS,
    PULL,
    RADIUS,
    VOICES,
    Memory,
    UpdateFilter,
    pieces_of,
)

SIZE = 100
MOVED = 1.0  # the norm of this peer's own movement between two swaps
MOST = update_filter.MOST * MOVED


def vector(norm: float) -> torch.Tensor:
    direction = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    return direction * (norm / direction.norm())


class Given:
    """A swap whose snapshot and half-differences are given."""

    def __init__(self, values: torch.Tensor, halves: torch.Tensor) -> None:
        self.start, self.chunks = 0, [Chunk(0, len(values), range(1))]
        self.values, self._halves = values, halves

    def half_difference(self, index: int) -> torch.Tensor:
        return self._halves


class Replica:
    """A filter of one tensor in one chunk, and the swaps that pass through it."""

    def __init__(self) -> None:
        self.filter = UpdateFilter([(SIZE,)], [(0, SIZE)], seed=0)
        self.values = torch.zeros(SIZE)
        self.filter.begin(0, self.values)

    def remember(self, partner: str, norm: float) -> None:
        """Remember that the half-differences of a partner had this norm while the peer moved by `MOVED`."""
        self.filter._norms.put(partner, range(1), torch.tensor([[norm, norm]]))

    def swap(self, partner: str, norm: float, *, is_at_rest: bool = False) -> float:
        """Return the norm of a partner's half-differences after the filter."""
        self.values += vector(0.0 if is_at_rest else MOVED)
        given: Any = Given(self.values.clone(), vector(norm))
        halves = self.filter.judge(given, partner, is_at_rest=is_at_rest)
        self.values += halves.values
        after = float(halves.values.norm())
        assert halves.num_clipped == (after < 0.999 * norm)
        assert halves.distance == pytest.approx(2 * norm / SIZE**0.5)
        return after


def test_the_first_partners_move_a_peer_as_far_as_the_peer_moves_itself() -> None:
    replica = Replica()
    for number in range(VOICES):
        assert replica.swap(f"liar-{number}", 1000.0) == pytest.approx(MOVED)
    assert Replica().swap("honest", 0.9 * MOVED) == pytest.approx(0.9 * MOVED)


def test_a_partner_moves_a_peer_a_little_further_than_the_usual_one() -> None:
    replica = Replica()
    for number in range(5):
        replica.remember(f"honest-{number}", 0.8)
    assert replica.swap("liar", 1000.0) == pytest.approx(RADIUS * 0.8)


def test_what_all_partners_send_passes_as_soon_as_each_has_sent_it() -> None:
    replica = Replica()
    for number in range(PARTNERS):
        replica.remember(f"honest-{number}", 0.5)
    first, *_, last = [replica.swap(f"honest-{number}", 2.0) for number in range(PARTNERS)]
    assert [first, last] == pytest.approx([RADIUS * 0.5, 2.0], rel=1e-3)


def test_many_swaps_with_one_liar_do_not_widen_the_filter() -> None:
    replica = Replica()
    for number in range(3):
        replica.remember(f"honest-{number}", 0.6)
    for _ in range(3 * PARTNERS):
        assert replica.swap("liar", 1000.0) <= RADIUS * 0.6 * 1.001


def test_liars_alone_cannot_widen_the_filter_beyond_its_upper_bound() -> None:
    replica = Replica()
    for number in range(PARTNERS):
        replica.remember(f"liar-{number}", 10 * MOST)
    assert replica.swap("liar-0", 1e6) == pytest.approx(MOST, rel=1e-4)
    unbounded = replica.swap("liar-1", 1e6, is_at_rest=True)
    assert unbounded == pytest.approx(RADIUS * 10 * MOST, rel=1e-4), "at rest, nobody moves"


def test_while_a_peer_moves_faster_its_partners_move_it_further() -> None:
    """As while the learning rate rises. The norms in the memory are from before."""
    replica = Replica()
    for number in range(PARTNERS):
        replica.swap(f"honest-{number}", 0.9)
    replica.values += vector(9 * MOVED)
    assert replica.swap("honest-0", 9.0) == pytest.approx(9.0)
    assert replica.swap("liar", 1000.0) < RADIUS * 9.0


def test_closing_swaps_may_be_as_long_as_those_of_peers_that_come_closer_with_each_of_them() -> None:
    replica = Replica()
    replica.swap("honest", 0.0)
    for number in range(PARTNERS):
        replica.remember(f"honest-{number}", 0.8)
    moved = [replica.swap(f"liar-{number}", 1000.0, is_at_rest=True) for number in range(4)]
    assert moved == pytest.approx([RADIUS * 0.8 * 2 ** (-number / 2) for number in range(4)], rel=1e-4)
    honest = [replica.swap(f"honest-{number}", 0.8 * 2 ** (-number / 2), is_at_rest=True) for number in range(4, 8)]
    assert honest == pytest.approx([0.8 * 2 ** (-number / 2) for number in range(4, 8)], rel=1e-4)
    assert replica.swap("liar-4", 1000.0) == pytest.approx(RADIUS * 0.8, rel=1e-4), "it trains again"


def test_a_half_difference_that_pulls_everything_to_one_side_is_made_shorter() -> None:
    rows, width = 64, 100
    random, chunk = torch.Generator().manual_seed(4), (0, rows * width)
    judging = UpdateFilter([(rows, width)], [chunk], seed=0)
    values = torch.zeros(rows * width)
    judging.begin(0, values)

    def left(partner: str, halves: torch.Tensor) -> float:
        values.add_(torch.randn(len(values), generator=random) / 80)
        given: Any = Given(values.clone(), halves.clone())
        after = judging.judge(given, partner).values
        return float(after.norm() / halves.norm())

    for number in range(6):
        assert left(f"honest-{number}", torch.randn(rows * width, generator=random) / 160) > 0.9
    across, down = torch.randn(rows, generator=random), torch.randn(width, generator=random)
    one_side = torch.outer(across, down).flatten()
    assert left("liar", 0.5 * one_side / one_side.norm()) < 0.3
    assert left("honest", torch.randn(rows * width, generator=random) / 160) > 0.9


def test_partners_that_send_one_part_are_not_forgotten_because_of_those_that_send_another() -> None:
    memory = Memory(PARTNERS, num_pieces=2, width=1)
    for piece, norm, num in ((0, 1.0, VOICES), (1, 9.0, 10 * PARTNERS)):
        for number in range(num):
            memory.put(f"partner-{piece}-{number}", range(piece, piece + 1), torch.tensor([[norm]]))
    for _ in range(PARTNERS):
        memory.put("partner-0-0", range(1), torch.tensor([[5.0]]))
    assert memory.medians(range(2)).flatten().tolist() == [1.0, 9.0]
    assert memory.of("partner-0-0", range(2)).flatten().nan_to_num(-1.0).tolist() == [5.0, -1.0]


class Pulls:
    """A replica whose partners send half-differences of norm 0.5 in given directions."""

    def __init__(self) -> None:
        self.replica, self._random = Replica(), torch.Generator().manual_seed(3)

    def any(self) -> torch.Tensor:
        direction = torch.randn(SIZE, generator=self._random)
        return direction / direction.norm()

    def factor(self, partner: str, direction: torch.Tensor) -> float:
        """Return what is left of a half-difference."""
        replica, halves = self.replica, 0.5 * direction
        replica.values += MOVED * self.any()
        given: Any = Given(replica.values.clone(), halves.clone())
        after = replica.filter.judge(given, partner).values
        replica.values += after
        return float(after.norm() / halves.norm())


def test_who_alone_pulls_to_the_same_side_again_and_again_is_slowed_down() -> None:
    pulls, side = Pulls(), vector(1.0)
    honest = [[pulls.factor(f"honest-{number}", pulls.any()) for number in range(3)] for _ in range(4)]
    liar = [pulls.factor("liar", side) for _ in range(4)]
    assert liar[-1] == pytest.approx(PULL, abs=0.05)
    assert min(map(min, honest)) > 0.9
    assert pulls.factor("liar", pulls.any()) > 0.9, "not where it pulls elsewhere"


def test_a_peer_that_is_behind_all_others_takes_what_they_send() -> None:
    pulls, side = Pulls(), vector(1.0)
    for _ in range(4):
        for number in range(4):
            ahead = side + 0.5 * pulls.any()
            last = pulls.factor(f"ahead-{number}", ahead / ahead.norm())
            assert last > 0.9


@pytest.mark.parametrize(
    ("cosine", "shrinks"), [(1.0, False), (0.0, False), (-0.25, False), (-0.6, True), (-1.0, True)]
)
@pytest.mark.parametrize("is_at_rest", [False, True])
def test_who_pulls_back_again_and_again_is_slowed_down(cosine: float, shrinks: bool, is_at_rest: bool) -> None:
    replica = Replica()
    for _ in range(3):
        replica.swap("honest", 0.0)
    across = torch.randn(SIZE, generator=torch.Generator().manual_seed(2))
    across -= vector(1.0) * (across @ vector(1.0))
    halves = 0.4 * (cosine * vector(1.0) + (1 - cosine**2) ** 0.5 * across / across.norm())
    replica.values += vector(MOVED)
    given: Any = Given(replica.values.clone(), halves.clone())
    after = replica.filter.judge(given, "liar", is_at_rest=is_at_rest).values
    assert torch.allclose(after, halves * (FIRST_DRAG / -cosine if shrinks else 1.0), atol=1e-5)
    assert float(after @ vector(1.0)) >= -FIRST_DRAG * 0.4 - 1e-5


@pytest.mark.parametrize("usual", [0.0, 0.4])
def test_a_partner_pulls_back_a_little_further_than_the_usual_one(usual: float) -> None:
    replica = Replica()
    for number in range(PARTNERS):
        replica.swap(f"honest-{number}", 0.0)
        replica.remember(f"honest-{number}", 0.8)
        replica.filter._drags[f"honest-{number}"] = usual
    replica.values += vector(MOVED)
    given: Any = Given(replica.values.clone(), vector(-0.8))
    assert float(replica.filter.judge(given, "liar").values.norm()) == pytest.approx(0.8 * (usual + DRAG))
    assert [*replica.filter._drags] == [*(f"honest-{number}" for number in range(1, PARTNERS)), "liar"]


def test_honest_partners_may_pull_back_from_where_a_liar_has_pushed() -> None:
    pulls, side = Pulls(), vector(1.0)
    pushed = [pulls.factor(f"liar-{number}", side) for number in range(8)]
    assert min(pushed) > 0.9, "each of them for the first time"
    assert pulls.factor("honest", -side) > 0.9


@pytest.mark.parametrize("place", [slice(777, 778), slice(1, None, 16)], ids=["one number", "one in sixteen"])
def test_a_liar_can_hide_nowhere_in_a_piece(place: slice) -> None:
    values, random = torch.zeros(4096), torch.Generator().manual_seed(3)
    judging = UpdateFilter([(4096,)], [(0, 4096)], seed=0)
    judging.begin(0, values)
    lie, factors = torch.zeros(4096), list[float]()
    lie[place] = 0.5 / len(lie[place]) ** 0.5
    for number in range(16):
        partner = ("one", "two", "three", "liar")[number % 4]
        values += torch.randn(4096, generator=random) / 64
        halves = lie if partner == "liar" else torch.randn(4096, generator=random) / 128
        given: Any = Given(values.clone(), halves.clone())
        after = judging.judge(given, partner).values
        values += after
        factors.append(float(after.norm() / halves.norm()))
    assert min(factors[3::4][0], *factors[0::4], *factors[1::4], *factors[2::4]) > 0.8
    assert max(factors[7::4]) < 0.6


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1).filter(lambda all: any(map(math.prod, all))),
    chunk=st.integers(1, 40),
)
def test_pieces_are_the_parts_of_tensors_within_chunks(shapes: list[list[int]], chunk: int) -> None:
    sizes = [math.prod(shape) for shape in shapes]
    total = sum(sizes)
    chunks = [(start, min(start + chunk, total)) for start in range(0, total, chunk)]
    cut = [
        (start + piece.place.start, start + piece.place.stop, piece.width)
        for (start, _), pieces in zip(chunks, pieces_of(shapes, chunks), strict=True)
        for piece in pieces
    ]
    ends = sorted({sum(sizes[:index]) for index in range(len(sizes) + 1)} | {stop for _, stop in chunks} | {0})
    assert [place[:2] for place in cut] == list(pairwise(ends))
    widths = [math.prod(shape[1:]) for shape, size in zip(shapes, sizes, strict=True) for _ in range(size)]
    assert [width for _, _, width in cut] == [widths[start] for start, _, _ in cut]
    assert [piece.number for pieces in pieces_of(shapes, chunks) for piece in pieces] == list(range(len(cut)))
