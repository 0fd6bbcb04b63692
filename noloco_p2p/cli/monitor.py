"""noloco monitor"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noloco_p2p.cli.entry import resolve
from noloco_p2p.cli.options import Json, print_json

if TYPE_CHECKING:
    from noloco_p2p.ticket import Ticket


def monitor(
    ticket: Annotated[str, typer.Argument(help="A ticket of the run, or @FILE with one.")],
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between two looks with --watch.", min=0.1)
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """Show the whole swarm, from the DHT alone."""
    from noloco_p2p.ticket import Ticket

    entry = Ticket.decode(resolve(ticket))
    import uvloop

    from noloco_p2p.monitor import collect
    from noloco_p2p.monitor.terminal import plain

    if watch:
        uvloop.run(_watch(entry, interval_s, as_json=as_json))
        return
    swarm = uvloop.run(collect.snapshot(entry))
    if as_json:
        print_json(swarm)
    elif sys.stdout.isatty():
        _print_table(swarm)
    else:
        print("\n".join(plain(swarm)))


def _print_table(swarm: dict[str, Any]) -> None:
    from rich.console import Console

    from noloco_p2p.monitor.terminal import table

    Console().print(table(swarm))


async def _watch(entry: Ticket, interval_s: float, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from noloco_p2p.monitor import collect
    from noloco_p2p.monitor.terminal import plain, table
    from noloco_p2p.swarm.reader import find_somebody, reader

    console = Console()
    async with reader(entry) as directory:
        await find_somebody(entry, directory)
        if as_json or not console.is_terminal:
            while True:
                swarm = collect.summary(entry, directory)
                print(json.dumps(swarm) if as_json else "\n".join(plain(swarm)), flush=True)
                await asyncio.sleep(interval_s)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(table(collect.summary(entry, directory)), refresh=True)
                await asyncio.sleep(interval_s)
