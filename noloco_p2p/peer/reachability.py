"""Manage how others reach this peer: whether they can dial it, which addresses it publishes, and its tunnels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from noloco_p2p.errors import DirectoryError
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.hosts import is_home, is_public
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.settings import PeerSettings
from noloco_p2p.swarm.addresses import host_of, host_port, routable_host
from noloco_p2p.swarm.dial_back import CLOSED, OPEN, DialBack, DialBacks, Reach, Verdict, assess, way_to
from noloco_p2p.swarm.dialer import AddressBook
from noloco_p2p.swarm.directory import SwarmDirectory
from noloco_p2p.swarm.port_mapping import MappedPorts, PortMapping
from noloco_p2p.swarm.relay import Reservations
from noloco_p2p.swarm.tunnel import Tunnels

log = logging.getLogger(__name__)

OWN_DOORS = 4  # addresses of this peer in its ticket; the rest is for other live peers and bootstraps
OTHER_DOORS = 6  # other live peers in a ticket, which remains usable while one of them is alive
FIRST_DIAL_BACK_S = 6.0  # how long a newcomer waits for the first answer before it announces itself
ROUTER_S = 6.0
LOOK_S = 1.0  # how often this peer checks whether its published addresses have changed


class Reachability:
    """The part of a peer that determines and publishes how others can reach it.

    Create it once the directory exists, and `start` it once the server listens. `tunnels` work even before `start`.
    """

    def __init__(self, directory: SwarmDirectory, settings: PeerSettings, book: AddressBook) -> None:
        self._directory = directory
        self._settings = settings
        self._book = book
        self._server: GrpcServer | None = None
        self._service: PeerService | None = None
        self._reservations = Reservations(directory.node, doors=self._relays, wanted=self.is_closed)
        self.tunnels = Tunnels(
            directory.node,
            multiaddrs=self._multiaddrs,
            wanted=self._needs_tunnels,
            relays=self._reservations.relays,
        )
        self._dial_backs = DialBacks(nodes=self._to_ask, ask=self._ask_one)
        asks = settings.map_ports == "always" and not any(settings.announced)
        self._port_mapping = PortMapping(
            routable_host(settings.listen_host) if asks else "",
            ports=self._own_ports,
            on_change=self._dial_backs.ask_again,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, server: GrpcServer, service: PeerService) -> None:
        """Start all tasks. `service` counts the calls from other peers."""
        self._server, self._service = server, service
        if self._directory.relay:
            self._directory.relay.mirror_port = self._ports()[0]
        await self.tunnels.start(server.take)
        jobs = [
            self._reservations.run(),
            self._dial_backs.run(is_direct=lambda: self.verdict().state in OPEN),
            self._port_mapping.run(),
            self._announce_changes(),
        ]
        self._tasks = [asyncio.create_task(job) for job in jobs]

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        await self._port_mapping.close()
        await self.tunnels.stop()

    async def wait_for_router(self) -> None:
        """Wait for the router to report whether it forwards ports, but only for a few seconds."""
        await self._port_mapping.wait(ROUTER_S)

    async def wait_for_dial_back(self) -> None:
        """Wait for the first peer to report whether it can dial this one, but only for a few seconds."""
        await self._dial_backs.wait(FIRST_DIAL_BACK_S)

    # the data that this peer publishes

    @property
    def address(self) -> str:
        """Return the HOST:PORT of gRPC."""
        if mapped := self._mapped():
            return host_port(mapped.host, mapped.ports[0])
        host, port = self._settings.announced
        return host_port(host or routable_host(self._settings.listen_host), port or self._port)

    def verdict(self) -> Verdict:
        """Return the verdict on whether other peers can dial this one, based on their reports."""
        mapped = self._mapped()
        return assess(
            self.address,
            ports=self._ports(),
            dial_backs=self._dial_backs.seen(),
            abroad=self._directory.is_abroad(),
            num_calls=self._service.num_calls if self._service else 0,
            relayed=bool(self._reservations.circuits()),
            num_holes=self.tunnels.num_holes,
            is_mapped=mapped is not None,
        )

    def neighbours(self) -> dict[str, Reach]:
        """Return, by peer id, how each known live peer is reached."""
        is_closed, ways = self.is_closed(), self.tunnels.last_ways
        return {
            record.peer_id: way_to(record.reachability, ways.get(record.peer_id), is_closed=is_closed)
            for record, _ in self._directory.records()
            if record.state != "leaving"
        }

    def addresses(self) -> tuple[str, ...]:
        """Return the gRPC addresses for the record.

        In a public swarm, a private address only follows a public one. It is for peers behind the same router.
        """
        if not is_public(host_of(self.address)):
            return () if self._directory.is_abroad() else (self.address,)
        local = routable_host(self._settings.listen_host)
        return (self.address, host_port(local, self._port)) if is_home(local) else (self.address,)

    def ways_in(self) -> tuple[str, ...]:
        """Return the multiaddrs for the record. Addresses through relays come first, because they are known to work."""
        return (*self._reservations.circuits(), *self._outside(self._mapped()), *self._directory.multiaddrs())

    def doors(self) -> list[str]:
        """Return the multiaddrs for a ticket: those of this peer, of its entrances, and of live peers that others can
        reach.
        """
        alive = {candidate.peer_id for candidate in self._directory.live() if candidate.can_be_called}
        others = sorted((peer, addresses[0]) for peer, addresses in self._book.addresses().items() if peer in alive)
        met = [address for _, address in others[:OTHER_DOORS]]
        own = [*self._outside(self._mapped()), *self._directory.multiaddrs()][:OWN_DOORS]
        return list(dict.fromkeys([*own, *met, *self._directory.entrances.values()]))

    async def _announce_changes(self) -> None:
        """Announce changed addresses, because others cannot call this peer until they have read the new ones."""
        announced = ("", ())
        while True:
            now = (self.verdict().state, self._reservations.circuits())
            if now != announced:
                try:
                    await self._directory.announce_now()
                    announced = now
                except DirectoryError as error:
                    log.debug("the changed addresses could not be announced yet: %s", error)
            await asyncio.sleep(LOOK_S)

    # how reachability is determined

    @property
    def _port(self) -> int:
        return self._server.port if self._server else 0

    def _ports(self) -> tuple[int, int]:
        """Return the gRPC and libp2p ports that others see. A router may map other ports to this peer's ports."""
        if self._port_mapping.mapped:
            return self._port_mapping.mapped.ports
        announced_port = self._settings.announced[1]
        return (announced_port, announced_port + 1) if announced_port else self._own_ports()

    def _own_ports(self) -> tuple[int, int]:
        return self._port, self._directory.node.port

    def _multiaddrs(self) -> Mapping[str, Sequence[str]]:
        return {record.peer_id: record.multiaddrs for record, _ in self._directory.records()}

    def _mapped(self) -> MappedPorts | None:
        """Return the router's port mapping, unless peers have tried to dial back and none got through.

        When a run begins behind a router, there is nobody to ask, and others can enter only if this peer trusts the
        router.
        """
        mapped, seen = self._port_mapping.mapped, self._dial_backs.seen()
        is_real = mapped and any(
            each.observed_host == mapped.host and each.reached.get(mapped.ports[0]) == "" for each in seen
        )
        return mapped if is_real or not seen else None

    def _outside(self, mapped: MappedPorts | None) -> tuple[str, ...]:
        """Return the external libp2p multiaddr of a mapping."""
        return (f"/ip4/{mapped.host}/tcp/{mapped.ports[1]}/p2p/{self._directory.peer_id}",) if mapped else ()

    def is_closed(self) -> bool:
        """Return whether, according to the other peers' reports, none of them can dial this peer."""
        return self._server is not None and self.verdict().state in CLOSED

    def _needs_tunnels(self) -> bool:
        """Return whether calls need tunnels, because this peer is unreachable or knows no reachable peer."""
        return self.is_closed() or not any(candidate.can_be_called for candidate in self._directory.live())

    def _relays(self) -> Mapping[str, Sequence[str]]:
        """Return the nodes that may relay calls: live peers that others can reach, and this peer's entrances."""
        records = self._directory.records()
        peers = {record.peer_id: record.multiaddrs for record, _ in records if record.reachability in OPEN}
        return {peer: (door,) for peer, door in self._directory.entrances.items()} | peers

    async def _ask_one(self, peer_id: str) -> DialBack:
        return await self._directory.ask_to_dial(peer_id, self._ports())

    def _to_ask(self) -> list[str]:
        """Return the live peers that others can reach, and the entrances that are neighbours in the DHT."""
        live, near = self._directory.live(), self._directory.node.neighbours()
        known = {candidate.peer_id for candidate in live}
        return [candidate.peer_id for candidate in live if candidate.can_be_called] + [
            peer for peer in self._directory.entrances if peer not in known and peer in near
        ]
