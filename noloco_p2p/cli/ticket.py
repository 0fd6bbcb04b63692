"""noloco ticket"""

from __future__ import annotations

import typer

from noloco_p2p.cli.options import StateDir


def ticket(state_dir: StateDir = None) -> None:
    """Print a ticket of the run that the peer on this machine is in, with the doors that are open now."""
    from noloco_p2p.control import ask
    from noloco_p2p.settings import PeerSettings

    folder = PeerSettings.load({"state_dir": state_dir}).state_dir
    reply = ask(folder, "status")
    if reply is None or "ticket" not in reply:
        print(f"no peer of a run runs in {folder}")
        raise typer.Exit(1)
    print(reply["ticket"])
