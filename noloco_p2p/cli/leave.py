"""Implements the command `noloco leave`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from noloco_p2p.cli.options import takes_settings
from noloco_p2p.settings import PeerSettings


@takes_settings("state_dir")
def leave(
    settings: PeerSettings,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the peer to exit.")] = 120.0,
) -> None:
    """Ask the peer on this machine to leave, and wait until it has exited."""
    from noloco_p2p.control import FolderLock, ask

    folder = settings.state_dir
    reply = ask(folder, "leave")
    lock, until_s = FolderLock(folder), time.monotonic() + timeout_s
    if reply is None:
        if lock.is_held():
            print(f"the peer in {folder} is still starting and cannot answer yet; try again, or stop it with Ctrl-C")
            raise typer.Exit(1)
        print(f"no peer is running in {folder}")
        return
    while lock.is_held():
        if time.monotonic() > until_s:
            print(f"the peer (process {reply['pid']}) was asked to leave but did not exit within {timeout_s:.0f} s")
            raise typer.Exit(1)
        time.sleep(0.05)
    print("the peer has left; run the command that started it to resume from its last checkpoint")
