"""noloco doctor"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli.options import Announce, Json, Listen, StateDir, print_json

if TYPE_CHECKING:
    from noloco_p2p.doctor.check import Check
    from noloco_p2p.settings import PeerSettings
    from noloco_p2p.ticket import Ticket


def doctor(
    ticket: Annotated[str | None, typer.Argument(help="A ticket of a run: examines the way to it, too.")] = None,
    listen: Listen = None,
    announce: Announce = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Examine this machine, and its way to a run. Exit code 1 when something would keep a peer from training."""
    from noloco_p2p.settings import PeerSettings
    from noloco_p2p.ticket import Ticket

    entry = Ticket.decode(ticket) if ticket else None
    settings = PeerSettings.load({"listen": listen, "announce": announce, "state_dir": state_dir})
    import uvloop

    from noloco_p2p.doctor.check import is_healthy, report

    checks = uvloop.run(_examine(entry, settings, tell=not as_json))
    if as_json:
        print_json(report(checks))
    elif not ticket:
        print("for the clock, reachability from outside, bandwidth and the model's needs: noloco doctor TICKET")
    if not is_healthy(checks):
        raise typer.Exit(1)


async def _examine(ticket: Ticket | None, settings: PeerSettings, *, tell: bool) -> list[Check]:
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
    if ticket:
        from noloco_p2p.doctor.swarm import examine

        found(*await examine(ticket, settings))
    return checks
