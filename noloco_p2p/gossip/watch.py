"""This module measures the progress and the rate of the running swap for `noloco status` and the event log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from noloco_p2p.gossip.frames import Part
from noloco_p2p.gossip.round_driver import RoundDriver
from noloco_p2p.gossip.swap import Swap
from noloco_p2p.telemetry.progress import Meter

SAMPLE_S = 0.5
LONG_S = 10.0  # a running swap is reported at intervals of this length


@dataclass(frozen=True, slots=True)
class SwapProgress:
    """The progress of a swap in payload bytes.

    `part` is "early", "late" or "waiting". A swap is waiting if its early part is committed, but neither partner has
    reached its boundary. `total_bytes` is the number of bytes that each peer will have sent once the current part is
    complete.
    """

    partner: str
    part: str
    since_s: float
    sent_bytes: int
    received_bytes: int
    total_bytes: int
    sent_bytes_per_s: float
    received_bytes_per_s: float
    left_s: float | None  # for this part, in the slower direction; None while no data is transferred


class SwapWatch:
    """Samples the driver's swap while `run` is running. `now` returns the progress; call it on the event loop."""

    def __init__(self, driver: RoundDriver) -> None:
        self.on_long: Callable[[SwapProgress], None] | None = None
        self._driver = driver
        self._swap: Swap | None = None
        self._began_s = self._told_s = 0.0
        self._sent = self._received = Meter(now_s=0.0)

    async def run(self) -> None:
        while True:
            self.sample(now_s=time.monotonic())
            await asyncio.sleep(SAMPLE_S)

    def sample(self, *, now_s: float) -> None:
        running = self._driver.swap_now()
        swap = running[0] if running else None
        if swap is not self._swap:
            self._swap = swap
            self._began_s = self._told_s = running[1] if running else now_s
            self._sent, self._received = Meter(now_s=self._began_s), Meter(now_s=self._began_s)
        if swap is None:
            return
        self._sent.add(swap.bytes_sent, now_s=now_s)
        self._received.add(swap.bytes_received, now_s=now_s)
        if self.on_long and now_s - self._told_s >= LONG_S:
            self._told_s = now_s
            progress = self.now(now_s=now_s)
            if progress and progress.part != "waiting":
                self.on_long(progress)

    def now(self, *, now_s: float) -> SwapProgress | None:
        """Return the progress of the running swap, or None if there is none."""
        swap = self._swap
        if swap is None:
            return None
        early_bytes = swap.num_bytes(Part.EARLY)
        all_bytes = early_bytes + swap.num_bytes(Part.LATE)
        if Part.EARLY not in swap.ledger.committed:
            part, total = "early", early_bytes
        elif swap.waits:  # byte counts do not show this, because modulo sections may need fewer bytes than planned
            part, total = "waiting", early_bytes
        else:
            part, total = "late", all_bytes
        left = [meter.left_s(total, now_s=now_s) for meter in (self._sent, self._received) if meter.done < total]
        return SwapProgress(
            partner=swap.partner,
            part=part,
            since_s=round(now_s - self._began_s, 1),
            sent_bytes=swap.bytes_sent,
            received_bytes=swap.bytes_received,
            total_bytes=total,
            sent_bytes_per_s=round(self._sent.rate_per_s(now_s=now_s), 1),
            received_bytes_per_s=round(self._received.rate_per_s(now_s=now_s), 1),
            left_s=_longest(left),
        )


def _longest(left: list[float | None]) -> float | None:
    known = [seconds for seconds in left if seconds is not None]
    if len(known) < len(left):
        return None
    return round(max(known, default=0.0), 1)
