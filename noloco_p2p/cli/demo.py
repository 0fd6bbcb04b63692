"""noloco demo"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noloco_p2p.cli.options import Changes, parse_changes
from noloco_p2p.errors import SettingsError

if TYPE_CHECKING:
    from rich.table import Table

    from noloco_p2p.demo import Demo

PLAIN_EVERY_S = 15.0


def demo(
    peers: Annotated[int, typer.Option(help="Number of peers, each a process.", min=1, max=64)] = 4,
    steps: Annotated[int, typer.Option(help="Inner steps of each peer.", min=20)] = 480,
    changes: Changes = None,
    port_base: Annotated[
        int, typer.Option(help="Peer i listens on PORT_BASE + 2 i; 0 = free ports.", min=0, max=65000)
    ] = 0,
    chaos: Annotated[
        int | None,
        typer.Option(
            metavar="SEED",
            help="Kill peers and start them again while you watch; the seed says which and when.",
            show_default=False,
            min=0,
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Put everything here, and keep it: logs, checkpoints.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.", show_default=False)
    ] = None,
) -> None:
    """Train a small model on a swarm of real peers on this machine, and report."""
    from noloco_p2p.demo import Demo, DemoPlan, failure_lines, report_lines
    from noloco_p2p.telemetry.bars import drawing
    from noloco_p2p.telemetry.progress import Progress

    if json_file:
        _check_writable(json_file)
    values = parse_changes(changes)
    folder = keep or Path(tempfile.mkdtemp(prefix="noloco-demo-"))
    plan = DemoPlan(
        folder.absolute(), num_peers=peers, num_steps=steps, port_base=port_base, changes=values, chaos_seed=chaos
    )
    swarm = Demo(plan)
    noun = "peer" if peers == 1 else "peers"
    print(f"{peers} {noun} on this machine, {steps} inner steps each; logs: {folder}/peer-*/log.txt", flush=True)
    if keep is None:
        print("(they and the checkpoints are deleted at the end; --keep DIR keeps them)", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the demo, and the demo its peers
    try:
        _watch(swarm)
        print("all peers are done: they leave, and their models are merged and judged", flush=True)
        swarm.stop()
        report = swarm.report(progress=Progress(drawing(print)))
    except KeyboardInterrupt:
        print("interrupted: the peers are asked to leave", file=sys.stderr, flush=True)
        swarm.stop()
        if keep is None:
            shutil.rmtree(folder)
        raise
    finally:
        swarm.stop()
    for line in report_lines(report):
        print(line)
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failures = failure_lines(swarm)
    for line in failures:
        print(line, file=sys.stderr)
    if failures:
        raise typer.Exit(1)
    if keep is None:
        for child in folder.glob("peer-*"):
            shutil.rmtree(child)


def _check_writable(file: Path) -> None:
    """Minutes before it is written."""
    try:
        file.open("a").close()
    except OSError as error:
        raise SettingsError(f"--json {file}: cannot be written: {error.strerror}") from None


def _watch(swarm: Demo) -> None:
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


def _watch_plain(swarm: Demo) -> None:
    began_s = last_s = time.monotonic()
    rows: list[tuple[str, ...]] = []
    for rows in swarm.run():
        if time.monotonic() - last_s >= PLAIN_EVERY_S:
            last_s = time.monotonic()
            _print_rows(rows, last_s - began_s)
    _print_rows(rows, time.monotonic() - began_s)


def _print_rows(rows: list[tuple[str, ...]], seconds: float) -> None:
    from noloco_p2p.demo import COLUMNS, aligned

    print(f"after {seconds:.0f} s", *aligned([COLUMNS, *rows]), sep="\n  ", flush=True)


def _table(rows: list[tuple[Any, ...]]) -> Table:
    from rich.table import Table

    from noloco_p2p.demo import COLUMNS

    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("peer", "state", "last swap with") else "right")
    for row in rows:
        table.add_row(*row)
    return table
