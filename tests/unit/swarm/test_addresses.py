"""Which texts are addresses, and which addresses in a stranger's record a peer accepts."""

from __future__ import annotations

import socket

import pytest
from harness.identities import identity_of

from noloco_p2p.errors import DirectoryError
from noloco_p2p.swarm.addresses import (
    announce_multiaddr,
    by_reach,
    is_wildcard,
    listen_multiaddr,
    resolves,
    split_peer_id,
    tcp_target,
)
from noloco_p2p.swarm.daemon import ListenOn, probe_port
from noloco_p2p.swarm.records import PeerRecord, believable
from noloco_p2p.swarm.relay import relays_of


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "/ip4/0.0.0.0/tcp/7"),
        ("::1", "/ip6/::1/tcp/7"),
        ("[::1]", "/ip6/::1/tcp/7"),
        ("localhost", "/ip4/127.0.0.1/tcp/7"),
    ],
)
def test_hosts_become_multiaddrs(host: str, expected: str) -> None:
    assert listen_multiaddr(host, 7) == announce_multiaddr(host, 7) == expected


def test_names_are_announced_but_not_listened_on() -> None:
    assert announce_multiaddr("peer.example.org", 7) == "/dns4/peer.example.org/tcp/7"
    with pytest.raises(DirectoryError, match=r"0\.0\.0\.0"):
        listen_multiaddr("peer.example.org", 7)


def test_wildcards() -> None:
    assert [is_wildcard(host) for host in ("0.0.0.0", "::", "127.0.0.1", "a.example")] == [True, True, False, False]


def test_a_name_that_nobody_knows_is_told() -> None:
    hosts = ("127.0.0.1", "[::1]", "localhost", "nobody.invalid", "a..b", "x" * 300)
    assert [resolves(host) for host in hosts] == [True, True, True, False, False, False]


def test_the_peer_id_comes_off() -> None:
    assert split_peer_id("/ip4/10.0.0.1/tcp/1/p2p/abc") == ("/ip4/10.0.0.1/tcp/1", "abc")
    for wrong in ("", "/ip4/10.0.0.1/tcp/1", "10.0.0.1:1", "/ip4/10.0.0.1/tcp/1/p2p/", "/ip4/1/p2p/a/b"):
        with pytest.raises(DirectoryError, match="not a valid address"):
            split_peer_id(wrong)


def test_public_addresses_come_first() -> None:
    mixed = ["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.1/tcp/1", "/ip4/8.8.8.8/tcp/1", "/dns4/a.example/tcp/1"]
    assert by_reach([*mixed, mixed[0]]) == [mixed[2], mixed[3], mixed[1], mixed[0]]


def test_plain_tcp_targets() -> None:
    assert tcp_target("/dns4/a.example/tcp/80") == ("a.example", 80)
    assert tcp_target("/ip4/10.0.0.1/udp/80/quic") is None
    assert tcp_target("/ip4/10.0.0.1/tcp/x") is None


def test_what_is_announced() -> None:
    assert ListenOn("0.0.0.0", 5, "a.example").arguments() == [
        "-hostAddrs=/ip4/0.0.0.0/tcp/5",
        "-announceAddrs=/dns4/a.example/tcp/5",
    ]
    assert ListenOn("10.0.0.1", 5, "8.8.8.8").arguments()[1] == "-announceAddrs=/ip4/8.8.8.8/tcp/5,/ip4/10.0.0.1/tcp/5"
    assert ListenOn("0.0.0.0").arguments() == ["-hostAddrs=/ip4/0.0.0.0/tcp/0"]


def test_a_taken_port_is_told_even_when_its_holder_would_share_it() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(DirectoryError, match=f"port {port} on .* already in use"):
            probe_port("127.0.0.1", port)
    assert probe_port("127.0.0.1", port) == port


def test_a_foreign_address_is_told() -> None:
    with pytest.raises(DirectoryError, match=r"203\.0\.113\.5 is not an address of this machine"):
        probe_port("203.0.113.5", 0)


# addresses that strangers tell

ME, RELAY = identity_of("told").peer_id, identity_of("relay").peer_id
PUBLIC = "203.0.114.7"


