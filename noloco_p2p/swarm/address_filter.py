"""The valid addresses in a stranger's record: those that a peer may have, of one host."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from noloco_p2p.hosts import is_host, is_port, is_public
from noloco_p2p.swarm.address_book import CIRCUIT
from noloco_p2p.swarm.addresses import tcp_target
from noloco_p2p.swarm.records import PeerRecord

_ID = "/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}"
_WAY = re.compile(rf"/[^/]+/[^/]+/tcp/[0-9]+{_ID}({CIRCUIT}{_ID})?")
MAX_RELAYS = 2  # addresses by relays, each of which has its own host


def believable(record: PeerRecord, *, only_public: bool) -> PeerRecord:
    """Return the record without invalid addresses, private ones if `only_public`, and those of a second host."""
    addresses = [each for each in record.addresses if _may_be(grpc_host(each), only_public)]
    ways = [each for each in record.multiaddrs if _may_be(dialled_host(each), only_public)]
    direct = [each for each in ways if CIRCUIT not in each]
    relayed = [each for each in ways if CIRCUIT in each][:MAX_RELAYS]
    hosts = [*map(grpc_host, addresses), *map(dialled_host, direct)]
    return replace(
        record,
        addresses=tuple(each for each in addresses if grpc_host(each) == hosts[0]),
        multiaddrs=(*relayed, *(each for each in direct if dialled_host(each) == hosts[0])),
    )


def of_one_host(addresses: Iterable[str], *, only_public: bool) -> list[str]:
    """The same for addresses that another node sent, without peer id: those of the first host that is left."""
    left = [each for each in addresses if _may_be(tcp_host(each), only_public)]
    return [each for each in left if tcp_host(each) == tcp_host(left[0])]


def grpc_host(address: str) -> str:
    """The host of HOST:PORT; empty for any other text."""
    host, separator, port = address.rpartition(":")
    return host.strip("[]") if separator and is_host(host) and is_port(port) else ""


def dialled_host(multiaddr: str) -> str:
    """The host that is dialled for a multiaddr, which is the relay's if there is one; empty if it is not TCP."""
    return tcp_host(multiaddr.partition("/p2p/")[0]) if _WAY.fullmatch(multiaddr) else ""


def tcp_host(address: str) -> str:
    """The host of a multiaddr without peer id; empty if it is not TCP."""
    target = tcp_target(address)
    return target[0] if target and is_host(target[0]) and is_port(str(target[1])) else ""


def _may_be(host: str, only_public: bool) -> bool:
    return bool(host) and (is_public(host) or not only_public)
