"""Shows the swarm as text: drawn by rich on a terminal of any size, and as plain lines elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from noloco_p2p.monitor.columns import STAGE_COLUMNS, Choice, Column, Peer, Value, columns_of, values
from noloco_p2p.monitor.stages import Stage
from noloco_p2p.telemetry.console import aligned, cells

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

STYLES = {"alive": "", "silent": "yellow", "leaving": "cyan", "left": "dim", "gone": "dim"}
LEVELS = {"bad": "bold red", "warn": "yellow", "info": "dim"}
MAX_NOTICES = 4
STAGES_SHARE = 3  # the table of stages uses at most a third of the height
IN_HEADLINE = 4  # values of the swarm; the others are on the second line
GAP = 2  # between two columns


def headlines(swarm: dict[str, Any]) -> list[str]:
    """Return two lines about the whole swarm: `run tiny | peers alive 3 (1 gone) | loss 1.498 (1.4 to 1.6) | ..`."""
    shown = [*values(swarm)]
    return [" | ".join([f"run {swarm['run']}", *_known(shown[:IN_HEADLINE])]), " | ".join(_known(shown[IN_HEADLINE:]))]


def _known(shown: Sequence[Value]) -> list[str]:
    return [f"{v.name} {v.text}" + (f" ({v.details})" if v.details else "") for v in shown if v.text != "-"]


def view(swarm: dict[str, Any], choice: Choice, *, width: int, height: int) -> Group:
    """Draw a page of `width` x `height` cells, with the headline, notices, stages, and as many peers as fit."""
    from rich.console import Group
    from rich.text import Text

    peers = choice.of(swarm["peers"])
    lines: list[Text] = [Text(line, style=style) for line, style in zip(headlines(swarm), ("bold", "dim"), strict=True)]
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
        *headlines(swarm),
        *(notice["text"] for notice in swarm["notices"]),
        *(_aligned(stages, STAGE_COLUMNS) if stages else []),
        *_aligned(peers, columns_of(swarm)),
    ]


def _aligned(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> list[str]:
    """Return a header, and a line for each row."""
    return aligned([tuple(column.name for column in columns), *fitting(rows, columns, width=None)[1]])
