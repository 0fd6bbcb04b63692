"""Implements the command `noloco id`."""

from __future__ import annotations

from noloco_p2p.cli.options import Json, print_json, takes_settings
from noloco_p2p.settings import PeerSettings


@takes_settings("state_dir")
def identity(settings: PeerSettings, as_json: Json = False) -> None:
    """Show the identity of this peer, or create one."""
    from noloco_p2p.identity import Identity

    path = settings.state_dir / "identity.key"
    peer_id = Identity.load_or_create(path).peer_id
    if as_json:
        print_json({"peer_id": peer_id, "key_file": str(path)})
        return
    print(peer_id)
    print(
        f"The key file is {path}. Back it up and keep it secret: it is the identity of this peer. "
        "Never use it on two machines at the same time."
    )
