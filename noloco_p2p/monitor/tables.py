"""Defines what a monitor shows of a swarm, as text: values of the whole swarm, and tables of its peers and stages.

The page shows the same text as the terminal, where rich draws it in any size. Elsewhere, there are plain lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noloco_p2p.errors import SettingsError
from noloco_p2p.monitor.watcher import Health
from noloco_p2p.telemetry.console import aligned, cells, count, duration, loss, mib, percent, validation
from noloco_p2p.telemetry.metrics import FAILED, IN_COLUMNS, METRICS

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

Row = dict[str, Any]  # a peer or a stage in the summary of `Watcher`
STYLES = {"alive": "", "silent": "yellow", "leaving": "cyan", "left": "dim", "gone": "dim"}
LEVELS = {"bad": "bold red", "warn": "yellow", "info": "dim"}
MAX_NOTICES = 4
STAGES_SHARE = 3  # the table of stages uses at most a third of the height
IN_HEADLINE = 4  # values of the swarm; the others are on the second line
HERE = " (here)"  # on this machine
GAP = 2  # between two columns


def _number(value: float) -> str:
    return f"{value:.1f}"


FORMATS: dict[str, Callable[[Any], str]] = {  # by unit
    "nats/token": loss,
    "tokens/s": count,
    "tokens": count,
    "bytes": mib,
    "s": duration,
    "fraction": percent,
    "swaps/min": _number,
    "steps": _number,
}
TEXTS: dict[str, Callable[[Row], str]] = {"validation_loss": validation}  # of a metric that is shown with another


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of peers or of the table of stages.

    `value` is what rows are sorted by; None and "" come last, and are shown as `-` if there is no `text`. If there is
    too little space, the columns with the highest `rank` are left out first.
    """

    name: str
    rank: int
    value: Callable[[Row], Any]
    text: Callable[[Row], str] | None = None
    format: Callable[[Any], str] = str
    is_text: bool = False

    def show(self, row: Row) -> str:
        if self.text:
            return self.text(row)
        value = self.value(row)
        return "-" if value in (None, "") else self.format(value)


def _state(peer: Row) -> str:
    """For a live peer, return the state that it reports; for any other peer, return its health."""
    if peer["health"] != Health.ALIVE:
        return peer["health"]
    return f"{peer['state']} ({peer['paused_by']})" if peer["paused_by"] else peer["state"]


def _state_key(peer: Row) -> str:
    return f"{list(Health).index(Health(peer['health']))} {peer['state']} {peer['peer_id']}"


def _failures(failed: dict[str, int]) -> str:
    """Format failed swaps by kind, with the most frequent kind first: `3 slow, 1 unreachable`."""
    return ", ".join(f"{number} {kind}" for kind, number in sorted(failed.items(), key=lambda item: -item[1]) if number)


def _field(name: str, rank: int, key: str = "", **more: Any) -> Column:
    """Return the column that shows the field `key` of a row, or the field that has the column's name."""
    return Column(name, rank, lambda row: row[key or name], **more)


PEER = Column(
    "peer", 0, lambda peer: peer["name"].casefold(), lambda peer: peer["shown"] + HERE * peer["is_own"], is_text=True
)
STAGE_OF_PEER = _field("stage", 1)
COLUMNS = (
    Column("state", 0, _state_key, _state, is_text=True),
    *(
        _field(
            about.shown.column,
            about.shown.rank,
            name,
            text=TEXTS.get(name),
            format=FORMATS.get(about.unit, str),
        )
        for name, about in ((name, METRICS[name]) for name in IN_COLUMNS)
    ),
    _field("last with", 5, "last_shown", is_text=True),
    _field("moves others", 10, "moves_others", format=percent),
    _field("reach", 13, "reachability", is_text=True),
    _field("version", 10, "software", is_text=True),
    _field("heard", 0, "age_s", format=lambda age_s: f"{duration(age_s)} ago"),
    Column("failed", 11, lambda p: sum(p["failed"].values()), lambda p: _failures(p["failed"]) or "-", is_text=True),
)
BY_NAME = {column.name: column for column in (PEER, *COLUMNS, STAGE_OF_PEER)}
STAGE_COLUMNS = (
    _field("stage", 0, format=lambda stage: f"{stage}{'' if stage else ' (head)'}", is_text=True),
    _field("peers", 0, format=lambda number: str(number or "empty")),
    _field("capacity", 0, format=count),
    _field("tokens/s", 1, "tokens_per_s", format=count),
    _field("queue", 2),
    _field("microbatches", 4),
    _field("late", 3, "late_share", format=percent),
    _field("lost", 3, "lost_share", format=percent),
    _field("apart", 5, format=percent),
)


