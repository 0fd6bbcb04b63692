"""Machine-readable events: one JSON object per line, appended to a file in the run folder."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

EVENT_VERSION = 1


class EventLog:
    """Appends events to a file. A full disk is reported once, and does not stop training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. `fields` must be JSON values. Non-finite numbers become null."""
        entry = {"v": EVENT_VERSION, "time_s": round(time.time(), 3), "event": event, **fields}
        line = json.dumps({key: _json_number(value) for key, value in entry.items()})
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._failed:
                log.error("cannot write events to %s (further errors are not logged): %s", self.path, error)
            self._failed = True


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events in all complete lines, or an empty list if the file does not exist yet."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
