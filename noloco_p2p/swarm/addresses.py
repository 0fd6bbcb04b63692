"""libp2p multiaddrs: creating them, removing the peer id, and sorting them by usefulness."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError, Unreachable
from noloco_p2p.hosts import is_public, is_wildcard


def listen_multiaddr(host: str, port: int) -> str:
    """Return /ip4/HOST/tcp/PORT. Raises DirectoryError when HOST is not an IP address."""
    try:
        return f"/{_family(host)}/{_plain(host)}/tcp/{port}"
    except ValueError:
        raise DirectoryError(
            f"cannot listen on {host!r}: use an IP address, such as 0.0.0.0 for all networks"
        ) from None


def announce_multiaddr(host: str, port: int) -> str:
    """Like `listen_multiaddr`, but HOST may be a name too."""
    try:
        return f"/{_family(host)}/{_plain(host)}/tcp/{port}"
    except ValueError:
        return f"/dns4/{host}/tcp/{port}"


def routable_host(listen_host: str) -> str:
    """The address that others can dial: the listening one, or for a wildcard that of the default route."""
    if not is_wildcard(listen_host):
        return _plain(listen_host)
    # Documentation addresses (RFC 5737, RFC 3849) select a route, and nothing is sent. :: also accepts IPv4 calls.
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
    """HOST:PORT, with an IPv6 address in brackets."""
    plain = _plain(host)
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"


def host_of(address: str) -> str:
    """The host of HOST:PORT, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def resolves(host: str) -> bool:
    """Whether `host` is an IP address, or a name that resolves on this machine; resolving may take seconds."""
    try:
        return bool(socket.getaddrinfo(_plain(host), None))
    except (OSError, UnicodeError):
        return False


def any_public(multiaddrs: Iterable[str]) -> bool:
    """Whether one of these (with or without peer id) is a public address or name."""
    targets = (tcp_target(multiaddr.partition("/p2p/")[0]) for multiaddr in multiaddrs)
    return any(is_public(target[0]) for target in targets if target)


def only_public(multiaddrs: Iterable[str]) -> list[str]:
    """Those that machines of other networks may be able to dial."""
    return [multiaddr for multiaddr in multiaddrs if any_public([multiaddr])]


def split_peer_id(multiaddr: str) -> tuple[str, str]:
    """Split ADDRESS/p2p/ID into (address, peer id). Raises DirectoryError when there is no id."""
    address, separator, peer_id = multiaddr.rpartition("/p2p/")
    if not separator or not address.startswith("/") or not peer_id or "/" in peer_id:
        raise DirectoryError(
            f"{multiaddr!r} is not an address to dial: it must look like /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo.."
        )
    return address, peer_id


def tcp_target(address: str) -> tuple[str, int] | None:
    """The (host, port) of /ip4|ip6|dns../HOST/tcp/PORT; None for any other kind of address."""
    parts = address.split("/")
    is_plain = len(parts) == 5 and parts[1] in ("ip4", "ip6", "dns", "dns4", "dns6") and parts[3] == "tcp"
    return (parts[2], int(parts[4])) if is_plain and parts[4].isdecimal() else None


async def guarded(guard: DialGuard, peer_id: str, address: str) -> str:
    """The multiaddr (without peer id) to dial for one that a stranger named. Raises Unreachable."""
    target = tcp_target(address)
    if target is None:
        raise Unreachable(f"{address} is not the address of a peer", peer=peer_id)
    return listen_multiaddr(await guard.way(peer_id, target[0]), target[1])


def host_in(address: str) -> str:
    """The host of a multiaddr; empty if it is not TCP."""
    target = tcp_target(address)
    return target[0] if target else ""


def by_reach(multiaddrs: Iterable[str]) -> list[str]:
    """Public addresses and names first, private networks next, loopback last, without duplicates."""
    return sorted(dict.fromkeys(multiaddrs), key=_reach)


def _reach(multiaddr: str) -> int:
    try:
        address = ipaddress.ip_address(multiaddr.split("/")[2])
    except (ValueError, IndexError):
        return 0
    return 2 if address.is_loopback else 1 if not address.is_global else 0


def _plain(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host.strip("[]")


def _family(host: str) -> str:
    return f"ip{ipaddress.ip_address(_plain(host)).version}"