def columns_of(swarm: Row) -> tuple[Column, ...]:
    """Return the columns of the table of peers, with the stage only if there are stages.

    The state follows the peer, because its letters separate a name in a right-to-left script from the numbers.
    """
    state, *others = COLUMNS
    return (PEER, state, *((STAGE_OF_PEER,) if swarm["stages"] else ()), *others)


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

    def of(self, peers: Sequence[Row]) -> list[Row]:
        value, words = BY_NAME[self.sort].value, self.words.lower()
        names = ("peer_id", "shown", "state", "paused_by", "health", "last_shown", "reachability", "software")
        chosen = [peer for peer in peers if not words or any(words in peer[name].lower() for name in names)]
        known = [peer for peer in chosen if value(peer) not in (None, "")]
        known.sort(key=value, reverse=self.descending)
        return known + [peer for peer in chosen if value(peer) in (None, "")]


def values(swarm: Row, *, left_s: float | None = None) -> Iterator[dict[str, str]]:
    """Yield the values of the whole swarm: each has a name, a text and details.

    `left_s` is the expected time until the schedule is complete.
    """

    def told(name: str, text: str, details: str = "") -> dict[str, str]:
        return {"name": name, "text": text, "details": details}

    def mean(name: str, show: Callable[[Any], str]) -> dict[str, str]:
        if totals[name] is None:
            return told(name, "-")
        return told(name, show(totals[name]), f"{show(totals[f'{name}_lowest'])} to {show(totals[f'{name}_highest'])}")

    totals, lately = swarm["totals"], swarm["totals"]["lately"]
    others = [f"{totals[kind]} {kind}" for kind in Health if kind is not Health.ALIVE and totals[kind]]
    yield told("peers alive", str(totals[Health.ALIVE]), ", ".join(others))
    yield mean("loss", loss)
    yield told("tokens/s", count(totals["tokens_per_s"]))
    done = "-" if totals["progress"] is None else f"{100 * totals['progress']:.1f} %"
    yield told("done", done, "" if left_s is None else f"about {duration(left_s)} left")
    yield mean("apart", percent)
    if totals["link_use"] is not None:  # somebody trains
        swapping = f"{totals['swaps_per_min']:.1f} swaps/min per peer, {totals['age_steps']:.1f} steps old"
        yield told("link in use", percent(totals["link_use"]), swapping)
    failed = {name.removeprefix("failed_"): lately[name] for name in FAILED}
    attempts = lately["swaps"] + sum(failed.values())
    share = percent(sum(failed.values()) / attempts) if attempts else "-"
    window = duration(totals["lately_s"]).removesuffix(" 0 s")
    yield told("failed swaps", share, _failures(failed) or (f"of {attempts} in {window}" if attempts else ""))
    yield told("sent", mib(totals["bytes_sent"]), f"in {count(totals['swaps'])} swaps")


def headlines(swarm: Row) -> list[str]:
    """Return lines about the whole swarm: `run tiny | peers alive 3 (1 gone) | loss 1.498 (1.4 to 1.6) | ..`, more
    values, and the model and the data if they are known.
    """
    shown = [
        f"{value['name']} {value['text']}" + (f" ({value['details']})" if value["details"] else "")
        if value["text"] != "-"
        else ""
        for value in values(swarm)
    ]
    first, second = shown[:IN_HEADLINE], shown[IN_HEADLINE:]
    lines = [" | ".join(filter(None, line)) for line in ([f"run {swarm['run']}", *first], second)]
    return [*lines, swarm["about"]] if swarm["about"] else lines


