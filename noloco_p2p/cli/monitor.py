"""Implements the command `noloco monitor`."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from noloco_p2p.cli.options import Json, print_json, takes_settings
from noloco_p2p.control import ask
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.console import terminal

if TYPE_CHECKING:
    from noloco_p2p.monitor.tables import Choice
    from noloco_p2p.monitor.watcher import Own
    from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)

OWN_S = 2.0  # for the answer of the peer on this machine
DEFAULT_WEB = "127.0.0.1:8080"


@takes_settings("state_dir")
def monitor(
    ticket: str | None = typer.Argument(
        None,
        help="A ticket for the run, or @FILE containing one. Without it, the run of the peer on this machine is shown.",
        show_default=False,
    ),
    watch: bool = typer.Option(False, "--watch", help="Keep updating until Ctrl-C."),
    web: bool = typer.Option(False, "--web", help="Serve a web page, /api/status and /metrics until Ctrl-C."),
    listen: str | None = typer.Option(
        None, help="[HOST:]PORT for --web. With port 0, a free port is used.", show_default=DEFAULT_WEB
    ),
    interval_s: float = typer.Option(2.0, "--interval", help="Seconds between updates with --watch.", min=0.1),
    sort: str = typer.Option("state", help="Column to sort by, for example loss."),
    descending: bool = typer.Option(False, "--descending", help="Sort in descending order."),
    words: str = typer.Option(
        "", "--filter", metavar="TEXT", help="Show only peers whose id, name, state, partner or version contains TEXT."
    ),
    as_json: Json = False,
    *,
    settings: PeerSettings,
) -> None:
    """Show the whole swarm, based on the records in the DHT."""
    entry = _entry(ticket, settings.state_dir)
    if listen and not web:
        raise SettingsError("--listen requires --web")
    if web and (watch or as_json):
        raise SettingsError("--watch and --json cannot be combined with --web, which serves /api/status as JSON")
    import uvloop

    from noloco_p2p.monitor.tables import Choice, plain, view
    from noloco_p2p.monitor.watcher import Own, snapshot

    def own() -> Own:
        with suppress(SettingsError):
            reply = ask(settings.state_dir, "status", timeout_s=OWN_S)
            if reply and reply.get("spec_digest") == entry.spec_digest:
                return Own(reply["peer_id"], "" if reply["is_announced"] else reply["last_fault"])
        return Own()

    if fault := own().fault:
        log.warning("%s", fault)
    choice = Choice(sort, words, descending)
    if web:
        uvloop.run(_serve(entry, listen or DEFAULT_WEB, own))
        return
    if watch:
        try:
            uvloop.run(_watch(entry, choice, interval_s, own, as_json=as_json))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        return
    swarm = uvloop.run(snapshot(entry, own))
    if as_json:
        print_json(swarm)
    elif sys.stdout.isatty():
        console = terminal()
        console.print(view(swarm, choice, width=console.width, height=len(swarm["peers"]) + 20))
    else:
        print("\n".join(plain(swarm, choice)))


def _entry(ticket: str | None, folder: Path) -> Ticket:
    """Return the ticket. If the peer in `folder` is in the same run, the first addresses of the result lead to it."""
    from noloco_p2p.peer.run_folder import remembered_ports
    from noloco_p2p.ticket import MAX_ADDRESSES, Ticket, contents

    given = Ticket.decode(contents(ticket)) if ticket else None
    reply = None
    with suppress(SettingsError):
        reply = ask(folder, "status", timeout_s=OWN_S)
    if reply is None or "ticket" not in reply:
        if given is None:
            raise SettingsError(f"no training peer is running in {folder}; pass a ticket for the run")
        return given
    own = Ticket.decode(reply["ticket"])
    if given and given.spec_digest != own.spec_digest:
        return given
    known = (*own.addresses, *(given.addresses if given else ()))
    if port := remembered_ports(folder).get("libp2p"):
        known = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{reply['peer_id']}", *known)
    return replace(given or own, addresses=tuple(dict.fromkeys(known))[:MAX_ADDRESSES])


def _stop_on_signals() -> None:
    """Cancel the current task at the first SIGINT or SIGTERM. A `__del__` can swallow a KeyboardInterrupt."""
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)


async def _watch(entry: Ticket, choice: Choice, interval_s: float, own: Callable[[], Own], *, as_json: bool) -> None:
    from noloco_p2p.monitor.tables import plain
    from noloco_p2p.monitor.watcher import watching

    _stop_on_signals()
    console = terminal()
    if console.is_terminal and not as_json:
        print(f"looking for live peers of run {entry.run_name}", flush=True)
    async with watching(entry, own) as (watcher, directory):
        if console.is_terminal and not as_json:
            await _draw(console, choice, interval_s, lambda: watcher.look(directory))
            return
        while True:
            swarm = watcher.look(directory)
            print(json.dumps(swarm) if as_json else "\n".join(plain(swarm, choice)), flush=True)
            await asyncio.sleep(interval_s)


async def _draw(console: Any, choice: Choice, interval_s: float, look: Callable[[], dict[str, Any]]) -> None:
    """Redraw the whole screen after each read and whenever the window is resized, until the task is cancelled."""
    from rich.live import Live

    from noloco_p2p.monitor.tables import headlines, view

    wake, swarm = asyncio.Event(), look()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, wake.set)
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with suppress(asyncio.CancelledError), live:
        while True:
            live.update(view(swarm, choice, width=console.width, height=console.height), refresh=True)
            wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await wake.wait()
            swarm = look()
    console.print(headlines(swarm)[0], markup=False, highlight=False)


async def _serve(entry: Ticket, listen: str, own: Callable[[], Own]) -> None:
    from noloco_p2p.monitor.watcher import watching
    from noloco_p2p.monitor.web import serve
    from noloco_p2p.settings import THIS_MACHINE, split_address

    try:
        host, port = split_address(listen, host=THIS_MACHINE)
    except ValueError as error:
        raise SettingsError(f"--listen: {error}") from None
    _stop_on_signals()
    with suppress(asyncio.CancelledError):
        print(f"looking for live peers of run {entry.run_name}", flush=True)
        async with watching(entry, own) as (watcher, directory):
            await serve(watcher, directory, host=host, port=port, say=lambda line: print(line, flush=True))
