"""Model routers that translate addresses (NAT), for the links of netlab.py. This module uses no sockets and no clock.

RFC 4787 describes a router by two properties. Its *mapping* says which external port an internal port gets: one for all
partners ("endpoint"), one per partner address ("address"), or one per partner address and port ("port"). Its
*filtering* says which senders may reach such a port: all of them, addresses that were sent to, or addresses and ports
that were sent to. The router drops all other packets silently, and does not return internal packets to the inside (no
hairpinning). A router behind another one models a home whose carrier shares its addresses. A router may also forward
all its ports to one node without changing their numbers, as an owner can configure it for a peer that others call.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.packets import End, ends_of, with_ends

Breadth = Literal["endpoint", "address", "port"]
FIRST_PORT = 20_000  # external ports, which differ from all internal ones


@dataclass(frozen=True, slots=True)
class Router:
    """The properties of one router.

    `behind` is the number of an earlier router that this one is behind, or None for a router on the internet.
    `forwards_to` is the number of the node to which all ports are forwarded, or None.
    """

    mapping: Breadth
    filtering: Breadth
    behind: int | None = None
    forwards_to: int | None = None


@dataclass(slots=True)
class _Mapping:
    inside: End
    sent_to: set[End] = field(default_factory=set)


@dataclass(slots=True)
class _Table:
    """The mappings of one router for one protocol."""

    router: Router
    forwarded: bytes  # the address that gets all ports; b"" = none
    outside: dict[tuple[End, bytes, int], int] = field(default_factory=dict)  # by internal end and part of the partner
    mappings: dict[int, _Mapping] = field(default_factory=dict)  # by external port

    def port_for(self, inside: End, partner: End) -> int:
        """Return the external port for packets to the partner, which may answer from now on."""
        if inside[0] == self.forwarded:
            return inside[1]
        breadth = self.router.mapping
        key = (inside, b"" if breadth == "endpoint" else partner[0], partner[1] if breadth == "port" else 0)
        port = self.outside.setdefault(key, FIRST_PORT + len(self.outside))
        self.mappings.setdefault(port, _Mapping(inside)).sent_to.add(partner)
        return port

    def inside_of(self, port: int) -> End | None:
        if self.forwarded:
            return self.forwarded, port
        mapping = self.mappings.get(port)
        return mapping.inside if mapping else None

    def lets_in(self, port: int, partner: End) -> bool:
        if self.forwarded:
            return True
        match self.router.filtering:
            case "endpoint":
                return True
            case "address":
                return any(address == partner[0] for address, _ in self.mappings[port].sent_to)
            case "port":
                return partner in self.mappings[port].sent_to


def outer_address(number: int, router: Router) -> str:
    return f"45.78.0.{number + 1}" if router.behind is None else f"100.64.{router.behind}.{number + 1}"


class Routers:
    """All routers of a network. `behind` has the number of the router of each node, or None.

    The address of node k is 45.77.0.(k + 1) on the internet, and 192.168.r.(k + 1) behind router r. The address of
    router r is 45.78.0.(r + 1) on the internet, and 100.64.q.(r + 1) behind router q.
    """

    def __init__(self, routers: Sequence[Router], behind: Sequence[int | None]) -> None:
        self._routers = list(routers)
        self._behind = list(behind)
        self.addresses = [
            f"45.77.0.{node + 1}" if router is None else f"192.168.{router}.{node + 1}"
            for node, router in enumerate(behind)
        ]
        outer = [outer_address(number, router) for number, router in enumerate(routers)]
        self._nodes = {socket.inet_aton(address): node for node, address in enumerate(self.addresses)}
        self._outer = [socket.inet_aton(address) for address in outer]
        self._tables: dict[tuple[int, int], _Table] = {}  # by (router, protocol)

    def leave(self, frame: bytes, node: int) -> tuple[bytes, int] | None:
        """Return the packet as it leaves the routers and the node that it reaches, or None if it reaches no node."""
        found = ends_of(frame)
        if found is None:
            return None
        protocol, source, destination = found
        realm = self._behind[node]
        while not self._is_in(realm, destination[0]):
            if realm is None or destination[0] == self._outer[realm]:  # no such address, or a hairpin
                return None
            source = self._outer[realm], self._table(realm, protocol).port_for(source, destination)
            realm = self._routers[realm].behind
        target = self._node_at(protocol, destination)
        return None if target is None else (with_ends(frame, source, destination), target)

    def arrive(self, frame: bytes) -> bytes | None:
        """Return the packet as the node receives it, or None if a router rejects it."""
        found = ends_of(frame)
        assert found is not None
        protocol, source, destination = found
        while destination[0] not in self._nodes:
            table = self._table(self._outer.index(destination[0]), protocol)
            if not table.lets_in(destination[1], source):
                return None
            inside = table.inside_of(destination[1])
            assert inside is not None
            destination = inside
        return with_ends(frame, source, destination)

    def _node_at(self, protocol: int, end: End) -> int | None:
        """Return the node that this end maps to, behind any number of routers."""
        while end[0] not in self._nodes:
            inside = self._table(self._outer.index(end[0]), protocol).inside_of(end[1])
            if inside is None:
                return None
            end = inside
        return self._nodes[end[0]]

    def _is_in(self, realm: int | None, address: bytes) -> bool:
        """Whether a node or router with this address is directly behind that router, or on the internet."""
        if address in self._nodes:
            return self._behind[self._nodes[address]] == realm
        return address in self._outer and self._routers[self._outer.index(address)].behind == realm

    def _table(self, number: int, protocol: int) -> _Table:
        if (number, protocol) not in self._tables:
            router = self._routers[number]
            forwarded = b"" if router.forwards_to is None else socket.inet_aton(self.addresses[router.forwards_to])
            self._tables[number, protocol] = _Table(router, forwarded)
        return self._tables[number, protocol]
