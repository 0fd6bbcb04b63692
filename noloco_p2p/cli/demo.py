"""Implements the command `noloco demo`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli.options import Changes, parse_changes
from noloco_p2p.errors import SettingsError
from noloco_p2p.telemetry.console import counted, duration, terminal

if TYPE_CHECKING:
    from rich.console import Group

    from noloco_p2p.demo import Demo

PLAIN_EVERY_S = 5.0


def demo(
    peers: int | None = typer.Option(
        None, help="Number of peers, each in its own process.", min=1, max=64, show_default="4, or two per stage"
    ),
    stages: int = typer.Option(
        1, help="Cut the model into this many stages. Each peer holds one stage.", min=1, max=32
    ),
    steps: int | None = typer.Option(
        None, help="Inner steps per peer.", min=20, show_default="as many as --minutes allows"
    ),
    minutes: float | None = typer.Option(
        None,
        help="Choose the number of steps so that the demo takes about this many minutes.",
        min=1,
        show_default="4, or 10 with --share",
    ),
    share: bool = typer.Option(
        False, "--share", help="Let other machines in this network join, and show them the monitor's page."
    ),
    changes: Changes = None,
    chaos: int | None = typer.Option(
        None,
        metavar="SEED",
        help="Kill and restart peers during the demo. SEED determines which peers, and when.",
        show_default=False,
        min=0,
    ),
    keep: Path | None = typer.Option(
        None, metavar="DIR", help="Keep the logs and checkpoints in this folder.", show_default=False
    ),
    json_file: Path | None = typer.Option(
        None, "--json", metavar="FILE", help="Write the report to FILE as JSON.", show_default=False
    ),
) -> None:
    """Train a small model with a swarm of real peers on this machine, and print a report."""
    from noloco_p2p.demo import LOOPBACK, Demo, report_lines

    entry.check_writable(json_file, flag="--json")
    values = parse_changes(changes)
    folder = keep or Path(tempfile.mkdtemp(prefix="noloco-demo-"))
    swarm = Demo(
        folder.absolute(),
        num_peers=peers or (2 * stages if stages > 1 else 4),
        num_stages=stages,
        num_steps=steps or 0,
        minutes=minutes or (10.0 if share else 4.0),
        host=_host_in_network() if share else LOOPBACK,
        changes=values,
        chaos_seed=chaos,
    )
    each = f", each with one of the {stages} stages of a model," if stages > 1 else ""
    print(f"{counted(swarm.num_peers, 'peer')}{each} on this machine; logs: {folder}/peer-*/log.txt", flush=True)
    if keep is None:
        print("(logs and checkpoints are deleted at the end; --keep DIR keeps them)", flush=True)
    entry.on_leaving(signal.default_int_handler)  # ends the demo, which then stops its peers
    try:
        _watch(swarm)
        print("the peers leave; their models are merged, and the mean is evaluated", flush=True)
        swarm.stop()
        report = swarm.report()
    except KeyboardInterrupt:
        print("interrupted: asking the peers to leave", file=sys.stderr, flush=True)
        swarm.stop()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)  # a process that is just ending may still create a file
        raise
    finally:
        swarm.stop()
    for line in report_lines(report):
        print(line)
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for line in (failures := swarm.failures()):
        print(line, file=sys.stderr)
    if failures:
        raise typer.Exit(1)
    if keep is None:
        for child in folder.glob("peer-*"):
            shutil.rmtree(child)


def _watch(swarm: Demo) -> None:
    """Draw a bar and a table on a terminal. Elsewhere, print a line for each phase and every PLAIN_EVERY_S seconds."""
    from rich.live import Live

    console, began_s = terminal(), time.monotonic()
    screen = Live(console=console, auto_refresh=False) if console.is_terminal else None
    doing, next_s, is_planned, is_shared = "", 0.0, False, False
    with screen or nullcontext():
        for _ in swarm.run():
            if swarm.num_steps and not is_planned:
                is_planned = True
                who = "peer" if swarm.num_stages == 1 else "head (peer of stage 0)"
                plan = f"each {who} takes about {swarm.num_steps} inner steps"
                if swarm.step_s is not None:
                    plan = f"an inner step takes {swarm.step_s:.2g} s on this machine: {plan} in about "
                    plan += f"{swarm.minutes:g} minutes"
                print(plan, flush=True)
            if swarm.page and not is_shared:
                is_shared = True
                told = f"on another machine in this network, run:\nnoloco join {swarm.ticket}"
                told += f"\neverybody in this network sees the swarm at {swarm.page}"
                console.print(told, soft_wrap=True, markup=False, highlight=False)  # a ticket is one line
            now_s = time.monotonic()
            if screen:
                screen.update(_drawn(swarm), refresh=True)
            elif swarm.doing != doing or now_s >= next_s:
                doing, next_s = swarm.doing, now_s + PLAIN_EVERY_S
                summary = f"; {swarm.summary()}" if swarm.summary() else ""
                print(f"after {now_s - began_s:.0f} s: {_told(swarm)}{summary}", flush=True)


def _host_in_network() -> str:
    """Return the address of this machine in its network. Raises SettingsError if it has none."""
    from noloco_p2p.demo import LOOPBACK
    from noloco_p2p.swarm.addresses import routable_host

    if (host := routable_host("0.0.0.0")) == LOOPBACK:
        raise SettingsError("--share needs a network, but this machine has no address that others can reach")
    return host


def _told(swarm: Demo) -> str:
    """Describe the progress, for example `training: step 120 of 480, 2 min 30 s left`."""
    if not swarm.num_steps:
        return swarm.doing
    left = "" if swarm.left_s is None else f", {duration(swarm.left_s)} left"
    return f"{swarm.doing}: step {swarm.done} of {swarm.num_steps}{left}"


def _drawn(swarm: Demo) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = Table.grid(padding=(0, 1))
    # Before training begins, the progress is unknown, so the bar pulses.
    done = swarm.done
    bar.add_row(ProgressBar(total=swarm.num_steps or None, completed=done, width=30, pulse=not done), _told(swarm))
    if not swarm.num_steps:
        return Group(bar)
    table, rows = Table(box=None, pad_edge=False), swarm.table()
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("peer", "state", "last swap with") else "right")
    for row in rows:
        table.add_row(*row.values())
    return Group(bar, table)
