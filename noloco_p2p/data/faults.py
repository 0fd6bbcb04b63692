"""What is wrong with the data: each fault with file, line and reason; skipped, told, counted, and never fatal alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

REMEMBERED = 100_000  # places; of faults beyond them some are counted once an epoch
TOLD_OF_A_FILE = 5  # each by itself; then every tenfold number of them


@dataclass(frozen=True, slots=True)
class Fault:
    """A line (from 1; of a table a row) that could not be used; `rest`: nor anything of its file behind it."""

    file: str
    line: int | None
    reason: str
    rest: bool = False

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{place}: {self.reason}" + ("; the rest of the file is left out" if self.rest else "")


class Faults:
    """Counts and tells each fault once. `on_fault` is called for it, on the thread that reads."""

    def __init__(self, on_fault: Callable[[Fault], None] | None = None) -> None:
        self.on_fault = on_fault
        self.last: Fault | None = None
        self._of_file: Counter[str] = Counter()
        self._seen: set[tuple[str, int | None]] = set()

    @property
    def count(self) -> int:
        return self._of_file.total()

    def note(self, fault: Fault) -> None:
        place = (fault.file, fault.line)
        if place in self._seen:  # an epoch comes by again
            return
        if len(self._seen) < REMEMBERED:
            self._seen.add(place)
        self.last = fault
        self._of_file[fault.file] += 1
        number = self._of_file[fault.file]
        if fault.rest or number <= TOLD_OF_A_FILE:
            log.warning("skipped: %s", fault)
        elif str(number).strip("0") == "1":
            log.warning("skipped: %d lines of %s by now, the last one for: %s", number, fault.file, fault.reason)
        if self.on_fault:
            self.on_fault(fault)
