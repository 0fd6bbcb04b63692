from __future__ import annotations

from typing import Any, cast

from harness.identities import identity_of

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.peer.reachability import Reachability
from noloco_p2p.settings import PeerSettings


class Alone:
    """The directory and the address book of a peer that knows nobody yet."""

    node = None
    guard = DialGuard()

    def live(self) -> list[Any]:
        return []

    def multiaddrs(self) -> list[str]:
        return []

    def addresses(self) -> dict[str, tuple[str, ...]]:
        return {}


async def ask(*_: object) -> Any:
    raise AssertionError("nobody is there to be asked")


def test_a_ticket_hands_on_the_best_address_of_each_entrance() -> None:
    first, second = (identity_of(name).peer_id for name in ("first", "second"))
    entrances = [
        f"/ip4/8.8.4.4/tcp/4001/p2p/{first}",
        f"/ip4/10.0.0.9/tcp/4001/p2p/{first}",
        f"/ip4/8.8.8.8/tcp/4001/p2p/{second}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{second}",
    ]
    nobody = cast(Any, Alone())
    reachability = Reachability(nobody, PeerSettings(), nobody, entrances=entrances, ask=ask)
    assert reachability.doors() == [entrances[0], entrances[2]]
