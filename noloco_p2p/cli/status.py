"""noloco status"""

from __future__ import annotations

from typing import Any

import typer

from noloco_p2p.cli.options import Json, StateDir, print_json


def status(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Show what the peer on this machine is doing. Exit code 1 when none runs."""
    from noloco_p2p.control import FolderLock, ask
    from noloco_p2p.settings import PeerSettings

    folder = PeerSettings.load({"state_dir": state_dir}).state_dir
    reply = ask(folder, "status")
    if reply is None:
        is_starting = FolderLock(folder).is_held()
        if as_json:
            print_json({"state": "starting" if is_starting else "not running"})
        else:
            print(f"a peer is starting in {folder}" if is_starting else f"no peer runs in {folder}")
        raise typer.Exit(0 if is_starting else 1)
    if as_json:
        print_json(reply)
        return
    for line in bootstrap_lines(reply) if reply["state"] == "bootstrap" else lines(reply):
        print(line)


def lines(reply: dict[str, Any]) -> list[str]:
    """The status of a training peer for people."""
    from noloco_p2p.telemetry.console import count, loss, mib

    others = "1 other live peer" if reply["live_peers"] == 1 else f"{reply['live_peers']} other live peers"
    partner = f", last with ..{reply['last_partner'][-6:]}" if reply["last_partner"] else ""
    return [
        f"peer      {reply['peer_id']} (process {reply['pid']})",
        f"run       {reply['run']}, {reply['state']}, {100 * reply['progress']:.1f} % of the schedule",
        f"swarm     {others}; this one announces {reply['address']}",
        f"reach     {reply['reach']['state']}: {reply['reach']['sentence']}",
        f"rounds    {reply['rounds_here']} here: {reply['swaps']} swapped, {reply['halves']} half, "
        f"{reply['alone']} alone{partner}",
        f"training  loss {loss(reply['loss'])}, validation {loss(reply['validation_loss'])}, "
        f"{count(reply['tokens_per_s'])} tokens/s",
        f"traffic   {mib(reply['bytes_sent'])} out, {mib(reply['bytes_received'])} in",
        f"last      {reply['last_outcome'] or 'no round yet'}",
        f"fault     {reply['last_fault'] or 'none'}",
        f"ticket    {reply['ticket']}",
    ]


def bootstrap_lines(reply: dict[str, Any]) -> list[str]:
    return [
        f"peer       {reply['peer_id']} (process {reply['pid']})",
        f"bootstrap  {reply['neighbours']} DHT nodes near",
        *(f"address    {address}" for address in reply["addresses"]),
    ]
