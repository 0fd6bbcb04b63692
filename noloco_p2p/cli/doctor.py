"""noloco doctor"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli.options import Announce, Data, Json, Listen, MaxDownload, MaxUpload, Model, StateDir, print_json

if TYPE_CHECKING:
    from noloco_p2p.doctor.check import Check
    from noloco_p2p.settings import PeerSettings
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket


def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC.toml|TICKET]",
            help="A run: examines what it needs, and of a ticket (or @FILE with one) the way to it, too.",
        ),
    ] = None,
    listen: Listen = None,
    announce: Announce = None,
    max_upload: MaxUpload = None,
    max_download: MaxDownload = None,
    state_dir: StateDir = None,
    data: Data = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Examine this machine, and its way to a run. Exit code 1 when something would keep a peer from training."""
    from noloco_p2p.settings import PeerSettings, parse_bindings, parse_folders
    from noloco_p2p.ticket import Ticket

    examined = entry.opened(entry.ticket_in(run)) if run else None
    settings = PeerSettings.load(
        {
            "listen": listen,
            "announce": announce,
            "max_upload": max_upload,
            "max_download": max_download,
            "state_dir": state_dir,
            "data": parse_bindings(data) if data else None,
            "models": parse_folders(model) if model else None,
        }
    )
    import uvloop

    from noloco_p2p.doctor.check import is_healthy, report

    checks = uvloop.run(_examine(examined, settings, tell=not as_json))
    if as_json:
        print_json(report(checks))
    elif not isinstance(examined, Ticket):
        needs = "" if examined else ", needs of the model"
        print(f"for the clock, reachability from outside, bandwidth{needs}: noloco doctor TICKET")
    if not is_healthy(checks):
        raise typer.Exit(1)


async def _examine(run: TrainerSpec | Ticket | None, settings: PeerSettings, *, tell: bool) -> list[Check]:
    from noloco_p2p.doctor.check import is_healthy
    from noloco_p2p.doctor.versions import versions

    checks: list[Check] = []

    def found(*news: Check) -> None:
        checks.extend(news)
        for check in news if tell else ():
            print("\n".join(check.lines()), flush=True)

    found(versions())
    if not is_healthy(checks):
        return checks  # the others need what is missing
    from noloco_p2p.doctor import machine

    found(machine.ports(settings))
    found(machine.disk(settings), machine.memory(), machine.accelerator(), machine.codec_speed())
    found(await machine.p2pd())
    if run:
        from noloco_p2p.doctor.swarm import examine, model
        from noloco_p2p.ticket import Ticket

        found(*(await examine(run, settings) if isinstance(run, Ticket) else model(run, settings)))
    return checks
