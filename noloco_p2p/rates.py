"""Token buckets: an allowance that is full at first and refills with time, one or one for each of many keys."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_KEYS = 4096  # hosts, networks or peers; the bucket that was used the longest ago is forgotten


@dataclass(frozen=True, slots=True)
class Rate:
    """Units per second in the long run, and units at once."""

    per_s: float
    burst: float


@dataclass(slots=True)
class TokenBucket:
    """`left` may fall below zero, by one charge: some costs are known after the work only."""

    rate: Rate
    left: float
    at_s: float

    @classmethod
    def full(cls, rate: Rate, now_s: float) -> TokenBucket:
        return cls(rate, rate.burst, now_s)

    def refill(self, now_s: float) -> float:
        """The units that are left now."""
        self.left = min(self.left + max(now_s - self.at_s, 0.0) * self.rate.per_s, self.rate.burst)
        self.at_s = now_s
        return self.left


class Buckets:
    """A token bucket for each of the `max_keys` keys that were used last. Pure: it is given the time."""

    def __init__(self, rate: Rate, *, max_keys: int = MAX_KEYS) -> None:
        self._rate = rate
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, key: str, now_s: float) -> TokenBucket:
        """The bucket of this key, refilled."""
        bucket = self._buckets.setdefault(key, TokenBucket.full(self._rate, now_s))
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        bucket.refill(now_s)
        return bucket


class Rates:
    """How often each of many keys may do something: `at_once` at first, and `per_s` in the long run."""

    def __init__(self, *, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = Buckets(Rate(per_s, at_once))
        self._clock = clock

    @classmethod
    def a_minute(cls, most: float, *, clock: Callable[[], float] = time.monotonic) -> Rates:
        """At most `most` in any minute: half of them at once, and the other half as time passes."""
        return cls(per_s=most / 120, at_once=most / 2, clock=clock)

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Take `cost` units from this key's bucket. False = it has fewer, and nothing is taken."""
        bucket = self._buckets.of(key, self._clock())
        has_enough = bucket.left >= cost
        if has_enough:
            bucket.left -= cost
        return has_enough

    def give_back(self, key: str) -> None:
        bucket = self._buckets.of(key, self._clock())
        bucket.left = min(bucket.rate.burst, bucket.left + 1.0)
