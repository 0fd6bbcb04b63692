"""noloco demo"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

PLAIN_EVERY_S = 15.0


def demo(
    peers: Annotated[int, typer.Option(help="Number of peers, each a process.", min=1, max=64)] = 4,
    steps: Annotated[int, typer.Option(help="Inner steps of each peer.", min=20)] = 480,
    port_base: Annotated[int, typer.Option(help="Peer i listens on PORT_BASE + 2 i; 0 = free ports.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep all files of the peers in this folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Train a small model on a swarm of real peers on this machine, and report."""
    from noloco_p2p.demo import Demo, DemoPlan, report_lines

    folder = keep or Path(tempfile.mkdtemp(prefix="noloco-demo-"))
    plan = DemoPlan(folder.absolute(), num_peers=peers, num_steps=steps, port_base=port_base)
    print(f"{peers} peers on this machine, {steps} inner steps each; their logs are in {folder}/peer-*/log.txt", flush=True)
    swarm = Demo(plan)
    try:
        _watch(swarm)
        print("all peers are done: they leave, and their models are merged and judged", flush=True)
        swarm.stop()
        report = swarm.report()
    finally:
        swarm.stop()
    for line in report_lines(report):
        print(line)
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if keep is None:
        for child in folder.glob("peer-*"):
            shutil.rmtree(child)
    if any(peer["exit_code"] for peer in report["peers"]):
        print(f"a peer failed; run again with --keep DIR and look into DIR/peer-*/log.txt", file=sys.stderr)
        raise typer.Exit(1)


def _watch(swarm) -> None:
    """A live table on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        _watch_plain(swarm)
        return
    with Live(console=console, auto_refresh=False) as live:
        for rows in swarm.run():
            live.update(_table(rows), refresh=True)


def _watch_plain(swarm) -> None:
    from noloco_p2p.demo import COLUMNS, aligned

    began_s = last_s = time.monotonic()
    for rows in swarm.run():
        if time.monotonic() - last_s < PLAIN_EVERY_S:
            continue
        last_s = time.monotonic()
        print(f"after {last_s - began_s:.0f} s", *aligned([COLUMNS, *rows]), sep="\n  ", flush=True)
    print(f"after {time.monotonic() - began_s:.0f} s", *aligned([COLUMNS, *rows]), sep="\n  ", flush=True)


def _table(rows: list[tuple[str, ...]]):
    from rich.table import Table

    from noloco_p2p.demo import COLUMNS

    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("peer", "state", "last swap with") else "right")
    for row in rows:
        table.add_row(*row)
    return table