def view(swarm: Row, choice: Choice, *, width: int, height: int) -> Group:
    """Draw a page of `width` x `height` cells, with the headline, notices, stages, and as many peers as fit."""
    from rich.console import Group
    from rich.text import Text

    peers = choice.of(swarm["peers"])
    first, *others = headlines(swarm)
    lines = [Text(first, style="bold"), *(Text(line, style="dim") for line in others)]
    told = swarm["notices"][:MAX_NOTICES] or [{"level": "info", "text": "All is well."}]
    lines += [Text(notice["text"], style=LEVELS[notice["level"]]) for notice in told]
    more = "and {} more: use --filter, --sort or a larger window"
    stages = swarm["stages"][: height // STAGES_SHARE]
    used = sum(len(textwrap.wrap(line.plain, width)) for line in [*lines, Text(more)])
    used += len(stages) + 2 if stages else 0  # plus a header, and a line about hidden stages
    # Without a blank line, the header, a line about columns, and the line that a terminal reserves for the cursor.
    shown = peers[: max(1, height - used - 4)]
    parts: list[Any] = [*lines, Text("")]
    if stages:
        hidden = len(swarm["stages"]) - len(stages)
        rest = f"and {hidden} more stages with more capacity" if hidden else ""
        styles = ["" if stage["peers"] else LEVELS["bad"] for stage in stages]
        parts += [_drawn(stages, STAGE_COLUMNS, styles, width=width), Text(rest, style="dim")]
    styles = [STYLES[peer["health"]] for peer in shown]
    columns = columns_of(swarm)
    parts.append(table := _drawn(shown, columns, styles, width=width, sort=choice.sort))
    if num_hidden := len(columns) - len(table.columns):
        parts.append(Text(f"columns that need a wider window: {num_hidden}", style="dim"))
    if len(shown) < len(peers):
        parts.append(Text(more.format(len(peers) - len(shown)), style="dim"))
    elif choice.words:
        parts.append(Text(f"{len(shown)} of {len(swarm['peers'])} peers match {choice.words!r}", style="dim"))
    return Group(*parts)


def _drawn(
    rows: Sequence[Row], columns: Sequence[Column], styles: Sequence[str], *, width: int, sort: str = ""
) -> Table:
    """Draw the rows with the columns that fit into `width` cells."""
    from rich.table import Table
    from rich.text import Text

    shown = {column.name: [column.show(row) for row in rows] for column in columns}
    widths = {name: max(map(cells, [name, *column])) for name, column in shown.items()}
    left = list(columns)
    while len(left) > 1 and sum(widths[column.name] + GAP for column in left) - GAP > width:
        left.remove(max(left, key=lambda column: column.rank))
    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in left:
        name = Text(column.name, style="underline" if column.name == sort else "")
        drawn.add_column(name, justify="left" if column.is_text else "right", no_wrap=True, overflow="ellipsis")
    for index, style in enumerate(styles):
        drawn.add_row(*(Text(shown[column.name][index]) for column in left), style=style)
    return drawn


def plain(swarm: Row, choice: Choice | None = None) -> list[str]:
    """Return the headline, the notices, and a line for each stage and each peer, for logs and pipes."""
    lines = [*headlines(swarm), *(notice["text"] for notice in swarm["notices"])]
    for rows, columns in (
        (swarm["stages"], STAGE_COLUMNS if swarm["stages"] else ()),
        ((choice or Choice()).of(swarm["peers"]), columns_of(swarm)),
    ):
        if columns:
            head = tuple(column.name for column in columns)
            lines += aligned([head, *(tuple(column.show(row) for column in columns) for row in rows)])
    return lines
