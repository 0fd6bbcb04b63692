"""The swarm as a table: drawn by rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.table import Table

from noloco_p2p.telemetry.console import count, loss, mib

COLUMNS = ("peer", "state", "round", "swaps", "alone", "loss", "tokens/s", "last with", "out", "in", "reach", "age")


def rows(swarm: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"..{peer['peer_id'][-6:]}",
            peer["state"],
            str(peer["round"]),
            str(peer["swaps"]),
            str(peer["alone"]),
            loss(peer["loss"]),
            count(peer["tokens_per_s"]),
            f"..{peer['last_partner'][-6:]}" if peer["last_partner"] else "-",
            mib(peer["bytes_sent"]),
            mib(peer["bytes_received"]),
            peer["reachability"],
            f"{peer['age_s']:.0f} s",
        )
        for peer in swarm["peers"]
    ]


def title(swarm: dict[str, Any]) -> str:
    """`run tiny: 3 training, 1 leaving | 12.3k tokens/s`."""
    states = Counter(peer["state"] for peer in swarm["peers"])
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items(), key=_training_first))
    speed = sum(peer["tokens_per_s"] for peer in swarm["peers"] if peer["state"] == "training")
    return f"run {swarm['run']}: {counts or 'no peer heard of'} | {count(speed)} tokens/s"


def _training_first(item: tuple[str, int]) -> tuple[bool, str]:
    return item[0] != "training", item[0]


def table(swarm: dict[str, Any]) -> Table:
    drawn = Table(title=title(swarm), title_justify="left", box=None, pad_edge=False)
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in ("peer", "state", "last with", "reach") else "right")
    for row in rows(swarm):
        drawn.add_row(*row)
    return drawn


def plain(swarm: dict[str, Any]) -> list[str]:
    """One line a peer, columns aligned: for logs and pipes."""
    cells = [COLUMNS, *rows(swarm)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [title(swarm), *lines]
