"""Reads libp2p multiaddrs and HOST:PORT addresses, and decides which of a stranger's addresses are believed."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.hosts import is_host, is_port, is_public, is_wildcard, network_of

CIRCUIT = "/p2p-circuit"

_ID = "/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}"
_WAY = re.compile(rf"/[^/]+/[^/]+/tcp/[0-9]+{_ID}({CIRCUIT}{_ID})?")


# multiaddrs


def listen_multiaddr(host: str, port: int) -> str:
    """Return the multiaddr of a host and port, such as /ip4/HOST/tcp/PORT.

    Raises DirectoryError if `host` is not an IP address.
    """
    multiaddr = announce_multiaddr(host, port)
    if multiaddr.startswith("/dns"):
        raise DirectoryError(
            f"cannot listen on {host!r}, which is not an IP address; use 0.0.0.0 to listen on all network interfaces"
        )
    return multiaddr


def announce_multiaddr(host: str, port: int) -> str:
    """Return the multiaddr of a host and port. Unlike `listen_multiaddr`, it accepts host names."""
    try:
        return f"/ip{ipaddress.ip_address(_plain(host)).version}/{_plain(host)}/tcp/{port}"
    except ValueError:
        return f"/dns4/{host}/tcp/{port}"


def split_peer_id(multiaddr: str) -> tuple[str, str]:
    """Split ADDRESS/p2p/ID into (address, peer id). Raises DirectoryError if there is no peer id."""
    address, separator, peer_id = multiaddr.rpartition("/p2p/")
    if not separator or not address.startswith("/") or not peer_id or "/" in peer_id:
        raise DirectoryError(
            f"{multiaddr!r} is not a valid address; expected the form /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo.."
        )
    return address, peer_id


def tcp_target(address: str) -> tuple[str, int] | None:
    """Return the (host, port) of a TCP multiaddr without a peer id, or None for any other kind of address."""
    parts = address.split("/")
    is_plain = len(parts) == 5 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6") and parts[3] == "tcp"
    return (parts[2], int(parts[4])) if is_plain and parts[4].isdecimal() else None


def host_in(address: str) -> str:
    """Return the host of a multiaddr without a peer id, or an empty string if it is not a valid TCP address."""
    target = tcp_target(address)
    return target[0] if target and is_host(target[0]) and is_port(str(target[1])) else ""


def only_public(multiaddrs: Iterable[str]) -> list[str]:
    """Return the multiaddrs, with or without a peer id, that have a public address or a host name.

    Machines on other networks may be able to dial these.
    """
    return [each for each in multiaddrs if (host := host_in(each.partition("/p2p/")[0])) and is_public(host)]


def by_reach(multiaddrs: Iterable[str]) -> list[str]:
    """Return the multiaddrs without duplicates, sorted with public addresses and names first and loopback addresses
    last.
    """

    def reach(multiaddr: str) -> int:
        try:
            address = ipaddress.ip_address(multiaddr.split("/")[2])
        except (ValueError, IndexError):
            return 0
        return 2 if address.is_loopback else 1 if not address.is_global else 0

    return sorted(dict.fromkeys(multiaddrs), key=reach)


async def guarded(guard: DialGuard, peer_id: str, address: str, *, num_dials: int = 1, is_given: bool = False) -> str:
    """Check an address with `DialGuard.way`, and return the multiaddr to dial. Neither of them contains a peer id.

    Raises Unreachable if the address is not a TCP address, or if the guard forbids dialling it.
    """
    target = tcp_target(address)
    if target is None:
        raise Unreachable(f"{address} is not the TCP address of a peer", peer=peer_id)
    host = await guard.way(peer_id, target[0], num_dials=num_dials, is_given=is_given)
    return listen_multiaddr(host, target[1])


# HOST:PORT


def routable_host(listen_host: str) -> str:
    """Return an address of this machine that others can dial.

    This is `listen_host`, or the local address of the default route if `listen_host` is a wildcard.
    """
    if not is_wildcard(listen_host):
        return _plain(listen_host)
    # Connecting a UDP socket to a documentation address (RFC 5737, RFC 3849) selects a route and sends nothing.
    # A server that listens on :: also accepts IPv4 connections.
    ways = [(socket.AF_INET, "192.0.2.1")]
    if ":" in listen_host:
        ways.insert(0, (socket.AF_INET6, "2001:db8::1"))
    for family, target in ways:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return probe.getsockname()[0]
        except OSError:
            continue
    return "127.0.0.1"


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    plain = _plain(host)
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"


def host_of(address: str) -> str:
    """Return the host of HOST:PORT, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def resolves(host: str) -> bool:
    """Return whether `host` is an IP address, or a name that resolves on this machine.

    Resolving a name can take several seconds.
    """
    try:
        return bool(socket.getaddrinfo(_plain(host), None))
    except (OSError, UnicodeError):
        return False


def _plain(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host.strip("[]")


# the hosts of the addresses that strangers tell


def grpc_host(address: str) -> str:
    """Return the host of HOST:PORT, or an empty string for any other text."""
    host, separator, port = address.rpartition(":")
    return host.strip("[]") if separator and is_host(host) and is_port(port) else ""


def dialled_host(multiaddr: str) -> str:
    """Return the host to dial for a multiaddr, or an empty string if it is not a TCP address.

    If the multiaddr goes through a relay, this is the host of the relay.
    """
    return host_in(multiaddr.partition("/p2p/")[0]) if _WAY.fullmatch(multiaddr) else ""


def of_one_host(addresses: Iterable[str], *, is_outside: bool) -> list[str]:
    """Return the valid addresses that have the same host as the first valid one.

    `addresses` are multiaddrs without peer ids that another node has sent. If `is_outside` is true, private addresses
    do not count as valid.
    """
    left = [each for each in addresses if may_be_dialled(host_in(each), is_outside=is_outside)]
    return [each for each in left if host_in(each) == host_in(left[0])]


def may_be_dialled(host: str, *, is_outside: bool) -> bool:
    return bool(host) and (is_public(host) or not is_outside)


def is_near(address: str, own: str) -> bool:
    """Return whether two HOST:PORT addresses are different, and in the same network."""
    try:
        return address != own and network_of(grpc_host(address)) == network_of(host_of(own))
    except ValueError:  # a name, or no address at all
        return False
