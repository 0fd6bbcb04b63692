from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.crowd import Crowd

from noloco_p2p.errors import SettingsError
from noloco_p2p.monitor.collect import Watcher
from noloco_p2p.monitor.history import FINE_TICKS, MAX_MEETINGS, SAMPLE_S, THIN_EVERY_TICKS, History
from noloco_p2p.monitor.roster import Meeting
from noloco_p2p.ticket import Ticket

BEGAN_S = 1_800_000_000.0


def summaries(num_peers: int, *, every_s: float, number: int) -> list[dict[str, Any]]:
    crowd, watcher = Crowd(num_peers, began_s=BEGAN_S), Watcher(Ticket("crowd", "0" * 64, ()))
    found = []
    for index in range(number):
        now_s = BEGAN_S + 1000 + index * every_s
        watcher.take(crowd.records(now_s), directory_age_s=0.5, now_s=now_s)
        found.append(watcher.summary())
    return found


def test_curves_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "curves.sqlite"
    taken = summaries(3, every_s=SAMPLE_S, number=5)
    history = History(path)
    meeting = Meeting(BEGAN_S, "a", "b")
    assert [history.add(summary, [meeting]) for summary in taken] == [True] * 5
    assert not history.add(taken[-1], []), "one sample a tick"
    before, names = history.swarm(), [peer["peer_id"] for peer in taken[0]["peers"]]
    curves = history.peers(names)
    history.close()
    again = History(path)
    assert again.swarm() == before
    assert again.peers(names) == curves
    assert again.meetings(since_s=0.0) == [meeting] * 5
    assert not again.add(taken[-1], [])
    assert before["alive"] == [3] * 5
    assert [round(b - a) for a, b in pairwise(before["time_s"])] == [10] * 4
    assert set(curves) == set(names)
    assert all(len(curve["time_s"]) == len(curve["loss"]) == 5 for curve in curves.values())
    assert again.peers(["nobody"]) == {}
    again.close()


def test_a_month_of_curves_is_small_fine_at_the_end_and_without_a_gap() -> None:
    """A sample every 10 s for 30 days would take 259,200 rows for each series."""
    history = History(":memory:")
    (summary,) = summaries(2, every_s=1.0, number=1)
    first = int(summary["time_s"] // SAMPLE_S)
    last = first + 30 * 8640
    for tick in range(first, last + 1, 6):  # one a minute, which keeps the test quick
        history.add({**summary, "time_s": tick * SAMPLE_S + 1.0}, [])
    ticks = [int(time_s / SAMPLE_S) for time_s in history.swarm()["time_s"]]
    assert len(ticks) < FINE_TICKS * 12
    gaps = [(last - b, b - a) for a, b in pairwise(ticks)]
    for age, gap in gaps:
        # Ticks come every 6 here and are kept at multiples of a power of two, so gaps are their least common multiple.
        assert gap <= 6 * max(2, 2 * (age + THIN_EVERY_TICKS * 6) / FINE_TICKS), (age, gap)
    assert history.num_rows()["sample"] < 2 * FINE_TICKS * 12
    history.close()


def test_many_peers_and_meetings_are_bounded() -> None:
    history = History(":memory:", max_peer_rows=2_000)
    (summary,) = summaries(100, every_s=1.0, number=1)
    first = int(summary["time_s"] // SAMPLE_S)
    for tick in range(first, first + 10 * THIN_EVERY_TICKS):
        history.add({**summary, "time_s": tick * SAMPLE_S}, [Meeting(float(tick), "a", "b")] * 50)
    rows = history.num_rows()
    assert rows["sample"] <= 2_000 + THIN_EVERY_TICKS * 100
    assert rows["meeting"] <= MAX_MEETINGS + THIN_EVERY_TICKS * 50
    history.close()


def test_counts_beyond_what_sqlite_counts_are_kept() -> None:
    history = History(":memory:")
    (summary,) = summaries(2, every_s=1.0, number=1)
    summary["totals"]["swaps"] = 2**63
    assert history.add(summary, [])
    assert history.swarm()["swaps"] == [2.0**63]
    history.close()


def test_a_reader_is_not_thinned_under_its_hands() -> None:
    """The page reads curves in one thread while another takes a sample and deletes peers without samples."""
    history = History(":memory:")
    summary, *_ = summaries(2, every_s=1.0, number=1)
    history.add(summary, [])
    later = {**summary, "time_s": summary["time_s"] + THIN_EVERY_TICKS * SAMPLE_S, "peers": []}

    class Asked(dict[str, int]):
        def __contains__(self, name: object) -> bool:
            adding.start()
            adding.join(0.1)  # times out, as the reader holds the lock
            return super().__contains__(name)

    def add() -> None:
        history._db.execute("DELETE FROM sample")
        history.add(later, [])

    adding = threading.Thread(target=add)
    name = summary["peers"][0]["peer_id"]
    history._ids = Asked(history._ids)
    assert list(history.peers([name])) == [name]
    adding.join()
    assert history.peers([name]) == {}
    history.close()


def test_a_file_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a database, but long enough to be read as one" * 100)
    for path in (tmp_path / "file", tmp_path / "file" / "curves.sqlite"):
        with pytest.raises(SettingsError, match=r"--history .*file"):
            History(path)
