from __future__ import annotations

import io
import re
import sys
import threading
from typing import Any

import pytest
from harness.patience import PATIENCE_S
from harness.processes import until
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.telemetry import progress as module
from noloco_p2p.telemetry.console import duration
from noloco_p2p.telemetry.progress import WINDOW_S, Progress, Task, line


def test_a_steady_flow_has_its_rate_and_time_left() -> None:
    task = Task("fetching", unit="bytes", now_s=100.0)
    for second in range(1, 41):
        task.report(50 * second, 3000, now_s=100.0 + second)
    assert task.rate_per_s(now_s=140.0) == pytest.approx(50.0)
    assert task.as_dict(now_s=140.0)["left_s"] == pytest.approx(20.0)


def test_the_rate_is_of_the_last_seconds_not_of_the_beginning() -> None:
    task = Task("fetching", unit="bytes", now_s=0.0)
    task.report(1_000_000, 2_000_000, now_s=1.0)
    for second in range(2, 60):
        task.report(1_000_000 + 10 * second, 2_000_000, now_s=float(second))
    assert task.rate_per_s(now_s=59.0) == pytest.approx(10.0, rel=0.05)


def test_what_stands_still_has_no_time_left() -> None:
    task = Task("fetching", unit="bytes", now_s=0.0)
    assert task.as_dict(now_s=5.0)["left_s"] is None
    for second in range(1, 100):
        task.report(7, 10, now_s=float(second))
    assert task.rate_per_s(now_s=99.0) == 0.0
    assert task.as_dict(now_s=99.0)["left_s"] is None


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1000)), max_size=200))
def test_a_task_stays_small_and_its_rate_is_never_negative(steps: list[tuple[float, int]]) -> None:
    task, now_s = Task("fetching", unit="bytes", now_s=0.0), 0.0
    for seconds, done in steps:  # counts may fall, as after a restart
        now_s += seconds
        task.report(done, 1000, now_s=now_s)
        assert task.rate_per_s(now_s=now_s) >= 0
        assert len(task._samples) <= WINDOW_S / 0.25 + 3


def test_the_innermost_task_is_told_and_all_end() -> None:
    progress = Progress()
    assert progress.now() is None
    with progress.task("merging", unit="peers") as outer:
        outer(1, 4)
        with progress.task("fetching", unit="bytes") as inner:
            inner(10, 100)
            now = progress.now()
            assert now is not None
            assert (now["what"], now["done"], now["total"], now["unit"]) == ("fetching", 10, 100, "bytes")
        assert (progress.now() or {})["what"] == "merging"
    with pytest.raises(ValueError, match="no"), progress.task("broken"):
        raise ValueError("no")
    assert progress.now() is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "fetching: 2.0 MiB of 8.0 MiB, 1.0 MiB/s, 1 min 35 s left"),
        ({"left_s": None, "rate_per_s": 0.0}, "fetching: 2.0 MiB of 8.0 MiB, 0 B/s, no progress"),
        ({"total": None}, "fetching: 12 s so far"),
        ({"unit": "batches", "done": 3, "total": 20, "rate_per_s": 1.5}, "fetching: 3 of 20 batches, 1 min 35 s left"),
    ],
)
def test_a_task_is_one_line(changes: dict[str, Any], text: str) -> None:
    task = {"what": "fetching", "since_s": 12.0, "unit": "bytes", "done": 2 << 20, "total": 8 << 20}
    assert line({**task, "rate_per_s": float(1 << 20), "left_s": 95.0, **changes}) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (95, "1 min 35 s"), (7300, "2 h 1 min"), (400_000, "4 d 15 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Screen(io.StringIO):
    """Standard output, which is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.01)
    said: list[str] = []
    enough = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) >= 2:
            enough.set()

    with Progress(say).task("reading", unit="tokens") as report:
        report(500, 1000)
        said.clear()
        assert enough.wait(PATIENCE_S)
    assert all(re.match(r"reading: 500 of 1k tokens, ", text) for text in said), said
    assert not [thread for thread in threading.enumerate() if thread.name == "noloco-progress"]


def test_what_is_quick_is_not_drawn_and_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    with Progress(said.append).task("reading") as report:
        report(1, 2)
    assert said == []
    assert screen.getvalue() == ""


def test_bars_of_nested_tasks_fit_a_terminal_of_80_columns_and_go_when_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(module, "TELL_AFTER_S", 0.0)
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    said: list[str] = []
    progress = Progress(said.append)
    with (
        progress.task("merging", unit="peers") as outer,
        progress.task("fetching the state of ..7f3a1c", unit="bytes") as inner,
    ):
        outer(1, 4)
        inner(3 << 20, 8 << 20)
        until(lambda: "3.0 MiB of 8.0 MiB" in screen.getvalue(), what=screen.getvalue)
    assert "merging" in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue(), "the cursor is shown again"
    assert [re.match(r"fetching the state of ..7f3a1c: 3.0 MiB in", said[0]) is not None, "merging" in said[1]] == [
        True
    ] * 2
