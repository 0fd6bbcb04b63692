from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.identities import identity_of

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.peer.reachability import Reachability
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.dial_back import DialBack, Reach
from noloco_p2p.swarm.port_mapping import MappedPorts


class Alone:
    """The directory and the address book of a peer that knows nobody yet."""

    node = cast(Any, SimpleNamespace(guard=DialGuard()))
    port = 31338
    peer_id = identity_of("own").peer_id
    entrances: Mapping[str, str] = {}

    def live(self) -> list[Any]:
        return []

    def multiaddrs(self) -> list[str]:
        return []

    def is_abroad(self) -> bool:
        return True

    def addresses(self) -> dict[str, tuple[str, ...]]:
        return {}


def reachable(**settings: Any) -> Reachability:
    nobody = cast(Any, Alone())
    return Reachability(nobody, PeerSettings(**settings), nobody)


def test_a_ticket_hands_on_the_entrances() -> None:
    peer = reachable()
    entrance = f"/ip4/8.8.4.4/tcp/4001/p2p/{identity_of('first').peer_id}"
    peer._directory.entrances = {identity_of("first").peer_id: entrance}
    assert peer.doors() == [entrance]


MAPPED = MappedPorts("45.77.0.9", (41337, 41338))
AT_HOME = ("45.77.0.9:41337", "192.168.1.7:0")  # port 0: the server does not listen yet
OUTSIDE = f"/ip4/45.77.0.9/tcp/41338/p2p/{Alone.peer_id}"


def test_a_mapping_is_published_unless_peers_dial_back_in_vain() -> None:
    peer = reachable(listen="192.168.1.7:31337")
    peer._port_mapping.mapped = MAPPED
    assert peer._ports() == MAPPED.ports, "these are asked about"
    assert (peer.addresses(), peer.doors()) == (AT_HOME, [OUTSIDE]), "nobody is there who could be asked"
    for seen in (DialBack("45.77.0.9", {41337: "closed"}), DialBack("45.77.0.10", {41337: ""})):
        peer._dial_backs._seen["other"] = 0.0, seen
        assert (peer.addresses(), peer.ways_in(), peer.doors()) == ((), (), [])
    peer._dial_backs._seen["other"] = 0.0, DialBack("45.77.0.9", {41337: "", 41338: ""})
    assert peer.addresses() == AT_HOME
    assert peer.ways_in() == (OUTSIDE,)
    assert peer.verdict().state is Reach.MAPPED
    assert "which the router maps to this machine (UPnP)" in peer.verdict().sentence


@pytest.mark.parametrize(
    "settings",
    [{"map_ports": "never"}, {"announce": "peer.example.org"}, {"listen": "127.0.0.1:31337"}],
    ids=["turned off", "announced", "loopback"],
)
def test_a_router_is_not_asked_when_it_need_not_be(settings: dict[str, str]) -> None:
    assert not reachable(**{"listen": "192.168.1.7:31337", **settings})._port_mapping.asks
    assert reachable(listen="192.168.1.7:31337")._port_mapping.asks


@pytest.mark.parametrize(
    ("listen", "announce", "addresses"),
    [
        ("192.168.1.7:31337", "45.77.0.9:41337", ("45.77.0.9:41337", "192.168.1.7:0")),
        ("192.168.1.7:31337", "", ()),
        ("45.77.0.9:31337", "", ("45.77.0.9:0",)),
        ("127.0.0.1:31337", "45.77.0.9", ("45.77.0.9:0",)),
    ],
)
def test_a_private_address_is_published_after_a_public_one(
    listen: str, announce: str, addresses: tuple[str, ...]
) -> None:
    """In a public swarm, and before the server listens, on port 0."""
    assert reachable(listen=listen, announce=announce).addresses() == addresses