def record(addresses: tuple[str, ...], multiaddrs: tuple[str, ...]) -> PeerRecord:
    ways = tuple(f"{address}/p2p/{ME}" for address in multiaddrs)
    return PeerRecord(ME, "r", "0" * 64, addresses=addresses, multiaddrs=ways)


def test_an_honest_record_is_believed() -> None:
    whole = record((f"{PUBLIC}:29500",), (f"/ip4/{PUBLIC}/tcp/29501",))
    assert believable(whole, is_outside=True) == whole
    relayed = record((), (f"/ip4/{PUBLIC}/tcp/29501/p2p/{RELAY}/p2p-circuit",))
    assert believable(relayed, is_outside=True) == relayed


@pytest.mark.parametrize(
    "address", ["unix:/run/docker.sock", "dns:///10.0.0.1:80", "10.0.0.1", "10.0.0.1:99999", "224.0.0.1:80", "a/b:80"]
)
def test_what_is_no_address_is_left_out(address: str) -> None:
    assert believable(record((address,), ()), is_outside=False).addresses == ()


@pytest.mark.parametrize(
    "multiaddr", ["/ip4/10.0.0.1/udp/53", "/unix/run/x", "/ip4/127.1/tcp/80", "/dns4/x/tcp/0", "/x"]
)
def test_what_is_no_multiaddr_is_left_out(multiaddr: str) -> None:
    assert believable(record((), (multiaddr,)), is_outside=False).multiaddrs == ()


def test_private_addresses_are_left_out_from_outside_and_kept_at_home() -> None:
    told = record(
        ("127.0.0.1:6379",), ("/ip4/169.254.169.254/tcp/80", f"/ip4/192.168.0.1/tcp/80/p2p/{RELAY}/p2p-circuit")
    )
    outside = believable(told, is_outside=True)
    assert (outside.addresses, outside.multiaddrs) == ((), ())
    at_home = record(("192.168.0.7:29500",), ("/ip4/192.168.0.7/tcp/29501",))
    assert believable(at_home, is_outside=False) == at_home


def test_a_record_names_one_host() -> None:
    told = record(
        (f"{PUBLIC}:1", "203.0.114.8:1"),
        ("/ip4/203.0.114.9/tcp/1", f"/ip4/{PUBLIC}/tcp/2", "/dns4/x.example.org/tcp/3"),
    )
    left = believable(told, is_outside=True)
    assert left.addresses == (f"{PUBLIC}:1",)
    assert left.multiaddrs == (f"/ip4/{PUBLIC}/tcp/2/p2p/{ME}",)


def test_a_way_by_a_relay_without_a_name_does_not_reach_who_looks_for_relays() -> None:
    """Such an address once raised in `live()`, so that no round began while the record existed."""
    told = record((), ("/ip4/203.0.114.7/tcp/1/p2p/p2p-circuit",))
    assert relays_of(believable(told, is_outside=False).multiaddrs) == {}


def test_few_relays_are_believed() -> None:
    circuits = tuple(f"/ip4/203.0.114.{number}/tcp/1/p2p/{RELAY}/p2p-circuit" for number in range(1, 9))
    assert len(believable(record((), circuits), is_outside=True).multiaddrs) == 2


OWN = ("203.0.114.9:31337", "192.168.1.7:31337")  # what this peer announces


@pytest.mark.parametrize("is_outside", [True, False])
def test_the_private_address_of_a_peer_behind_the_same_router_is_kept(is_outside: bool) -> None:
    there = record(("203.0.114.9:31347", "192.168.1.8:31337"), ("/ip4/203.0.114.9/tcp/31348",))
    assert believable(there, is_outside=is_outside, own=OWN) == there


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
    left = believable(record(addresses, ()), is_outside=True, own=own)
    assert left.addresses == tuple(each for each in addresses if each.startswith("203."))


def test_one_private_address_is_kept() -> None:
    told = record(("203.0.114.9:1", *(f"192.168.1.{number}:1" for number in range(8, 11))), ())
    assert believable(told, is_outside=True, own=OWN).addresses == ("203.0.114.9:1", "192.168.1.8:1")
