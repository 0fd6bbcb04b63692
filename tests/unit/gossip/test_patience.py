"""How long a newcomer stays with one donor."""

from __future__ import annotations

import pytest

from noloco_p2p.gossip.frames import QueuePlace
from noloco_p2p.gossip.patience import (
    FAST_BYTES_PER_S,
    LEAST_LINE_S,
    SLOW_S,
    TIMES_TOLD,
    UNKNOWN_LINE_S,
    WINDOW_S,
    Patience,
)


@pytest.mark.parametrize(
    ("told_s", "stays_s"), [(0.0, LEAST_LINE_S), (300.0, 300 * TIMES_TOLD), (None, UNKNOWN_LINE_S * TIMES_TOLD)]
)
def test_the_first_word_at_a_place_says_how_long_it_is_believed(told_s: float | None, stays_s: float) -> None:
    patience = Patience(1000)
    assert patience.waits(QueuePlace(3, told_s), 7.0)
    later = QueuePlace(3, None if told_s is None else 9000.0)
    assert patience.waits(later, 7.0 + stays_s)
    assert not patience.waits(later, 7.1 + stays_s)


def test_a_line_that_moves_is_believed_anew_and_so_is_the_first_time_that_is_told() -> None:
    patience = Patience(1000)
    assert patience.waits(QueuePlace(2, None), 0.0)
    assert patience.waits(QueuePlace(2, 1000.0), 900.0)
    assert patience.waits(QueuePlace(2, 500.0), 4800.0)
    assert not patience.waits(QueuePlace(2, 500.0), 4901.0)
    assert patience.waits(QueuePlace(1, 200.0), 4902.0)
    assert patience.waits(QueuePlace(1, 10.0), 5700.0)
    assert not patience.waits(QueuePlace(1, 10.0), 5703.0)


def test_the_rate_is_that_of_the_last_window() -> None:
    """A donor that was fast once is not for ever; the time before the first chunk does not count."""
    patience = Patience(int(100 * SLOW_S))
    assert patience.slow_s(1, 500.0) is None
    assert patience.slow_s(int(50 * WINDOW_S), 501.0) is None
    assert patience.slow_s(int(50 * WINDOW_S), 500.0 + WINDOW_S) is None, "100 bytes a second: just the hour"
    assert patience.slow_s(int(10 * WINDOW_S), 501.0 + WINDOW_S) is None
    assert patience.slow_s(int(10 * WINDOW_S), 500.0 + 2 * WINDOW_S) == 5 * SLOW_S


def test_a_large_state_does_not_make_a_donor_slow() -> None:
    patience = Patience(int(100 * SLOW_S * FAST_BYTES_PER_S))
    assert patience.slow_s(1, 0.0) is None
    assert patience.slow_s(int(WINDOW_S * FAST_BYTES_PER_S), WINDOW_S) is None
    assert patience.slow_s(int(WINDOW_S * FAST_BYTES_PER_S / 2), 2 * WINDOW_S) == 200 * SLOW_S
