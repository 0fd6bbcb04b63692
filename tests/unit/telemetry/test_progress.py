from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from harness.patience import PATIENCE_S
from harness.processes import until
from hypothesis import given
from hypothesis import strategies as st

from noloco_p2p.telemetry import progress as module
from noloco_p2p.telemetry.progress import WINDOW_S, Progress, Task, line


@pytest.mark.parametrize(
    ("done", "rate_per_s", "left_s"),
    [
        (lambda second: 50 * second, 50.0, 1000.0),
        (lambda second: 1000 + 10 * second, 10.0, 5140.0),  # not the rate of the beginning
        (lambda second: 7, 0.0, None),
    ],
    ids=["steady", "slower", "stalled"],
)
def test_the_rate_is_that_of_the_last_seconds(
    done: Callable[[int], int], rate_per_s: float, left_s: float | None
) -> None:
    task = Task("fetching", unit="bytes", now_s=100.0)
    assert task.as_dict(now_s=100.0)["left_s"] is None
    for second in range(1, 61):
        task.report(done(second), done(60) + int(rate_per_s * (left_s or 0)), now_s=100.0 + second)
    assert task.rate_per_s(now_s=160.0) == pytest.approx(rate_per_s)
    assert task.as_dict(now_s=160.0)["left_s"] == left_s


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
