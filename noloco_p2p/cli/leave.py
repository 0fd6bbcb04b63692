"""noloco leave"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from noloco_p2p.cli.options import StateDir


def leave(
    state_dir: StateDir = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait until it has gone.")] = 120.0,
) -> None:
    """Ask the peer on this machine to leave politely, and wait until it has gone."""
    from noloco_p2p.control import FolderLock, ask
    from noloco_p2p.settings import PeerSettings

    folder = PeerSettings.load({"state_dir": state_dir}).state_dir
    reply = ask(folder, "leave")
    if reply is None:
        print(f"no peer runs in {folder}")
        return
    lock, until_s = FolderLock(folder), time.monotonic() + timeout_s
    while lock.is_held():
        if time.monotonic() > until_s:
            print(f"the peer (process {reply['pid']}) has not gone within {timeout_s:.0f} s")
            raise typer.Exit(1)
        time.sleep(0.05)
    print("the peer has left; its checkpoint is kept")
