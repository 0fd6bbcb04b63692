from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from harness.crowd import Crowd

from noloco_p2p.monitor import history as module
from noloco_p2p.monitor.collect import Watcher
from noloco_p2p.monitor.history import MAX_SAMPLES, SAMPLE_S, History
from noloco_p2p.ticket import Ticket

BEGAN_S = 1_800_000_000.0


def summaries(num_peers: int, *, every_s: float, number: int) -> list[dict[str, Any]]:
    crowd, watcher = Crowd(num_peers, began_s=BEGAN_S), Watcher(Ticket("crowd", "0" * 64, ()))
    found = []
    for index in range(number):
        now_s = BEGAN_S + 1000 + index * every_s
        found.append(watcher.take(crowd.records(now_s), directory_age_s=0.5, now_s=now_s))
    return found


def test_there_is_one_sample_per_interval_of_the_swarm_and_of_each_peer() -> None:
    history, taken = History(), summaries(3, every_s=SAMPLE_S / 2, number=9)
    for summary in taken:
        history.add(summary)
    names = [peer["peer_id"] for peer in taken[0]["peers"]]
    curves = history.columns([*names, "nobody"])
    assert curves["alive"] == [3] * 5
    assert [round(b - a) for a, b in pairwise(curves["time_s"])] == [10] * 4
    assert curves["swaps"] == [summary["totals"]["swaps"] for summary in taken[::2]]
    assert list(curves["losses"]) == names
    assert curves["losses"][names[1]] == pytest.approx([s["peers"][1]["loss"] for s in taken[::2]], abs=1e-4)


def test_the_time_left_follows_from_the_progress_of_the_last_ten_minutes() -> None:
    history, (summary,) = History(), summaries(1, every_s=1.0, number=1)
    assert history.left_s() is None
    for tick in range(121):  # 0.1 % in each of the first ten minutes, and 1 % in each of the next ten
        progress = 0.001 * min(tick, 60) / 6 + 0.01 * max(0, tick - 60) / 6
        totals = {**summary["totals"], "progress": progress}
        history.add({**summary, "time_s": BEGAN_S + SAMPLE_S * tick, "totals": totals})
    assert history.left_s() == pytest.approx(60 * (1 - 0.11) / 0.01)


def test_the_curves_of_a_long_run_are_small_and_without_a_gap() -> None:
    history, (summary,) = History(), summaries(2, every_s=1.0, number=1)
    num_ticks = 2 * 8_640  # two days
    for tick in range(num_ticks):
        history.add({**summary, "time_s": BEGAN_S + SAMPLE_S * tick})
    times = history.columns([])["time_s"]
    assert MAX_SAMPLES / 2 <= len(times) <= MAX_SAMPLES
    assert BEGAN_S + SAMPLE_S * num_ticks - times[-1] <= history.interval_s
    assert times[0] - BEGAN_S <= history.interval_s
    assert all(b - a == history.interval_s for a, b in pairwise(times))


def test_the_curves_of_many_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOSSES", 2_000)
    history, (summary,) = History(), summaries(100, every_s=1.0, number=1)
    for tick in range(200):
        history.add({**summary, "time_s": BEGAN_S + SAMPLE_S * tick})
        assert len(history.columns([])["time_s"]) <= 20
    names = [peer["peer_id"] for peer in summary["peers"]]
    assert len(history.columns(names)["losses"]) == module.MAX_SERIES
