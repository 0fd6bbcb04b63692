"""How long a newcomer stays with one donor before it turns to another. Pure: it is given the time.

Every item has a deadline of its own, which a donor can meet for ever: by a word from its line, or a chunk, now and
then.
"""

from __future__ import annotations

from noloco_p2p.gossip.frames import QueuePlace

LEAST_LINE_S = 60.0  # in a line, however little is told to be left
UNKNOWN_LINE_S = 300.0  # told to be left where the donor has measured nothing yet
TIMES_TOLD = 4.0  # what is told is of one upload where two share a link, and of a link without swaps
WINDOW_S = 60.0  # over which a rate is measured
SLOW_S = 3600.0  # a donor is slow at whose rate the whole state takes longer,
FAST_BYTES_PER_S = 1e6  # unless it gives so much: large states take their time over any link


class Patience:
    """With one donor, over all the calls that ask it for chunks."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes  # of the whole state
        self._place: tuple[int, bool] | None = None  # in its line, and whether the time was not known then
        self._place_ends_s = 0.0
        self._window_begins_s: float | None = None
        self._window_bytes = 0

    def asks_again(self) -> None:
        """A further call is at the end of the line; the rate is that of all calls."""
        self._place = None

    def waits(self, place: QueuePlace, now_s: float) -> bool:
        """After a word from its line: whether to stay. Each place must be behind in four times what was told there."""
        here = place.position, place.left_s is None
        if self._place is None or here < self._place:
            self._place = here
            told_s = UNKNOWN_LINE_S if place.left_s is None else place.left_s
            self._place_ends_s = now_s + max(LEAST_LINE_S, TIMES_TOLD * told_s)
        return now_s <= self._place_ends_s

    def slow_s(self, num_bytes: int, now_s: float) -> float | None:
        """After a chunk: what the whole state takes at the rate of the window that ends now, when that is too long."""
        if self._window_begins_s is None:  # the first chunk came out of a time that was not measured
            self._window_begins_s = now_s
            return None
        self._window_bytes += num_bytes
        elapsed_s = now_s - self._window_begins_s
        if elapsed_s < WINDOW_S:
            return None
        bytes_per_s = self._window_bytes / elapsed_s
        self._window_begins_s, self._window_bytes = now_s, 0
        whole_s = self._num_bytes / bytes_per_s
        return whole_s if whole_s > SLOW_S and bytes_per_s < FAST_BYTES_PER_S else None
