"""Filters the addresses in a stranger's record, so that only valid addresses of a single host remain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from noloco_p2p.hosts import is_host, is_port, is_public, network_of
from noloco_p2p.swarm.address_book import CIRCUIT
from noloco_p2p.swarm.addresses import host_of, tcp_target
from noloco_p2p.swarm.records import PeerRecord

_ID = "/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}"
_WAY = re.compile(rf"/[^/]+/[^/]+/tcp/[0-9]+{_ID}({CIRCUIT}{_ID})?")
MAX_RELAYS = 2  # maximum number of relay addresses per record; each has the host of its relay


def believable(record: PeerRecord, *, only_public: bool, own: Sequence[str] = ()) -> PeerRecord:
    """Return the record without invalid addresses, and without direct addresses of any host but the first.

    If `only_public` is true, private addresses are removed as well, except for the one that `nearby` returns. `own`
    contains the gRPC addresses of this peer.
    """
    addresses = [each for each in record.addresses if _may_be(grpc_host(each), only_public)]
    ways = [each for each in record.multiaddrs if _may_be(dialled_host(each), only_public)]
    direct = [each for each in ways if CIRCUIT not in each]
    relayed = [each for each in ways if CIRCUIT in each][:MAX_RELAYS]
    hosts = [*map(grpc_host, addresses), *map(dialled_host, direct)]
    return replace(
        record,
        addresses=(*(each for each in addresses if grpc_host(each) == hosts[0]), *nearby(record.addresses, own)),
        multiaddrs=(*relayed, *(each for each in direct if dialled_host(each) == hosts[0])),
    )


def nearby(addresses: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """Return the private address of a peer that seems to be behind the same router as this one, or nothing.

    `addresses` are those of the peer, and `own` those of this one: the public address, then the private one. The public
    hosts must be the same, and the private hosts must be in the same network.
    """
    if len(addresses) < 2 or len(own) < 2 or addresses[1] == own[1] or grpc_host(addresses[0]) != host_of(own[0]):
        return ()
    try:
        is_near = network_of(grpc_host(addresses[1])) == network_of(host_of(own[1]))
    except ValueError:  # a name, or no address at all
        return ()
    return addresses[1:2] if is_near else ()


def of_one_host(addresses: Iterable[str], *, only_public: bool) -> list[str]:
    """Return the valid addresses that have the same host as the first valid one.

    `addresses` are multiaddrs without peer ids that another node has sent. If `only_public` is true, private addresses
    do not count as valid.
    """
    left = [each for each in addresses if _may_be(tcp_host(each), only_public)]
    return [each for each in left if tcp_host(each) == tcp_host(left[0])]


def grpc_host(address: str) -> str:
    """Return the host of HOST:PORT, or an empty string for any other text."""
    host, separator, port = address.rpartition(":")
    return host.strip("[]") if separator and is_host(host) and is_port(port) else ""


def dialled_host(multiaddr: str) -> str:
    """Return the host to dial for a multiaddr, or an empty string if it is not a TCP address.

    If the multiaddr goes through a relay, this is the host of the relay.
    """
    return tcp_host(multiaddr.partition("/p2p/")[0]) if _WAY.fullmatch(multiaddr) else ""


def tcp_host(address: str) -> str:
    """Return the host of a multiaddr without a peer id, or an empty string if it is not a valid TCP address."""
    target = tcp_target(address)
    return target[0] if target and is_host(target[0]) and is_port(str(target[1])) else ""


def _may_be(host: str, only_public: bool) -> bool:
    return bool(host) and (is_public(host) or not only_public)
