"""Defines what a monitor shows of a swarm, as text: values of the whole swarm, and tables of its peers and stages.

The terminal and the page show the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from noloco_p2p.errors import SettingsError
from noloco_p2p.monitor.roster import Health
from noloco_p2p.telemetry.console import count, duration, loss, mib, named, percent
from noloco_p2p.telemetry.metrics import FAILED, IN_COLUMNS, METRICS, About

Peer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of peers or of the table of stages.

    `show` formats a cell. `key` sorts the rows, with None last. Stages are not sorted. If there is too little space,
    the columns with the highest `rank` are left out first.
    """

    name: str
    rank: int
    show: Callable[[dict[str, Any]], str]
    key: Callable[[Peer], Any] = lambda peer: None
    is_text: bool = False


def state_of(peer: Peer) -> str:
    """For a live peer, return the state that it reports; for any other peer, return its health."""
    if peer["health"] != Health.ALIVE:
        return peer["health"]
    return f"{peer['state']} ({peer['paused_by']})" if peer["paused_by"] else peer["state"]


def failures(failed: dict[str, int]) -> str:
    """Format failed swaps by kind, with the most frequent kind first: `3 slow, 1 unreachable`."""
    return ", ".join(f"{number} {kind}" for kind, number in sorted(failed.items(), key=lambda item: -item[1]) if number)


def _state_key(peer: Peer) -> str:
    return f"{list(Health).index(Health(peer['health']))} {peer['state']} {peer['peer_id']}"


def _number(value: float) -> str:
    return f"{value:.1f}"


def _or_dash(value: Any, show: Callable[[Any], str] = str) -> str:
    return "-" if value in (None, "") else show(value)


def _column(name: str, about: About) -> Column:
    show = FORMATS.get(about.unit, str)
    is_text = about.kind == "text"
    return Column(about.column, about.rank, lambda p: _or_dash(p[name], show), lambda p: p[name], is_text=is_text)


FORMATS: dict[str, Callable[[Any], str]] = {  # by unit
    "nats/token": loss,
    "tokens/s": count,
    "tokens": count,
    "bytes": mib,
    "peer id": named,
    "s": duration,
    "fraction": percent,
    "swaps/min": _number,
    "steps": _number,
}
COLUMNS = (
    Column("peer", 0, lambda p: named(p["peer_id"]), lambda p: p["peer_id"], is_text=True),
    Column("state", 0, state_of, _state_key, is_text=True),
    *(_column(name, METRICS[name]) for name in IN_COLUMNS),
    Column("reach", 13, lambda p: p["reachability"], lambda p: p["reachability"], is_text=True),
    Column("version", 10, lambda p: p["software"], lambda p: p["software"], is_text=True),
    Column("heard", 0, lambda p: f"{duration(p['age_s'])} ago", lambda p: p["age_s"]),
    Column("failed", 11, lambda p: failures(p["failed"]) or "-", lambda p: sum(p["failed"].values()), is_text=True),
)
NAME_OF_PEER = Column("name", 4, lambda p: _or_dash(p["name"]), lambda p: p["name"] or None, is_text=True)
STAGE_OF_PEER = Column("stage", 1, lambda p: _or_dash(p["stage"]), lambda p: p["stage"])
BY_NAME = {column.name: column for column in (*COLUMNS, STAGE_OF_PEER, NAME_OF_PEER)}
STAGE_COLUMNS = (
    Column("stage", 0, lambda s: f"{s['stage']}{' (head)' if s['stage'] == 0 else ''}", is_text=True),
    Column("peers", 0, lambda s: str(s["peers"] or "empty")),
    Column("capacity", 0, lambda s: count(s["capacity"])),
    Column("tokens/s", 1, lambda s: count(s["tokens_per_s"])),
    Column("queue", 2, lambda s: str(s["queue"])),
    Column("microbatches", 4, lambda s: str(s["microbatches"])),
    Column("late", 3, lambda s: _or_dash(s["late_share"], percent)),
    Column("lost", 3, lambda s: _or_dash(s["lost_share"], percent)),
    Column("apart", 5, lambda s: _or_dash(s["apart"], percent)),
)


def columns_of(swarm: dict[str, Any]) -> tuple[Column, ...]:
    """Return the columns of the table of peers, with stages and names only if there are any.

    The state follows the name, because its letters separate a name in a right-to-left script from the numbers.
    """
    stage = (STAGE_OF_PEER,) if swarm["stages"] else ()
    name = (NAME_OF_PEER,) if any(peer["name"] for peer in swarm["peers"]) else ()
    return (*COLUMNS[:1], *stage, *name, *COLUMNS[1:])


@dataclass(frozen=True, slots=True)
class Choice:
    """The column to sort by, and a filter, which keeps peers with `words` in their id, name, state, partner, reach or
    version.
    """

    sort: str = "state"
    words: str = ""
    descending: bool = False

    def __post_init__(self) -> None:
        if self.sort not in BY_NAME:
            raise SettingsError(f"--sort {self.sort!r} is not a column; choose one of: {', '.join(BY_NAME)}")

    def of(self, peers: Sequence[Peer]) -> list[Peer]:
        key, words = BY_NAME[self.sort].key, self.words.lower()
        chosen = [peer for peer in peers if not words or any(words in text.lower() for text in _texts(peer))]
        known = [peer for peer in chosen if key(peer) is not None]
        known.sort(key=key, reverse=self.descending)
        return known + [peer for peer in chosen if key(peer) is None]


def _texts(peer: Peer) -> tuple[str, ...]:
    names = ("peer_id", "name", "state", "paused_by", "health", "last_partner", "reachability", "software")
    return tuple(peer[name] for name in names)


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the whole swarm, with details about it."""

    name: str
    text: str
    details: str = ""


def values(swarm: dict[str, Any], *, left_s: float | None = None) -> Iterator[Value]:
    """Yield the values of the whole swarm. `left_s` is the expected time until the schedule is complete."""
    totals, lately = swarm["totals"], swarm["totals"]["lately"]
    others = [f"{totals[kind]} {kind}" for kind in Health if kind is not Health.ALIVE and totals[kind]]
    yield Value("peers alive", str(totals[Health.ALIVE]), ", ".join(others))
    yield _mean("loss", loss, totals)
    yield Value("tokens/s", count(totals["tokens_per_s"]))
    left = "" if left_s is None else f"about {duration(left_s)} left"
    yield Value("done", _or_dash(totals["progress"], lambda share: f"{100 * share:.1f} %"), left)
    yield _mean("apart", percent, totals)
    if totals["link_use"] is not None:  # somebody trains
        swapping = f"{totals['swaps_per_min']:.1f} swaps/min per peer, {totals['age_steps']:.1f} steps old"
        yield Value("link in use", percent(totals["link_use"]), swapping)
    failed = {name.removeprefix("failed_"): lately[name] for name in FAILED}
    attempts = lately["swaps"] + sum(failed.values())
    share = percent(sum(failed.values()) / attempts) if attempts else "-"
    yield Value("failed swaps", share, failures(failed) or (f"of {attempts} in 10 min" if attempts else ""))
    yield Value("sent", mib(totals["bytes_sent"]), f"in {count(totals['swaps'])} swaps")


def _mean(name: str, show: Callable[[Any], str], totals: dict[str, Any]) -> Value:
    mean, lowest, highest = totals[name], totals[f"{name}_lowest"], totals[f"{name}_highest"]
    return Value(name, "-") if mean is None else Value(name, show(mean), f"{show(lowest)} to {show(highest)}")
