"""How long a newcomer stays with one donor before it turns to another. Pure: it is given the time.

Every item has a deadline of its own, which a donor can meet for ever: by a word from its line, or a chunk, now and
then.
"""

from __future__ import annotations

LEAST_LINE_S = 60.0  # in a line, however little is told to be left
UNKNOWN_LINE_S = 300.0  # told to be left where the donor has measured nothing yet
WINDOW_S = 60.0  # over which a rate is measured
SLOW_S = 3600.0  # a donor at whose rate the whole state takes longer is slow


class Patience:
    """With one donor, over all the calls that ask it for chunks."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes  # of the whole state
        self._line_ends_s: float | None = None
        self._window_begins_s: float | None = None
        self._window_bytes = 0

    def asks_again(self) -> None:
        """A further call is at the end of the line; the rate is that of all calls."""
        self._line_ends_s = None

    def waits(self, left_s: float | None, now_s: float) -> bool:
        """After a word from its line: whether to stay. By twice what the first one said the turn must have come."""
        if self._line_ends_s is None:
            told_s = UNKNOWN_LINE_S if left_s is None else left_s
            self._line_ends_s = now_s + max(LEAST_LINE_S, 2 * told_s)
        return now_s <= self._line_ends_s

    def whole_s(self, num_bytes: int, now_s: float) -> float | None:
        """After a chunk, at the end of a window: what the whole state takes at the rate of this window; None before."""
        if self._window_begins_s is None:  # the first chunk came out of a time that was not measured
            self._window_begins_s = now_s
            return None
        self._window_bytes += num_bytes
        elapsed_s = now_s - self._window_begins_s
        if elapsed_s < WINDOW_S:
            return None
        whole_s = self._num_bytes * elapsed_s / self._window_bytes
        self._window_begins_s, self._window_bytes = now_s, 0
        return whole_s
