"""Limit rates with token buckets, for one caller or for each of many keys.

A bucket starts full and refills over time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_KEYS = 4096  # hosts, networks or peers; beyond that, the least recently used bucket is dropped


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate: the number of units per second in the long run, and the maximum number of units at once."""

    per_s: float
    burst: float


@dataclass(slots=True)
class TokenBucket:
    """A token bucket.

    `left` can fall below zero by one charge, because some costs are known only after the work is done.
    """

    rate: Rate
    left: float
    at_s: float

    @classmethod
    def full(cls, rate: Rate, now_s: float) -> TokenBucket:
        return cls(rate, rate.burst, now_s)

    def refill(self, now_s: float) -> float:
        """Refill the bucket and return the number of units left now."""
        self.left = min(self.left + max(now_s - self.at_s, 0.0) * self.rate.per_s, self.rate.burst)
        self.at_s = now_s
        return self.left


class Buckets:
    """A token bucket for each of the `max_keys` most recently used keys. Callers supply the current time as an
    argument.
    """

    def __init__(self, rate: Rate, *, max_keys: int = MAX_KEYS) -> None:
        self._rate = rate
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, key: str, now_s: float) -> TokenBucket:
        """Refill the bucket of this key and return it."""
        bucket = self._buckets.setdefault(key, TokenBucket.full(self._rate, now_s))
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        bucket.refill(now_s)
        return bucket


class Rates:
    """A limit on how often each of many keys may act: `at_once` times at first, and `per_s` times per second in the
    long run.
    """

    def __init__(self, *, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(Rate(per_s, at_once))
        self._clock = clock

    @classmethod
    def a_minute(cls, most: float, *, clock: Callable[[], float] = time.monotonic) -> Rates:
        """Create limits that allow at most `most` units per key in any minute, half of them at once and the other half
        as time passes.
        """
        return cls(per_s=most / 120, at_once=most / 2, clock=clock)

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Take `cost` units from this key's bucket. If there are fewer, take nothing and return False."""
        bucket = self._buckets.of(key, self._clock())
        has_enough = bucket.left >= cost
        if has_enough:
            bucket.left -= cost
        return has_enough

    def give_back(self, key: str, cost: float = 1.0) -> None:
        bucket = self._buckets.of(key, self._clock())
        bucket.left = min(bucket.rate.burst, bucket.left + cost)
