"""Shows the swarm as text: drawn by rich on a terminal of any size, and as plain lines elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noloco_p2p.errors import SettingsError
from noloco_p2p.monitor.roster import Health
from noloco_p2p.monitor.stages import Stage
from noloco_p2p.telemetry.console import aligned, cells, count, duration, loss, mib, named
from noloco_p2p.telemetry.metrics import IN_COLUMNS, METRICS, About

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

Peer = dict[str, Any]
STYLES = {"alive": "", "silent": "yellow", "leaving": "cyan", "left": "dim", "gone": "dim"}
LEVELS = {"bad": "bold red", "warn": "yellow", "info": "dim"}
MAX_NOTICES = 4
STAGES_SHARE = 3  # the table of stages uses at most a third of the height
GAP = 2  # between two columns


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of peers or of the table of stages.

    `show` formats a cell. `key` sorts the rows, with None last. Stages are not sorted. On a narrow terminal, the
    columns with the highest `rank` are left out first.
    """

    name: str
    rank: int
    show: Callable[[dict[str, Any]], str]
    key: Callable[[Peer], Any] = lambda peer: None
    is_text: bool = False


def _short(peer_id: str) -> str:
    return named(peer_id) if peer_id else "-"


def _why(peer: Peer) -> str:
    causes = {cause: number for cause, number in peer["alone_by_cause"].items() if number}
    return " ".join(f"{cause}:{number}" for cause, number in sorted(causes.items(), key=lambda item: -item[1])) or "-"


def state_of(peer: Peer) -> str:
    """For a live peer, return the state that it reports; for any other peer, return its health."""
    if peer["health"] != Health.ALIVE:
        return peer["health"]
    return f"{peer['state']} ({peer['paused_by']})" if peer["paused_by"] else peer["state"]


def _state_key(peer: Peer) -> tuple[int, str, str]:
    return list(Health).index(Health(peer["health"])), peer["state"], peer["peer_id"]


def _column(name: str, about: About) -> Column:
    show = FORMATS.get(about.unit, str)
    is_text = about.kind == "text"
    return Column(about.column, about.rank, lambda p: show(p[name]), lambda p: p[name], is_text=is_text)


FORMATS: dict[str, Callable[[Any], str]] = {  # by unit; page.js has the same formats
    "nats/token": loss,
    "tokens/s": count,
    "bytes": mib,
    "peer id": _short,
    "s": lambda seconds: "-" if seconds is None else duration(seconds),
    "tokens": lambda number: "-" if number is None else count(number),
}
COLUMNS = (
    Column("peer", 0, lambda p: _short(p["peer_id"]), lambda p: p["peer_id"], is_text=True),
    Column("state", 0, state_of, _state_key, is_text=True),
    *(_column(name, METRICS[name]) for name in IN_COLUMNS),
    Column("apart", 7, lambda p: percent(p["distance"]), lambda p: p["distance"]),
    Column("reach", 13, lambda p: p["reachability"], lambda p: p["reachability"], is_text=True),
    Column("version", 10, lambda p: p["software"], lambda p: p["software"], is_text=True),
    Column("heard", 0, lambda p: f"{duration(p['age_s'])} ago", lambda p: p["age_s"]),
    Column("why solo", 11, _why, lambda p: p["alone"], is_text=True),
)
NAME_OF_PEER = Column("name", 5, lambda p: p["name"] or "-", lambda p: p["name"] or None, is_text=True)
STAGE_OF_PEER = Column("stage", 1, lambda p: "-" if p["stage"] is None else str(p["stage"]), lambda p: p["stage"])
BY_NAME = {column.name: column for column in (*COLUMNS, STAGE_OF_PEER, NAME_OF_PEER)}
STAGE_COLUMNS = (
    Column("stage", 0, lambda s: f"{s['stage']}{' (head)' if s['stage'] == 0 else ''}", is_text=True),
    Column("peers", 0, lambda s: str(s["peers"] or "empty")),
    Column("capacity", 0, lambda s: count(s["capacity"])),
    Column("tokens/s", 1, lambda s: count(s["tokens_per_s"])),
    Column("queue", 2, lambda s: str(s["queue"])),
    Column("microbatches", 4, lambda s: str(s["microbatches"])),
    Column("late", 3, lambda s: _part(s["late_share"])),
    Column("lost", 3, lambda s: _part(s["lost_share"])),
    Column("spread", 5, lambda s: percent(s["spread"])),
)


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
    return (
        *(peer["peer_id"], peer["name"], state_of(peer), peer["state"], peer["last_partner"]),
        *(peer["reachability"], peer["software"]),
    )


def percent(share: float | None) -> str:
    """Format a share: 0.0039 -> '0.39 %'. Values below the noise of the sketches become '<0.01 %'."""
    if share is None:
        return "-"
    return "<0.01 %" if share < 1e-4 else f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _part(share: float | None) -> str:
    return "0 %" if share == 0 else percent(share)


def headline(swarm: dict[str, Any]) -> str:
    """Return the first line: `run tiny: 3 alive, 1 gone | 12.3k tokens/s | loss 1.498 | spread 0.39 % | 34 % done`."""
    totals = swarm["totals"]
    counts = ", ".join(f"{totals[kind]} {kind}" for kind in Health if totals[kind]) or "no known peers"
    parts = [f"run {swarm['run']}: {counts}", f"{count(totals['tokens_per_s'])} tokens/s"]
    if totals["loss"] is not None:
        parts.append(f"loss {loss(totals['loss'])}")
    if totals["spread"] is not None:
        parts.append(f"spread {percent(totals['spread'])}")
    if totals["progress"] is not None:
        parts.append(f"{100 * totals['progress']:.0f} % done")
    return " | ".join(parts)


