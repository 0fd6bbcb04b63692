"""Hosts of other machines: which network they belong to, and whether machines elsewhere can dial them."""

from __future__ import annotations

import ipaddress
import re

LOCAL_DOMAINS = frozenset({"arpa", "home", "internal", "lan", "local", "localdomain", "localhost", "test"})

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\.?")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Global unicast, all that IANA has allocated. It excludes site-local, IPv4-compatible and translated addresses.
_GLOBAL = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def ip_of(host: str) -> Address:
    """Parse an IP address, with or without brackets; IPv4-mapped IPv6 becomes IPv4. Raises ValueError for anything
    else.
    """
    address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def network_of(host: str) -> str:
    """192.0.2.7 -> 192.0.2.0/24, 2001:db8::1 -> 2001:db8::/48. Raises ValueError if `host` is no IP address."""
    address = ip_of(host)
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


def is_wildcard(host: str) -> bool:
    """0.0.0.0 or ::, that is, every address of this machine."""
    try:
        return ip_of(host).is_unspecified
    except ValueError:
        return False


def is_public(host: str) -> bool:
    """Whether machines of other networks may be able to dial the host: a public IP address, or a name that is not
    local.
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
    """Whether the host is a private IP address that belongs to more than this machine. Raises ValueError for a name."""
    address = ip_of(host)
    return address.is_private and not (address.is_loopback or address.is_multicast or address.is_unspecified)


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address inside a 6to4 or NAT64 address, to which a router forwards."""
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    return ipaddress.IPv4Address(address.packed[-4:]) if address in _NAT64 else address.sixtofour


def is_host(text: str) -> bool:
    """Whether `text` is an IP address that can be dialled (IPv6 with or without brackets), or a host name.

    A name has letters, digits, dots and hyphens. 127.1 and 0x7f000001 are neither, although resolvers accept them.
    """
    try:
        address = ip_of(text)
    except ValueError:
        last = text.rstrip(".").rpartition(".")[2]
        return bool(_NAME.fullmatch(text)) and not last[:1].isdecimal()
    return not (address.is_multicast or address.is_unspecified)


def is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65_536
