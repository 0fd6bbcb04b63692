"""The arithmetic of a slow link, without a network: rate, delay and order; equal seeds give equal times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.testing.links import Shape


def shape(*, mbit_s: float = 8.0, delay_ms: float = 100.0, jitter_ms: float = 0.0, seed: int = 0) -> Shape:
    return Shape(mbit_s=mbit_s, delay_ms=delay_ms, jitter_ms=jitter_ms, seed=seed)


def test_bytes_take_their_time_on_the_link_and_then_the_delay() -> None:
    assert shape().due_s(10.0, 1_000_000) == pytest.approx(10.0 + 1.0 + 0.1)


def test_what_enters_together_comes_out_one_after_the_other_at_the_rate() -> None:
    link = shape()
    assert [link.due_s(0.0, 100_000) for _ in range(5)] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    assert link.backlog_s(0.0) == pytest.approx(0.5)
    assert link.backlog_s(99.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100_000)), max_size=30), st.integers(0, 2**32))
def test_jitter_never_reorders_stays_in_bounds_and_follows_its_seed(pieces: list[tuple[float, int]], seed: int) -> None:
    def dues_s() -> list[float]:
        link, now_s, dues = shape(jitter_ms=50.0, seed=seed), 0.0, []
        for gap_s, num_bytes in pieces:
            now_s += gap_s
            dues.append(link.due_s(now_s, num_bytes))
        return dues

    steady, now_s = shape(), 0.0
    jittered = dues_s()
    for (gap_s, num_bytes), due_s in zip(pieces, jittered, strict=True):
        now_s += gap_s
        earliest_s = steady.due_s(now_s, num_bytes)
        assert earliest_s - 1e-9 <= due_s <= earliest_s + 0.05 + 1e-9
    assert jittered == sorted(jittered)
    assert jittered == dues_s()
