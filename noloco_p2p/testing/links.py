"""The links of peers: named profiles, for simulations and for a proxy that slows down loopback, and their times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# The size of the link's buffer, in seconds at full rate; when it is full, the link accepts no more, as a modem does.
BUFFER_S = 0.05


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The link of one peer. `down` carries data to the peer, and `up` carries data from it. Delay and jitter apply to
    each direction.
    """

    name: str
    down_mbit_s: float
    up_mbit_s: float
    delay_ms: float
    jitter_ms: float  # upper bound of the extra delay, which is uniformly distributed


IDEAL = LinkProfile("ideal", down_mbit_s=float("inf"), up_mbit_s=float("inf"), delay_ms=0, jitter_ms=0)
HOME_FIBRE = LinkProfile("home-fibre", down_mbit_s=500, up_mbit_s=200, delay_ms=4, jitter_ms=1)
CABLE = LinkProfile("cable", down_mbit_s=200, up_mbit_s=20, delay_ms=10, jitter_ms=4)
CONGESTED_WIFI = LinkProfile("congested-wifi", down_mbit_s=20, up_mbit_s=10, delay_ms=15, jitter_ms=25)
WEAK_4G = LinkProfile("weak-4g", down_mbit_s=8, up_mbit_s=3, delay_ms=45, jitter_ms=30)
SATELLITE = LinkProfile("satellite", down_mbit_s=50, up_mbit_s=5, delay_ms=300, jitter_ms=20)
PROFILES = {link.name: link for link in (IDEAL, HOME_FIBRE, CABLE, CONGESTED_WIFI, WEAK_4G, SATELLITE)}


class Shape:
    """Computes when bytes leave one direction of a link. A seed determines all delays.

    `carry` and `drain` use the clock of the running loop.
    """

    def __init__(self, *, mbit_s: float, delay_ms: float, jitter_ms: float, seed: int) -> None:
        self._bytes_per_s = mbit_s * 1e6 / 8
        self._delay_s = delay_ms / 1e3
        self._jitter_s = jitter_ms / 1e3
        self._rng = random.Random(seed)
        self._free_s = 0.0  # when the last byte will have been sent
        self._last_due_s = 0.0

    def due_s(self, now_s: float, num_bytes: int) -> float:
        """Return when `num_bytes` that enter the link now will have left it. Bytes never overtake earlier bytes."""
        self._free_s = max(self._free_s, now_s) + num_bytes / self._bytes_per_s
        due_s = self._free_s + self._delay_s + self._rng.uniform(0.0, self._jitter_s)
        self._last_due_s = max(self._last_due_s, due_s)
        return self._last_due_s

    def backlog_s(self, now_s: float) -> float:
        """Return how long the link will take to send the bytes that have entered it."""
        return max(0.0, self._free_s - now_s)

    def carry(self, num_bytes: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(self.due_s(loop.time(), num_bytes), then)

    async def drain(self) -> None:
        await asyncio.sleep(max(0.0, self.backlog_s(asyncio.get_running_loop().time()) - BUFFER_S))


class LinkDirection(Protocol):
    """One direction of a peer's link, which the frames of all its swaps share."""

    def carry(self, num_bytes: int, then: Callable[[], None]) -> None:
        """Accept `num_bytes`, and call `then` when they have left the link. Bytes leave in order of entry."""
        ...

    async def drain(self) -> None:
        """Wait until the link accepts more bytes, as a sender does when its buffer is full."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a peer to all others. `up` carries data from the peer, and `down` carries data to it."""

    up: LinkDirection
    down: LinkDirection
    delay_s: float

    @classmethod
    def of(cls, profile: LinkProfile, *, seed: int = 0) -> Link:
        delays = {"delay_ms": profile.delay_ms, "jitter_ms": profile.jitter_ms}
        up = Shape(mbit_s=profile.up_mbit_s, seed=2 * seed, **delays)
        down = Shape(mbit_s=profile.down_mbit_s, seed=2 * seed + 1, **delays)
        return cls(up, down, profile.delay_ms / 1e3)
