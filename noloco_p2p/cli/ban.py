"""Implements the command `noloco ban`."""

from __future__ import annotations

from typing import Annotated

import typer

from noloco_p2p.cli.options import Json, parse_duration, print_json, takes_settings
from noloco_p2p.settings import PeerSettings


@takes_settings("state_dir")
def ban(
    peer_id: Annotated[
        str | None, typer.Argument(help="The id of the peer to ban (12D3Koo...). Without it, all bans are listed.")
    ] = None,
    reason: Annotated[
        str, typer.Option(help="The reason, as shown to the peer and in the log.")
    ] = "manual ban by this peer's owner",
    for_: Annotated[str, typer.Option("--for", help="How long the ban lasts, for example 30min, 12h or 7d.")] = "7d",
    lift: Annotated[bool, typer.Option("--lift", help="Lift the ban on this peer.")] = False,
    *,
    settings: PeerSettings,
    as_json: Json = False,
) -> None:
    """Ban a peer, or list the banned peers. A ban is local, and a running peer enforces it immediately."""
    from noloco_p2p.bans import BanList

    bans = BanList(settings.state_dir / "bans.json")
    if peer_id and lift:
        print(f"{peer_id} is no longer banned" if bans.lift(peer_id) else f"{peer_id} is not on the ban list")
    elif peer_id:
        bans.ban(peer_id, reason, for_s=parse_duration(for_, flag="--for"))
        print(f"{peer_id} is {bans.why(peer_id)}")
    elif as_json:
        print_json({peer: {"reason": ban.reason, "until_s": ban.until_s} for peer, ban in bans.all().items()})
    else:
        for banned in bans.all():
            print(f"{banned} is {bans.why(banned)}")
        if not bans.all():
            print("no peer is banned")
