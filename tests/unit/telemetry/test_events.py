from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from noloco_p2p.telemetry import events
from noloco_p2p.telemetry.events import EVENT_VERSION, EventLog, read_events


def test_events_come_back_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write("started", peer_id="a")
    log.write("report", loss=1.5)
    EventLog(log.path).write("report", loss=math.nan)  # a second log on the same file appends, as after a restart
    found = read_events(log.path)
    assert [(event["event"], event.get("loss")) for event in found] == [
        ("started", None),
        ("report", 1.5),
        ("report", None),
    ]
    assert {event["v"] for event in found} == {EVENT_VERSION}


def test_half_a_line_is_not_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert read_events(log.path) == []
    log.write("started")
    with log.path.open("a") as file:
        file.write('{"v": 1, "eve')
    assert [event["event"] for event in read_events(log.path)] == ["started"]


def test_a_disk_that_fails_is_told_once_and_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path / "missing" / "events.jsonl")
    with caplog.at_level(logging.ERROR):
        log.write("report")
        log.write("report")
    assert len(caplog.records) == 1
    log.path.parent.mkdir()
    log.write("report")  # the disk is back
    assert len(read_events(log.path)) == 1


@pytest.mark.parametrize("cut", ['{"v": 1, "eve', "\0\0\0"])
def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path, cut: str) -> None:
    """As after a power failure or on a disk that was full for a moment."""
    log = EventLog(tmp_path / "events.jsonl")
    log.write("started")
    with log.path.open("a") as file:
        file.write(cut)
    log.write("report")
    assert [event["event"] for event in read_events(log.path)] == ["started", "report"]


def test_events_take_a_bounded_part_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_BYTES", 1000)
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(100):
        log.write("report", step=number)
    before, now = read_events(tmp_path / "events.1.jsonl"), read_events(log.path)
    assert [each["step"] for each in [*before, *now]][-1] == 99
    assert len(before) > 5
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2500
