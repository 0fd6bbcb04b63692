"""How long a newcomer stays with one donor."""

from __future__ import annotations

from noloco_p2p.gossip.patience import LEAST_LINE_S, UNKNOWN_LINE_S, WINDOW_S, Patience


def test_the_first_word_from_a_line_says_how_long_it_is_believed() -> None:
    for told_s, stays_s in ((0.0, LEAST_LINE_S), (300.0, 600.0), (None, 2 * UNKNOWN_LINE_S)):
        patience = Patience(1000)
        assert patience.waits(told_s, 7.0)
        assert patience.waits(9000.0, 7.0 + stays_s)
        assert not patience.waits(9000.0, 7.1 + stays_s)


def test_the_rate_is_that_of_the_last_window() -> None:
    """A donor that was fast once is not for ever; the time before the first chunk does not count."""
    patience = Patience(1000)
    assert patience.whole_s(10, 500.0) is None
    assert patience.whole_s(50, 501.0) is None
    assert patience.whole_s(50, 500.0 + WINDOW_S) == 10 * WINDOW_S
    assert patience.whole_s(10, 501.0 + WINDOW_S) is None
    assert patience.whole_s(10, 500.0 + 2 * WINDOW_S) == 50 * WINDOW_S
