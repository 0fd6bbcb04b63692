"""Implements the command `noloco doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli.options import Json, print_json, takes_settings
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.doctor.check import Check
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket


@takes_settings("listen", "announce", "max_upload", "max_download", "state_dir", "data", "models")
def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC.toml|TICKET]",
            help="Check whether this machine can take part in this run. With a ticket (or @FILE containing one), "
            "also check the swarm.",
        ),
    ] = None,
    *,
    settings: PeerSettings,
    as_json: Json = False,
) -> None:
    """Check this machine and its connection to a run. The exit code is 1 if a problem would prevent training."""
    from noloco_p2p.ticket import Ticket

    examined = entry.opened(entry.ticket_in(run)) if run else None
    import uvloop

    from noloco_p2p.doctor.check import is_healthy, report, verdict

    checks = uvloop.run(_examine(examined, settings, tell=not as_json))
    if as_json:
        print_json(report(checks))
    else:
        print(verdict(checks))
        if not isinstance(examined, Ticket):
            needs = "" if examined else ", and what the model needs"
            print(f"to also check the clock, reachability and bandwidth{needs}, run: noloco doctor TICKET")
    if not is_healthy(checks):
        raise typer.Exit(1)


async def _examine(run: TrainerSpec | Ticket | None, settings: PeerSettings, *, tell: bool) -> list[Check]:
    from noloco_p2p.doctor.check import is_healthy, versions

    checks: list[Check] = []

    def found(*news: Check) -> None:
        checks.extend(news)
        for check in news if tell else ():
            print("\n".join(check.lines()), flush=True)

    found(versions())
    if not is_healthy(checks):
        return checks  # the other checks import the missing packages
    from noloco_p2p.doctor import machine

    found(machine.ports(settings))
    found(machine.disk(settings), machine.memory(), machine.accelerator(), machine.codec_speed())
    found(await machine.p2pd())
    if run:
        from noloco_p2p.doctor.swarm import examine, model
        from noloco_p2p.ticket import Ticket

        found(*(await examine(run, settings) if isinstance(run, Ticket) else model(run, settings)))
    return checks
