"""Token buckets: an allowance that starts full and refills with time, for one caller or for each of many keys."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_KEYS = 4096  # hosts, networks or peers; the least recently used bucket is dropped


@dataclass(frozen=True, slots=True)
class Rate:
    """Units per second in the long run, and the most units at once."""

    per_s: float
    burst: float


@dataclass(slots=True)
class TokenBucket:
    """`left` may fall below zero by one charge, because some costs are known only after the work."""

    rate: Rate
    left: float
    at_s: float

    @classmethod
    def full(cls, rate: Rate, now_s: float) -> TokenBucket:
        return cls(rate, rate.burst, now_s)

    def refill(self, now_s: float) -> float:
        """The number of units left now."""
        self.left = min(self.left + max(now_s - self.at_s, 0.0) * self.rate.per_s, self.rate.burst)
        self.at_s = now_s
        return self.left


class Buckets:
    """A token bucket for each of the `max_keys` most recently used keys. Pure: callers pass the time."""

    def __init__(self, rate: Rate, *, max_keys: int = MAX_KEYS) -> None:
        self._rate = rate
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, key: str, now_s: float) -> TokenBucket:
        """Return the refilled bucket of this key."""
        bucket = self._buckets.setdefault(key, TokenBucket.full(self._rate, now_s))
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        bucket.refill(now_s)
        return bucket


class Rates:
    """How often each of many keys may act: `at_once` at first, and `per_s` in the long run."""

    def __init__(self, *, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(Rate(per_s, at_once))
        self._clock = clock

    @classmethod
    def a_minute(cls, most: float, *, clock: Callable[[], float] = time.monotonic) -> Rates:
        """Allow at most `most` in any minute: half of them at once, and the other half as time passes."""
        return cls(per_s=most / 120, at_once=most / 2, clock=clock)

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Take `cost` units from this key's bucket. Returns False, and takes nothing, if it has fewer."""
        bucket = self._buckets.of(key, self._clock())
        has_enough = bucket.left >= cost
        if has_enough:
            bucket.left -= cost
        return has_enough

    def give_back(self, key: str) -> None:
        bucket = self._buckets.of(key, self._clock())
        bucket.left = min(bucket.rate.burst, bucket.left + 1.0)
