"""Implements the command `noloco ticket`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli.options import parse_duration, takes_settings
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.ticket import Ticket


@takes_settings("state_dir", "run_key")
def ticket(
    settings: PeerSettings,
    expires: Annotated[
        str | None,
        typer.Option(
            help="For private runs: how long the invitation is valid, such as 30min, 12h or 7d.", show_default=False
        ),
    ] = None,
) -> None:
    """Print a ticket for the run of the peer on this machine, with the addresses that are reachable now."""
    from noloco_p2p.control import ask
    from noloco_p2p.ticket import Ticket

    reply = ask(settings.state_dir, "status")
    if reply is None or "ticket" not in reply:
        print(f"no training peer is running in {settings.state_dir}")
        raise typer.Exit(1)
    found = Ticket.decode(reply["ticket"])
    if expires or settings.origins()["run_key"] == "flag" or _opens(settings.run_key, found):
        found = _invited(found, settings.run_key, parse_duration(expires or "7d", flag="--expires"))
    print(found.encode())


def _opens(run_key: Path | None, ticket: Ticket) -> bool:
    """Return whether the run key in the settings is the key of this run. An open run has no key."""
    from noloco_p2p.identity import Identity

    if run_key is None or ticket.invitation is None:
        return False
    return Identity.load(run_key).peer_id == ticket.invitation.run_key


def _invited(ticket: Ticket, run_key: Path | None, for_s: float) -> Ticket:
    """Return the ticket with an invitation that expires after `for_s` seconds.

    Raises SettingsError if the run is open, or if `run_key` is missing or is the key of another run.
    """
    from noloco_p2p.identity import Identity
    from noloco_p2p.invitation import invite

    if ticket.invitation is None:
        raise SettingsError(
            "--expires and --run-key work only for private runs; this run is open, and its tickets do not expire"
        )
    if run_key is None:
        raise SettingsError(
            "--expires requires the run key (--run-key FILE); without it, a peer can only pass on its own invitation"
        )
    key = Identity.load(run_key)
    if key.peer_id != ticket.invitation.run_key:
        raise SettingsError(f"--run-key {run_key} is the key of another run")
    return replace(ticket, invitation=invite(key, expires_at_s=time.time() + for_s, seed=os.urandom(32)))
