"""Classify hosts: which network a host belongs to, and whether machines elsewhere can dial it."""

from __future__ import annotations

import ipaddress
import re

LOCAL_DOMAINS = frozenset({"arpa", "home", "internal", "lan", "local", "localdomain", "localhost", "test"})

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# All global unicast addresses that IANA has allocated. Site-local, IPv4-compatible and translated addresses are
# excluded.
_GLOBAL = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def ip_of(host: str) -> Address:
    """Parse an IP address, with or without brackets. An IPv4-mapped IPv6 address becomes an IPv4 address.

    Raises ValueError for anything else.
    """
    address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def network_of(host: str) -> str:
    """Return the network of an IP address: 192.0.2.0/24 for 192.0.2.7, and 2001:db8::/48 for 2001:db8::1.

    Raises ValueError if `host` is not an IP address.
    """
    address = ip_of(host)
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


def is_wildcard(host: str) -> bool:
    """Return whether the host is 0.0.0.0 or ::, which stand for every address of this machine."""
    try:
        return ip_of(host).is_unspecified
    except ValueError:
        return False


def is_public(host: str) -> bool:
    """Return whether machines on other networks may be able to dial the host.

    This holds for a public IP address and for any name that is not local.
    """
    try:
        address = ip_of(host)
    except ValueError:
        labels = host.rstrip(".").lower().split(".")
        return len(labels) > 1 and labels[-1] not in LOCAL_DOMAINS
    inner = _embedded(address)
    if inner is not None:
        return is_public(str(inner))
    return address.is_global and not address.is_multicast and (address.version == 4 or address in _GLOBAL)


def is_home(host: str) -> bool:
    """Return whether the host is a private IP address that other machines on the local network can reach.

    Raises ValueError for a name.
    """
    address = ip_of(host)
    return address.is_private and not (address.is_loopback or address.is_multicast or address.is_unspecified)


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address inside a 6to4 or NAT64 address. Routers forward packets to that IPv4 address."""
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    return ipaddress.IPv4Address(address.packed[-4:]) if address in _NAT64 else address.sixtofour


def is_host(text: str) -> bool:
    """Return whether `text` is an IP address that can be dialled (IPv6 with or without brackets) or a host name.

    A name consists of letters, digits, dots, hyphens and underscores. 127.1 and 0x7f000001 are rejected, although
    resolvers accept them.
    """
    try:
        address = ip_of(text)
    except ValueError:
        last = text.rstrip(".").rpartition(".")[2]
        return bool(_NAME.fullmatch(text)) and not last[:1].isdecimal()
    return not (address.is_multicast or address.is_unspecified)


def is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65_536
