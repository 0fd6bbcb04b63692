"""Stores the curves of a swarm's metrics in SQLite. Older samples are sparser, and the size of the file is bounded.

There is one tick every SAMPLE_S seconds. A sample that was taken at tick k and is `a` ticks old is kept if k is a
multiple of 2^j, where 2^j is the largest power of two up to a / FINE_TICKS, or 1 if `a` is less than FINE_TICKS. Each
doubling of the age costs FINE_TICKS rows per series, no matter how long the run is.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noloco_p2p.errors import SettingsError
from noloco_p2p.monitor.roster import Health, Meeting
from noloco_p2p.telemetry.totals import TOTALS

log = logging.getLogger(__name__)

SAMPLE_S = 10.0
FINE_TICKS = 360  # one hour
MAX_PEER_ROWS = 400_000  # about 25 MB
OCTAVES = 12  # doublings of age that fit: 360 ticks times 2^12 are half a year
THIN_EVERY_TICKS = 30
MAX_MEETINGS = 5_000
MAX_SERIES = 60  # maximum number of peers whose curves are returned at once
NAMES = (*(total.name for total in TOTALS), "spread")  # names of the totals whose curves are kept
SCHEMA = """
CREATE TABLE IF NOT EXISTS swarm (tick INTEGER PRIMARY KEY, alive INTEGER);
CREATE TABLE IF NOT EXISTS peer (id INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS sample (
    tick INTEGER, peer INTEGER, round INTEGER, loss REAL, tokens_per_s REAL, PRIMARY KEY (peer, tick)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sample_by_tick ON sample (tick);
CREATE TABLE IF NOT EXISTS meeting (at_s REAL, peer TEXT, partner TEXT);
"""


def _opened(path: Path | str) -> sqlite3.Connection:
    """Open the database, and create missing tables and columns. Raises sqlite3.Error if that fails."""
    db = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(SCHEMA)
        known = {name for _, name, *_ in db.execute("PRAGMA table_info(swarm)")}
        for name in (
            name for name in NAMES if name not in known
        ):  # they are missing if the file is new or from an older version
            db.execute(f"ALTER TABLE swarm ADD COLUMN {name} REAL")
    except sqlite3.Error:
        db.close()
        raise
    return db


class History:
    """The curves of one run, stored in one file. Any thread can use them. A write error is logged once."""

    def __init__(self, path: Path | str, *, max_peer_rows: int = MAX_PEER_ROWS) -> None:
        """Open the file, or create it. Raises SettingsError if that fails."""
        try:
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = _opened(path)
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"--history {path} cannot be used: {error}; choose another file") from None
        self._using = threading.Lock()  # guards the database connection and the caches of its rows
        self._ids = {name: number for number, name in self._db.execute("SELECT id, name FROM peer")}
        self._last_tick = self._db.execute("SELECT max(tick) FROM swarm").fetchone()[0] or 0
        self._failed = False
        self._thinned_tick = 0
        self._max_peer_rows = max_peer_rows

    def close(self) -> None:
        self._db.close()

    def add(self, summary: dict[str, Any], meetings: Sequence[Meeting]) -> bool:
        """Store a sample if one is due, and return whether one was due."""
        tick = int(summary["time_s"] // SAMPLE_S)
        if tick <= self._last_tick:
            return False
        self._last_tick = tick
        try:
            with self._using, self._db:
                self._insert(tick, summary, meetings)
                if tick - self._thinned_tick >= THIN_EVERY_TICKS:
                    self._thin(tick)
        except sqlite3.Error as error:
            if not self._failed:
                log.error("cannot store the curves (further errors are not logged): %s", error)
            self._failed = True
        return True

    def swarm(self) -> dict[str, list[Any]]:
        """Return the curves of the swarm as columns, which are `time_s`, `alive` and the totals."""
        with self._using:
            rows = self._db.execute(f"SELECT tick, alive, {', '.join(NAMES)} FROM swarm ORDER BY tick").fetchall()
        columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(2 + len(NAMES))]
        times = [tick * SAMPLE_S for tick in columns[0]]
        return {"time_s": times, **dict(zip(("alive", *NAMES), columns[1:], strict=True))}

    def peers(self, names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
        """Return the curves of the named peers as columns, which are `time_s`, `loss` and `tokens_per_s`.

        Unknown names are ignored, and at most MAX_SERIES peers are returned.
        """
        with self._using:
            return {name: self._curves(name) for name in [name for name in names if name in self._ids][:MAX_SERIES]}

    def meetings(self, *, since_s: float) -> list[Meeting]:
        query = "SELECT at_s, peer, partner FROM meeting WHERE at_s >= ? ORDER BY at_s"
        with self._using:
            return [Meeting(*row) for row in self._db.execute(query, (since_s,))]

    def num_rows(self) -> dict[str, int]:
        tables = ("swarm", "peer", "sample", "meeting")
        with self._using:
            return {name: self._db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}

    def _curves(self, name: str) -> dict[str, list[Any]]:
        rows = self._db.execute(
            "SELECT tick, loss, tokens_per_s FROM sample WHERE peer = ? ORDER BY tick", (self._ids[name],)
        ).fetchall()
        ticks, losses, speeds = ([list(column) for column in zip(*rows, strict=True)]) or ([], [], [])
        return {"time_s": [tick * SAMPLE_S for tick in ticks], "loss": losses, "tokens_per_s": speeds}

    def _insert(self, tick: int, summary: dict[str, Any], meetings: Sequence[Meeting]) -> None:
        totals = summary["totals"]
        # A sum of counts can exceed the range of SQLite's integers, which ends at 2^63.
        sums = [None if totals[name] is None else float(totals[name]) for name in NAMES]
        values = (tick, totals[Health.ALIVE] + totals[Health.SILENT], *sums)
        self._db.execute(f"INSERT OR REPLACE INTO swarm VALUES ({', '.join('?' * len(values))})", values)
        living = [peer for peer in summary["peers"] if peer["health"] in (Health.ALIVE, Health.SILENT)]
        self._name([peer["peer_id"] for peer in living])
        self._db.executemany(
            "INSERT OR REPLACE INTO sample VALUES (?, ?, ?, ?, ?)",
            ((tick, self._ids[p["peer_id"]], p["round"], p["loss"], p["tokens_per_s"]) for p in living),
        )
        self._db.executemany("INSERT INTO meeting VALUES (?, ?, ?)", ((m.at_s, m.peer, m.partner) for m in meetings))

    def _name(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._ids:
                number = self._db.execute("INSERT INTO peer (name) VALUES (?)", (name,)).lastrowid
                assert number is not None
                self._ids[name] = number

    def _thin(self, tick: int) -> None:
        self._thinned_tick = tick
        num_peers = max(1, self._db.execute("SELECT count(DISTINCT peer) FROM sample").fetchone()[0])
        fine = max(6, min(FINE_TICKS, self._max_peer_rows // (OCTAVES * num_peers)))
        for table, ticks in (("swarm", FINE_TICKS), ("sample", fine)):
            for octave in range(1, 24):
                older = tick - ticks * 2**octave
                self._db.execute(f"DELETE FROM {table} WHERE tick <= ? AND tick % ? != 0", (older, 2**octave))
        self._bound("sample", "tick", self._max_peer_rows)
        self._bound("meeting", "at_s", MAX_MEETINGS)
        self._db.execute("DELETE FROM peer WHERE id NOT IN (SELECT DISTINCT peer FROM sample)")
        self._ids = {name: number for number, name in self._db.execute("SELECT id, name FROM peer")}

    def _bound(self, table: str, order: str, limit: int) -> None:
        """Delete the oldest rows beyond `limit`."""
        row = self._db.execute(
            f"SELECT {order} FROM {table} ORDER BY {order} DESC LIMIT 1 OFFSET ?", (limit,)
        ).fetchone()
        if row:
            self._db.execute(f"DELETE FROM {table} WHERE {order} <= ?", row)