def rounds_line(swarm: dict[str, Any]) -> str:
    """Return the second line: `rounds: 120 swapped, 3 half, 5 alone (4 refused, 1 slow) | 1.2 GiB out, 1.2 GiB in`."""
    totals = swarm["totals"]
    causes = [f"{number} {cause.replace('_', ' ')}" for cause, number in totals["alone_by_cause"].items() if number]
    why = f" ({', '.join(causes)})" if causes else ""
    return (
        f"rounds: {totals['swaps']} swapped, {totals['halves']} half, {totals['alone']} solo{why} | "
        f"{mib(totals['bytes_sent'])} out, {mib(totals['bytes_received'])} in"
    )


def view(swarm: dict[str, Any], choice: Choice, *, width: int, height: int) -> Group:
    """Draw a page of `width` x `height` cells, with the headline, notices, stages, and as many peers as fit."""
    from rich.console import Group
    from rich.text import Text

    peers = choice.of(swarm["peers"])
    lines: list[Text] = [Text(headline(swarm), style="bold"), Text(rounds_line(swarm), style="dim")]
    told = swarm["notices"][:MAX_NOTICES] or [{"level": "info", "text": "All is well."}]
    lines += [Text(notice["text"], style=LEVELS[notice["level"]]) for notice in told]
    more = "and {} more: use --filter, --sort or a larger window"
    stages = swarm["stages"][: height // STAGES_SHARE]
    used = sum(len(textwrap.wrap(line.plain, width)) for line in [*lines, Text(more)])
    used += len(stages) + 2 if stages else 0  # plus a header, and a line about hidden stages
    room = max(
        1, height - used - 3
    )  # without a blank line, the header, and the line that a terminal reserves for the cursor
    shown = peers[:room]
    parts: list[Any] = [*lines, Text("")]
    if stages:
        hidden = len(swarm["stages"]) - len(stages)
        rest = f"and {hidden} more stages with more capacity" if hidden else ""
        parts += [stage_table(stages, width=width), Text(rest, style="dim")]
    parts.append(table(shown, columns_of(swarm), width=width, sort=choice.sort))
    if len(shown) < len(peers):
        parts.append(Text(more.format(len(peers) - len(shown)), style="dim"))
    elif choice.words:
        parts.append(Text(f"{len(shown)} of {len(swarm['peers'])} peers match {choice.words!r}", style="dim"))
    return Group(*parts)


def table(peers: Sequence[Peer], columns: Sequence[Column], *, width: int, sort: str) -> Table:
    left, cells = fitting(peers, columns, width=width)
    return _drawn(left, cells, [STYLES[peer["health"]] for peer in peers], sort=sort)


def stage_table(stages: Sequence[Stage], *, width: int) -> Table:
    columns, cells = fitting(stages, STAGE_COLUMNS, width=width)
    return _drawn(columns, cells, ["" if stage["peers"] else LEVELS["bad"] for stage in stages])


def _drawn(
    columns: Sequence[Column], cells: Sequence[tuple[str, ...]], styles: Sequence[str], *, sort: str = ""
) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in columns:
        name = Text(column.name, style="underline" if column.name == sort else "")
        drawn.add_column(name, justify="left" if column.is_text else "right", no_wrap=True, overflow="ellipsis")
    for row, style in zip(cells, styles, strict=True):
        drawn.add_row(*(Text(cell) for cell in row), style=style)
    return drawn


def columns_of(swarm: dict[str, Any]) -> tuple[Column, ...]:
    """Return the columns of the table of peers, with stages and names only if there are any.

    The state follows the name, because its letters separate a name in a right-to-left script from the numbers.
    """
    stage = (STAGE_OF_PEER,) if swarm["stages"] else ()
    name = (NAME_OF_PEER,) if any(peer["name"] for peer in swarm["peers"]) else ()
    return (*COLUMNS[:1], *stage, *name, *COLUMNS[1:])


def fitting(
    rows: Sequence[dict[str, Any]], columns: Sequence[Column], *, width: int | None
) -> tuple[list[Column], list[tuple[str, ...]]]:
    """Return the columns that fit, in order, and the cells of the rows. If `width` is None, all columns fit."""
    shown = {column.name: [column.show(row) for row in rows] for column in columns}
    widths = {name: max(map(cells, [name, *column])) for name, column in shown.items()}
    left = list(columns)
    while width is not None and len(left) > 1 and sum(widths[c.name] + GAP for c in left) - GAP > width:
        left.remove(max(left, key=lambda column: column.rank))
    return left, list(zip(*(shown[column.name] for column in left), strict=True))


def plain(swarm: dict[str, Any], choice: Choice | None = None) -> list[str]:
    """Return the headline, the notices, and a line for each stage and each peer, for logs and pipes."""
    peers, stages = (choice or Choice()).of(swarm["peers"]), swarm["stages"]
    return [
        *(headline(swarm), rounds_line(swarm)),
        *(notice["text"] for notice in swarm["notices"]),
        *(_aligned(stages, STAGE_COLUMNS) if stages else []),
        *_aligned(peers, columns_of(swarm)),
    ]


def _aligned(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> list[str]:
    """Return a header, and a line for each row."""
    return aligned([tuple(column.name for column in columns), *fitting(rows, columns, width=None)[1]])
