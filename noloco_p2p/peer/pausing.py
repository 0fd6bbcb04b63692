"""Decide whether this peer pauses.

It pauses if `noloco pause` asked for it, or if the machine is used in a way that the settings exclude.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from noloco_p2p.peer.free_time import FreeTime, Reason, Seen
from noloco_p2p.peer.machine_use import MachineUse
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.records import PausedBy

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two observations of the machine


class Pausing:
    """The state of a pause. `requested` is set while a pause is requested, and only the network thread changes it."""

    def __init__(self, requested: threading.Event) -> None:
        self.is_asked = False  # whether `noloco pause` asked for a pause
        self._requested = requested
        self._machine: Reason | None = None

    def ask(self) -> None:
        self.is_asked = True
        self._requested.set()

    def resume(self) -> None:
        """Withdraw the request of `noloco pause`. The use of the machine may still require a pause."""
        self.is_asked = False
        self.heed(self._machine)

    def heed(self, machine: Reason | None) -> None:
        """Set the reason why the use of the machine requires a pause now, or None if it does not."""
        self._machine = machine
        if self.is_asked or machine:
            self._requested.set()
        else:
            self._requested.clear()

    @property
    def word(self) -> PausedBy:
        """Return the reason as a word for the record, or "" if no pause is requested."""
        if self._machine and not self.is_asked:
            return self._machine.word
        return "asked" if self._requested.is_set() else ""

    @property
    def sentence(self) -> str:
        """Return a sentence with the reason and how the pause ends, or "" if no pause is requested."""
        if self._machine and not self.is_asked:
            return f"{self._machine.sentence}; training will resume automatically"
        asked = (
            "requested with `noloco pause`; run `noloco resume` to resume training, or `noloco leave` to stop the peer"
        )
        return asked if self._requested.is_set() else ""


def watch_machine(settings: PeerSettings, pausing: Pausing) -> list[asyncio.Task[None]]:
    """Start observing this machine, and return the tasks that do so.

    There is no task if the settings let the peer train at any time.
    """
    if settings.when == "always":
        return []
    return [asyncio.create_task(watch(FreeTime(settings), pausing, MachineUse().look))]


async def watch(free_time: FreeTime, pausing: Pausing, look: Callable[[], Seen], *, every_s: float = LOOK_S) -> None:
    """Observe the machine every few seconds on another thread, and pass the result to `pausing`."""
    while True:
        try:
            pausing.heed(free_time.why_not(await asyncio.to_thread(look), now_s=time.monotonic()))
        except Exception:  # the peer stays in its present state
            log.exception("the load on this machine could not be measured")
        await asyncio.sleep(every_s)
