"""Whether this peer pauses: its user asked by `noloco pause`, or the machine is used as the settings exclude."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from noloco_p2p.peer.free_time import FreeTime, Reason, Seen
from noloco_p2p.peer.machine_use import GpuUse, MachineUse
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PausedBy

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two observations of the machine


class Pausing:
    """`requested` is set while a pause is requested. Only the network thread changes it."""

    def __init__(self, requested: threading.Event) -> None:
        self.is_asked = False  # by `noloco pause`
        self._requested = requested
        self._machine: Reason | None = None

    def ask(self) -> None:
        self.is_asked = True
        self._requested.set()

    def resume(self) -> None:
        """Withdraw the request of `noloco pause`; the use of the machine may still require a pause."""
        self.is_asked = False
        self.heed(self._machine)

    def heed(self, machine: Reason | None) -> None:
        """Set what the use of the machine requires now."""
        self._machine = machine
        if self.is_asked or machine:
            self._requested.set()
        else:
            self._requested.clear()

    @property
    def word(self) -> PausedBy:
        """The reason as it stands in the record; empty without a request."""
        if self._machine and not self.is_asked:
            return self._machine.word
        return "asked" if self._requested.is_set() else ""

    @property
    def sentence(self) -> str:
        """A sentence with the reason and how the pause ends; empty without a request."""
        if self._machine and not self.is_asked:
            return f"{self._machine.sentence}; training resumes by itself"
        asked = "`noloco pause` asked for it; `noloco resume` continues, `noloco leave` ends the peer"
        return asked if self._requested.is_set() else ""


async def watch_machine(settings: PeerSettings, pausing: Pausing) -> list[asyncio.Task[None]]:
    """Start the task that observes this machine; None where the settings let the peer train at any time."""
    free_time = FreeTime(settings)
    if not free_time.is_limited:
        return []
    gpu = await asyncio.to_thread(GpuUse) if free_time.spares_gpu else None  # a driver may take a second to answer
    if gpu and gpu.why_unknown and settings.on_busy_gpu == "never":
        log.warning("--on-busy-gpu never is ignored: %s", gpu.why_unknown)
    return [asyncio.create_task(watch(free_time, pausing, MachineUse(gpu=gpu).look))]


async def watch(free_time: FreeTime, pausing: Pausing, look: Callable[[], Seen], *, every_s: float = LOOK_S) -> None:
    """Observe the machine every few seconds, on another thread, and pass the result to `pausing`."""
    while True:
        try:
            pausing.heed(free_time.why_not(await asyncio.to_thread(look), now_s=time.monotonic()))
        except Exception:  # the peer keeps its present state
            log.exception("the use of this machine could not be read")
        await asyncio.sleep(every_s)
