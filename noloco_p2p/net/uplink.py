"""One order for the payloads that a peer sends to all of its neighbours: backwards first, then the oldest.

A payload has the uplink to itself as long as its path takes what the uplink gives, so that it arrives soon; payloads
that share a line arrive late together. Where its path takes less, as another peer sends to the same neighbour, the next
payload fills the rest. To tell the two apart, the bytes on their way on all streams are limited to what the uplink
carries at its best rate in the time that the path of the next payload takes, and its queue.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from noloco_p2p.net.send_window import SendWindow

INTERVAL_S = 1.0  # over which a rate is measured
UPLINK_QUEUE_S = 0.075
NUM_INTERVALS = 60  # of which the best rate counts
PATIENCE_S = 1.0  # a piece that is not acknowledged in this time waits for its receiver, not for the uplink
HEADROOM = 1.0


class Sender(Protocol):
    window: SendWindow

    @property
    def is_ready(self) -> bool: ...

    @property
    def urgency(self) -> tuple[bool, float] | None: ...

    def wake(self) -> None: ...


class Uplink:
    def __init__(self) -> None:
        self._senders: list[Sender] = []
        self._interval_began_s = 0.0
        self._interval_bytes = 0
        self._rates: deque[float] = deque(maxlen=NUM_INTERVALS)

    def add(self, sender: Sender) -> None:
        self._senders.append(sender)

    def remove(self, sender: Sender) -> None:
        self._senders.remove(sender)

    def acknowledged(self, num_bytes: int, now_s: float) -> None:
        self._interval_bytes += num_bytes
        seconds = now_s - self._interval_began_s
        if seconds >= INTERVAL_S:
            self._rates.append(self._interval_bytes / seconds)
            self._interval_began_s, self._interval_bytes = now_s, 0

    def next(self, now_s: float) -> Sender | None:
        waiting = [(sender.urgency, n, sender) for n, sender in enumerate(self._senders) if sender.is_ready]
        waiting = [each for each in waiting if each[0] is not None and each[2].window.is_open]
        if not waiting:
            return None
        sender = min(waiting)[2]
        windows = [each.window for each in self._senders]
        in_flight = sum(w.in_flight_bytes for w in windows if now_s - w.oldest_s() < PATIENCE_S)
        if self._rates:
            limit = HEADROOM * max(self._rates) * (min(sender.window.shortest_s, 0.2) + UPLINK_QUEUE_S)
            if in_flight and in_flight >= limit:
                return None
        return sender

    def wake(self, now_s: float) -> None:
        sender = self.next(now_s)
        if sender:
            sender.wake()
