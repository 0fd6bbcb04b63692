"""Which addresses in a stranger's record a peer accepts."""

from __future__ import annotations

import pytest
from harness.identities import identity_of

from noloco_p2p.swarm.address_filter import believable
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.swarm.relay import relays_of

ME, RELAY = identity_of("told").peer_id, identity_of("relay").peer_id
PUBLIC = "203.0.114.7"


def record(addresses: tuple[str, ...], multiaddrs: tuple[str, ...]) -> PeerRecord:
    ways = tuple(f"{address}/p2p/{ME}" for address in multiaddrs)
    return PeerRecord(ME, "r", "0" * 64, addresses=addresses, multiaddrs=ways)


def test_an_honest_record_is_believed() -> None:
    whole = record((f"{PUBLIC}:29500",), (f"/ip4/{PUBLIC}/tcp/29501",))
    assert believable(whole, only_public=True) == whole
    relayed = record((), (f"/ip4/{PUBLIC}/tcp/29501/p2p/{RELAY}/p2p-circuit",))
    assert believable(relayed, only_public=True) == relayed


@pytest.mark.parametrize(
    "address", ["unix:/run/docker.sock", "dns:///10.0.0.1:80", "10.0.0.1", "10.0.0.1:99999", "224.0.0.1:80", "a/b:80"]
)
def test_what_is_no_address_is_left_out(address: str) -> None:
    assert believable(record((address,), ()), only_public=False).addresses == ()


@pytest.mark.parametrize(
    "multiaddr", ["/ip4/10.0.0.1/udp/53", "/unix/run/x", "/ip4/127.1/tcp/80", "/dns4/x/tcp/0", "/x"]
)
def test_what_is_no_multiaddr_is_left_out(multiaddr: str) -> None:
    assert believable(record((), (multiaddr,)), only_public=False).multiaddrs == ()


def test_private_addresses_are_left_out_from_outside_and_kept_at_home() -> None:
    told = record(
        ("127.0.0.1:6379",), ("/ip4/169.254.169.254/tcp/80", f"/ip4/192.168.0.1/tcp/80/p2p/{RELAY}/p2p-circuit")
    )
    outside = believable(told, only_public=True)
    assert (outside.addresses, outside.multiaddrs) == ((), ())
    at_home = record(("192.168.0.7:29500",), ("/ip4/192.168.0.7/tcp/29501",))
    assert believable(at_home, only_public=False) == at_home


def test_a_record_names_one_host() -> None:
    told = record(
        (f"{PUBLIC}:1", "203.0.114.8:1"),
        ("/ip4/203.0.114.9/tcp/1", f"/ip4/{PUBLIC}/tcp/2", "/dns4/x.example.org/tcp/3"),
    )
    left = believable(told, only_public=True)
    assert left.addresses == (f"{PUBLIC}:1",)
    assert left.multiaddrs == (f"/ip4/{PUBLIC}/tcp/2/p2p/{ME}",)


def test_a_way_by_a_relay_without_a_name_does_not_reach_who_looks_for_relays() -> None:
    """Such an address once raised in `live()`, so that no round began while the record existed."""
    told = record((), ("/ip4/203.0.114.7/tcp/1/p2p/p2p-circuit",))
    assert relays_of(believable(told, only_public=False).multiaddrs) == {}


def test_few_relays_are_believed() -> None:
    circuits = tuple(f"/ip4/203.0.114.{number}/tcp/1/p2p/{RELAY}/p2p-circuit" for number in range(1, 9))
    assert len(believable(record((), circuits), only_public=True).multiaddrs) == 2


OWN = ("203.0.114.9:31337", "192.168.1.7:31337")  # what this peer announces


@pytest.mark.parametrize("only_public", [True, False])
def test_the_private_address_of_a_peer_behind_the_same_router_is_kept(only_public: bool) -> None:
    there = record(("203.0.114.9:31347", "192.168.1.8:31337"), ("/ip4/203.0.114.9/tcp/31348",))
    assert believable(there, only_public=only_public, own=OWN) == there


@pytest.mark.parametrize(
    ("addresses", "own"),
    [
        (("203.0.114.8:1", "192.168.1.8:1"), OWN),
        (("192.168.1.8:1",), OWN),
        (("192.168.1.8:1", "192.168.1.9:1"), OWN),
        (("203.0.114.9:1", "192.168.2.8:1"), OWN),
        (("203.0.114.9:1", "169.254.169.254:1"), OWN),
        (("203.0.114.9:1", "127.0.0.1:1"), OWN),
        (("203.0.114.9:1", "printer.lan:1"), OWN),
        (("203.0.114.9:1", "unix:/run/docker.sock"), OWN),
        (("203.0.114.9:1", OWN[1]), OWN),
        (("203.0.114.9:1", "192.168.1.8:1"), OWN[:1]),
        (("203.0.114.9:1", "192.168.1.8:1"), ()),
    ],
    ids=[
        "another router",
        "no router",
        "no router, twice",
        "another network",
        "metadata of a cloud",
        "loopback",
        "a name",
        "no address",
        "this peer",
        "this peer is behind no router",
        "this peer has no address",
    ],
)
def test_the_private_address_of_anybody_else_is_left_out(addresses: tuple[str, ...], own: tuple[str, ...]) -> None:
    left = believable(record(addresses, ()), only_public=True, own=own)
    assert left.addresses == tuple(each for each in addresses if each.startswith("203."))


def test_one_private_address_is_kept() -> None:
    told = record(("203.0.114.9:1", *(f"192.168.1.{number}:1" for number in range(8, 11))), ())
    assert believable(told, only_public=True, own=OWN).addresses == ("203.0.114.9:1", "192.168.1.8:1")
