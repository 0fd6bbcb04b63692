"""Which forwards a replica has taken: each is processed at most once."""

from __future__ import annotations

from collections import OrderedDict

from noloco_p2p.flow.frames import MicrobatchId
from noloco_p2p.flow.limits import MAX_HEADS, SEEN_NUMBERS


class SeenForwards:
    """A sliding window of numbers for each head. What is older than the window counts as seen.

    Backwards need no window: each uses up the stash entry of its forward.
    """

    def __init__(self) -> None:
        self._windows: OrderedDict[str, tuple[int, int]] = OrderedDict()  # head -> highest number, bits of those below

    def __contains__(self, id: MicrobatchId) -> bool:
        if id.head not in self._windows:
            return False
        highest, bits = self._windows[id.head]
        age = highest - id.number
        return age >= SEEN_NUMBERS or (age >= 0 and bool(bits >> age & 1))

    def add(self, id: MicrobatchId) -> None:
        highest, bits = self._windows.get(id.head, (id.number, 0))
        if id.number > highest:
            # Not shifted by the whole distance: numbers may jump by a clock's worth when a head starts again.
            distance = min(id.number - highest, SEEN_NUMBERS)
            highest, bits = id.number, (bits << distance) & ((1 << SEEN_NUMBERS) - 1)
        if highest - id.number < SEEN_NUMBERS:
            bits |= 1 << (highest - id.number)
        self._windows[id.head] = (highest, bits)
        self._windows.move_to_end(id.head)
        if len(self._windows) > MAX_HEADS:
            self._windows.popitem(last=False)

    def __len__(self) -> int:
        return len(self._windows)
