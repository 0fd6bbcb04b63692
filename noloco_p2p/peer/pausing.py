"""Who asks this peer to pause: its user by `noloco pause`, or what else its machine does, as the settings say."""

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

LOOK_S = 5.0  # between two looks at the machine


class Pausing:
    """`requested` is set while anybody asks. Changed on the network thread alone."""

    def __init__(self, requested: threading.Event) -> None:
        self.is_asked = False  # by `noloco pause`
        self._requested = requested
        self._machine: Reason | None = None

    def ask(self) -> None:
        self.is_asked = True
        self._requested.set()

    def resume(self) -> None:
        """Take back what `noloco pause` asked for; the use of the machine may still ask for it."""
        self.is_asked = False
        self.heed(self._machine)

    def heed(self, machine: Reason | None) -> None:
        """What the use of the machine asks for now."""
        self._machine = machine
        if self.is_asked or machine:
            self._requested.set()
        else:
            self._requested.clear()

    @property
    def word(self) -> PausedBy:
        """For the record; empty when nobody asks."""
        if self._machine and not self.is_asked:
            return self._machine.word
        return "asked" if self._requested.is_set() else ""

    @property
    def sentence(self) -> str:
        """Why, and how it ends; empty when nobody asks."""
        if self._machine and not self.is_asked:
            return f"{self._machine.sentence}; training goes on by itself"
        asked = "`noloco pause` asked for it; `noloco resume` goes on, `noloco leave` ends it"
        return asked if self._requested.is_set() else ""


async def watch_machine(settings: PeerSettings, pausing: Pausing) -> list[asyncio.Task[None]]:
    """The task that looks at this machine; none where the settings let the peer train at any time."""
    free_time = FreeTime(settings)
    if not free_time.is_limited:
        return []
    gpu = await asyncio.to_thread(GpuUse) if free_time.spares_gpu else None  # a driver may take a second to answer
    if gpu and gpu.why_unknown and settings.on_busy_gpu == "never":
        log.warning("--on-busy-gpu never is ignored: %s", gpu.why_unknown)
    return [asyncio.create_task(watch(free_time, pausing, MachineUse(gpu=gpu).look))]


async def watch(free_time: FreeTime, pausing: Pausing, look: Callable[[], Seen], *, every_s: float = LOOK_S) -> None:
    """Look again and again, on another thread, and tell `pausing` what it comes to."""
    while True:
        try:
            pausing.heed(free_time.why_not(await asyncio.to_thread(look), now_s=time.monotonic()))
        except Exception:  # the peer goes on as it is
            log.exception("the use of this machine could not be found out")
        await asyncio.sleep(every_s)
