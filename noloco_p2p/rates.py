"""Limit how often each of many keys may act."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_KEYS = 4096  # hosts, networks or peers; beyond that, the least recently used one is forgotten


class Rates:
    """A token bucket for each key: `at_once` units at first, and `per_s` units per second in the long run."""

    def __init__(
        self, per_s: float, at_once: float, *, max_keys: int = MAX_KEYS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._at_once = at_once
        self._max_keys = max_keys
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # the units, and the time at which they were

    @classmethod
    def a_minute(cls, most: float, *, clock: Callable[[], float] = time.monotonic) -> Rates:
        """Create limits that allow at most `most` units per key in any minute, half of them at once and the other half
        as time passes.
        """
        return cls(per_s=most / 120, at_once=most / 2, clock=clock)

    def __len__(self) -> int:
        return len(self._left)

    def left(self, key: str) -> float:
        """Return the units that are left for this key. After a `charge`, they can be fewer than zero."""
        units, at_s = self._left.get(key, (self._at_once, 0.0))
        return min(units + max(self._clock() - at_s, 0.0) * self._per_s, self._at_once)

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Take `cost` units of this key. If there are fewer, take nothing and return False."""
        has_enough = self.left(key) >= cost
        self.charge(key, cost if has_enough else 0.0)
        return has_enough

    def charge(self, key: str, cost: float) -> None:
        """Take `cost` units of this key, even if there are fewer, because some costs are known only after the work."""
        self._left[key] = self.left(key) - cost, self._clock()
        self._left.move_to_end(key)
        if len(self._left) > self._max_keys:
            self._left.popitem(last=False)

    def give_back(self, key: str, cost: float = 1.0) -> None:
        self.charge(key, -cost)
