"""So many a minute and no more, counted for each of many keys: hosts, networks, peers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_KEYS = 4096  # who is not remembered any more begins anew


class Rates:
    """A token bucket for each key: `at_once` at first, and `per_s` more a second up to that."""

    def __init__(self, *, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._at_once = per_s, at_once
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # key -> (tokens, when counted)

    def __len__(self) -> int:
        return len(self._left)

    def take(self, key: str) -> bool:
        """Whether it has one left, which is taken."""
        tokens = self._now(key)
        self._set(key, tokens - 1.0 if tokens >= 1.0 else tokens)
        return tokens >= 1.0

    def give_back(self, key: str) -> None:
        self._set(key, min(self._at_once, self._now(key) + 1.0))

    def _now(self, key: str) -> float:
        tokens, counted_s = self._left.get(key, (self._at_once, self._clock()))
        return min(self._at_once, tokens + self._per_s * (self._clock() - counted_s))

    def _set(self, key: str, tokens: float) -> None:
        self._left.pop(key, None)
        self._left[key] = (tokens, self._clock())
        while len(self._left) > MAX_KEYS:
            self._left.popitem(last=False)
