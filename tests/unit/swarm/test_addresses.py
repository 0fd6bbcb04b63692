from __future__ import annotations

import socket

import pytest

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
