"""Machine-readable events: one JSON object per line, appended to a file in the run folder."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

EVENT_VERSION = 1
MAX_BYTES = 64 * 2**20  # a week of reports every ten seconds; a full file is renamed and replaces the one before


class EventLog:
    """Appends events to a file. A full disk is reported once, and does not stop training.

    A file with more than MAX_BYTES is renamed, from events.jsonl to events.1.jsonl, and only one such file is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. `fields` must be JSON values. Non-finite numbers become null."""
        entry = {"v": EVENT_VERSION, "time_s": round(time.time(), 3), "event": event, **fields}
        line = json.dumps({key: _json_number(value) for key, value in entry.items()})
        try:
            with self.path.open("a+b") as file:
                if file.tell() > MAX_BYTES:
                    self.path.replace(self.path.with_suffix(f".1{self.path.suffix}"))
                    self.write(event, **fields)
                    return
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read() == b"\n" else f"\n{line}"  # a crash or a full disk cut the last line off
                file.write(f"{line}\n".encode())
        except OSError as error:
            if not self._failed:
                log.error("cannot write events to %s (further errors are not logged): %s", self.path, error)
            self._failed = True


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events in all complete lines, or an empty list if the file does not exist yet."""
    events: list[dict[str, Any]] = []
    with suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines(keepends=True):
            with suppress(ValueError):  # a crash or a full disk cut the line off
                if line.endswith(b"\n"):
                    events.append(json.loads(line))
    return events


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
