"""Implements the commands `noloco pause` and `noloco resume`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from noloco_p2p.cli.options import takes_settings
from noloco_p2p.settings import PeerSettings

Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the peer to pause or resume.")]
POLL_S = 0.1


@takes_settings("state_dir")
def pause(settings: PeerSettings, timeout_s: Timeout = 120.0) -> None:
    """Pause the peer on this machine after its current inner step. It keeps its state in memory."""
    folder, reply = _ask(settings.state_dir, "pause")
    if reply["refusal"]:
        print(f"the peer (process {reply['pid']}) cannot be paused: {reply['refusal']}")
        raise typer.Exit(1)
    if reply["was_asked"] and reply["state"] == "paused":
        print("the peer is already paused; run `noloco resume` to resume it")
        return
    _wait_for("paused", folder, timeout_s=timeout_s)
    print("the peer is paused: it will neither train nor swap until you run `noloco resume`")


@takes_settings("state_dir")
def resume(settings: PeerSettings, timeout_s: Timeout = 120.0) -> None:
    """Resume a paused peer. If the swarm is far ahead, the peer catches up first."""
    folder, reply = _ask(settings.state_dir, "resume")
    if reply["stays_because"]:
        print(f"the peer remains paused: {reply['stays_because']}")
        return
    if not reply["was_asked"]:
        print(f"the peer is not paused: it is {reply['state']}")
        return
    _wait_for("training", folder, timeout_s=timeout_s)
    print("the peer is training again")


def _ask(folder: Path, verb: str) -> tuple[Path, dict[str, Any]]:
    """Send a command to the peer, and return the state folder and the answer. Exit with code 1 if there is no peer."""
    from noloco_p2p.control import FolderLock, ask

    reply = ask(folder, verb)
    if reply is None:
        is_starting = FolderLock(folder).is_held()
        print(
            f"the peer in {folder} is still starting; try again" if is_starting else f"no peer is running in {folder}"
        )
        raise typer.Exit(1)
    if "error" in reply:  # a bootstrap node
        print(f"the process in {folder} is not a training peer, so it cannot be {verb}d")
        raise typer.Exit(1)
    return folder, reply


def _wait_for(state: str, folder: Path, *, timeout_s: float) -> None:
    from noloco_p2p.control import ask

    until_s = time.monotonic() + timeout_s
    while True:
        reply = ask(folder, "status")
        if reply is None:
            print("the peer has left")
            raise typer.Exit(1)
        if reply["state"] == state:
            return
        if time.monotonic() > until_s:
            print(f"the peer (process {reply['pid']}) is still in the state {reply['state']} after {timeout_s:.0f} s")
            raise typer.Exit(1)
        time.sleep(POLL_S)
