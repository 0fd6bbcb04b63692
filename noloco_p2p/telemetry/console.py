"""Formats numbers and reports for people. Only code in `cli` prints the results."""

from __future__ import annotations

import logging
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from noloco_p2p.errors import printable
from noloco_p2p.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

ALONE = "training alone: no other live peer"


class PrintableStream:
    """Standard output or standard error that shows control characters as escapes, because a stranger may have written
    them.

    `rich_proxied_file` is the stream itself, to which rich writes the colours and the cursor movements of a display.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    @classmethod
    def around(cls, stream: TextIO) -> TextIO:
        return stream if isinstance(stream, cls) else cast("TextIO", cls(stream))

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class LastingStream:
    """A stream that drops what it can no longer write, so that a program outlives its terminal, pipe or log disk."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._guarded():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guarded():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # so that the next writes succeed, and that at the exit
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            log.warning("%s ends here (%s), but the program continues", self._stream.name, error.strerror)


def outlive_output() -> None:
    """Let this program continue if its standard output or standard error can no longer be written."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        lasting = cast("TextIO", LastingStream(getattr(stream, "rich_proxied_file", stream)))
        setattr(sys, name, PrintableStream(lasting))


def terminal() -> Console:
    """Return rich's console for displays on standard output. Text in a display must be printable."""
    from rich.console import Console

    return Console(file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))


def mib(num_bytes: float) -> str:
    """Format a number of bytes: 3_400_000 -> '3.2 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def count(number: float) -> str:
    """Format a count: 1_234_567 -> '1.23M'."""
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * limit:  # because the result is rounded to three digits
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: 1 -> '1 peer', 2 -> '2 peers'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """Format a duration: 8.4 -> '8 s', 95 -> '1 min 35 s', 7_300 -> '2 h 1 min', 400_000 -> '4 d 15 h'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def percent(share: float) -> str:
    """Format a share: 0.0039 -> '0.39 %', 0.34 -> '34 %', 0.00001 -> '<0.01 %'."""
    if 0 < share < 1e-4:
        return "<0.01 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def validation(metrics: Mapping[str, Any]) -> str:
    """Format the validation loss, with the position in the schedule at which it was measured: `2.410 at 36 %`."""
    at = metrics["validation_progress"]
    return loss(metrics["validation_loss"]) + ("" if at is None else f" at {percent(at)}")


def report_line(metrics: Metrics, *, num_live: int) -> str:
    """Format a report: `step 1,234 | 12.3 % | loss 3.214 | 1.2k tokens/s | (swaps) | 7 peers`.

    Without other live peers, `training alone: ..` replaces the last two, which would describe the past.
    """
    parts = [
        f"step {metrics.step:,}",
        f"{100 * metrics.progress:.1f} %",
        f"loss {loss(metrics.loss)}",
        f"{count(metrics.tokens_per_s)} tokens/s",
        *([describe_swaps(metrics), counted(num_live + 1, "peer")] if num_live else [ALONE]),
    ]
    return " | ".join(parts)


def given(metrics: Mapping[str, Any]) -> str:
    """Describe what a peer has contributed: `2 h 5 min of training, 3.41M tokens, 41 swaps`."""
    tokens = [] if metrics["tokens"] is None else [f"{count(metrics['tokens'])} tokens"]  # some trainers do not count
    return ", ".join([f"{duration(metrics['trained_s'] or 0)} of training", *tokens, counted(metrics["swaps"], "swap")])


def describe_swaps(metrics: Metrics) -> str:
    """Describe the recent swaps: `14 swaps/min, 1.3 steps old, 0.4 % apart`."""
    parts = [f"{metrics.swaps_per_min:.{0 if metrics.swaps_per_min >= 10 else 1}f} swaps/min"]
    if metrics.apart is not None:
        parts += [f"{metrics.age_steps:.1f} steps old", f"{percent(metrics.apart)} apart"]
    return ", ".join(parts)


def numbered_stages(stages: Sequence[int]) -> str:
    """Format stages: [2] -> 'stage 2', [1, 2] -> 'stages 1, 2'."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def cells(text: str) -> int:
    """Return the terminal columns that `text` occupies: two for a wide letter, none for a combining mark."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(char) in ("Mn", "Me") else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def aligned(rows: Sequence[Sequence[str]], *, num_left: int | None = None) -> list[str]:
    """Return one line per row, with aligned columns.

    The first `num_left` columns are left-aligned, and the others are right-aligned. With None, all are left-aligned.
    """
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if num_left is None else num_left
    return [
        "  ".join(
            cell + " " * (width - cells(cell)) if column < left else " " * (width - cells(cell)) + cell
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
