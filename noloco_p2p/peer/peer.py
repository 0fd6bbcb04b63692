"""Build a peer from its parts. This is the composition root, which starts and stops the parts in order.

start   lock, identity -> network thread -> directory -> spec (from the swarm, for a ticket) -> server -> announcement
stop    announcement of leaving -> end of swaps -> server -> network thread -> lock
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_p2p.bans import BanList
from noloco_p2p.control import ControlServer, FolderLock
from noloco_p2p.errors import (
    DirectoryError,
    IdentityError,
    NolocoError,
    SettingsError,
    TicketError,
)
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import Invitation
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.throttle import Limits
from noloco_p2p.peer.entering import ENTER_TIMEOUT_S, Entering, find_spec
from noloco_p2p.peer.live_peers import LivePeers
from noloco_p2p.peer.membership import START_TIMEOUT_S, Membership
from noloco_p2p.peer.network import Network
from noloco_p2p.peer.network_thread import STOP_TIMEOUT_S, NetworkThread
from noloco_p2p.peer.pausing import Pausing, watch_machine
from noloco_p2p.peer.ports import Ports
from noloco_p2p.peer.reachability import Reachability
from noloco_p2p.peer.run_folder import find_invitation, folder_of, write_run
from noloco_p2p.peer.stages import Stages
from noloco_p2p.peer.status import PublishedStatus
from noloco_p2p.peer.verbs import verbs
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import Spec
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.swarm.dial_back import Verdict
from noloco_p2p.swarm.node import end_tasks
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.ticket import Ticket, is_ticket
from noloco_p2p.transfer.donor import StateServer

if TYPE_CHECKING:
    from typing import Self


log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.05
NOT_RUNNING = "this peer is not running: it was closed, for example at the end of its `with` block"


def resolve(target: Spec | Ticket | Path | str | None) -> Spec | Ticket:
    """Return the spec or the ticket that `target` names.

    Raises SpecError or TicketError if it is invalid, and SettingsError if it is None.
    """
    if isinstance(target, Spec | Ticket):
        return target
    if target is None:  # for example, if a script passes on an optional argument
        raise SettingsError("Peer.join needs a spec, the path of a spec file, or a ticket; it got None")
    if isinstance(target, str) and is_ticket(target):
        return Ticket.decode(target)
    return Spec.load(target)


class Peer:
    """A running peer. Use `Peer.join(...)` as a context manager, so that the peer announces its departure at the end.

    Attributes:
        spec: The settings that all peers of the run share.
        settings: The settings of this machine.
        metrics: The metrics of this peer. Other peers see `metrics.loss`, which the script sets.
        leave_requested: An event. `noloco leave` sets it to ask the script to stop after the current inner step.
        pause_requested: An event. `noloco pause` or the use of this machine sets it to request a pause after the
            current inner step.
        pausing: The reason for a pause.
        fault: The reason why this peer has to leave although nobody asked it to, or None.
    """

    def __init__(self, target: Spec | Ticket, settings: PeerSettings, *, progress: Progress | None = None) -> None:
        self.settings = settings
        self.progress = progress or Progress()  # the progress of long work, which `noloco status` shows
        self.metrics = Metrics()
        self.leave_requested = threading.Event()
        self.fault: NolocoError | None = None  # why this peer has to leave although nobody asked it to
        self.pause_requested = threading.Event()  # checked after each inner step
        self.pausing = Pausing(self.pause_requested)
        self.spec: Spec
        self.membership: Membership
        self.stages: Stages
        self._target = target
        # The name and digest of the run, which are known even before the spec arrives from the swarm.
        self._run = (
            (target.name, target.digest()) if isinstance(target, Spec) else (target.run_name, target.spec_digest)
        )
        self._lock = FolderLock(settings.state_dir)
        self._address_book = AddressBook(settings.state_dir / "address_book.json")
        self._identity: Identity
        self._invitation: Invitation | None = None
        self._session: Session
        self._status: PublishedStatus
        self.bans = BanList(settings.state_dir / "bans.json")
        self._thread: NetworkThread | None = None
        self._network: Network | None = None
        self._directory: SwarmDirectory | None = None
        self._reachability: Reachability | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="noloco-codec")

    @classmethod
    def join(
        cls,
        target: Spec | Ticket | Path | str,
        settings: PeerSettings | None = None,
        *,
        state_dir: Path | str | None = None,
        listen: str | None = None,
        announce: str | None = None,
        bootstrap: Sequence[str] | None = None,
        max_upload: str | None = None,
        max_download: str | None = None,
        run_key: Path | str | None = None,
        metrics: str | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Start a peer of the run that `target` (a spec, a spec file or a ticket) names.

        The call returns once the peer can answer other peers. If `target` is a ticket, the peer has fetched the spec
        from a live peer by then.

        Raises SpecError, TicketError or DirectoryError; SettingsError if a port or a folder is in use; and Unreachable
        if no peer of the ticket's run answers.

        Args:
            target: A spec, the path of a spec file, or a ticket.
            settings: All settings of this machine. If this is None, the arguments below apply. Those that are None come
                from the NOLOCO_* environment variables, the user's file, or the defaults.
            state_dir: The folder of the identity and the checkpoints. Each peer on a machine needs its own.
            listen: The IP:PORT of gRPC. libp2p uses the next port. Port 0 stands for the two ports of the last start if
                they are free, and for any two free ports otherwise.
            announce: The HOST[:PORT] at which others reach this machine, if it differs from `listen`.
            bootstrap: Multiaddrs of peers through which to enter the DHT, in addition to those in the ticket.
            max_upload: The limit on the total upload rate of swaps and fetches, such as "40mbit" or "5MB/s".
            max_download: The limit on the total download rate of swaps and fetches.
            run_key: The file with the key of a private run that this peer starts or opens to others.
            metrics: The HOST:PORT at which to serve /metrics for Prometheus.
            progress: An object that shows the progress of long work.
        """
        if settings is None:
            settings = PeerSettings.load(
                {
                    "state_dir": state_dir,
                    "listen": listen,
                    "announce": announce,
                    "bootstrap": bootstrap,
                    "max_upload": max_upload,
                    "max_download": max_download,
                    "run_key": run_key,
                    "metrics": metrics,
                }
            )
        peer = cls(resolve(target), settings, progress=progress)
        peer._start()
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def peer_id(self) -> str:
        """Return the libp2p id of this peer's key, such as 12D3KooW..."""
        return self._identity.peer_id

    @property
    def run_folder(self) -> Path:
        """Return the folder in which this machine keeps the spec, checkpoints and events of this run."""
        return folder_of(self.settings.state_dir, self.spec.run_id)

    @property
    def ticket(self) -> str:
        """Return the ticket to share. Anyone who has it can join the run through this peer, its bootstraps, or other
        live peers.
        """
        return self._status.ticket()

    @property
    def state(self) -> str:
        """Return the state that others see in the record: training, paused, leaving or done."""
        return self._status.state

    @property
    def has_entered(self) -> bool:
        """Return whether the peer has a model and has announced itself."""
        return self._status.has_entered

    @property
    def metrics_address(self) -> str:
        """Return the HOST:PORT of /metrics, or "" if it is not served."""
        return self._status.metrics_address

    @property
    def address(self) -> str:
        """Return the HOST:PORT that others dial."""
        return self._net.reachability.address

    def live_peers(self) -> int:
        """Return how many other peers are known to be alive. In a swarm of more than 48 peers, this is an estimate."""
        return self._net.directory.headcount().others

    def wait_for_peers(self, num_peers: int, *, timeout_s: float) -> bool:
        """Wait until there are `num_peers` other peers, as counted by `live_peers`.

        The result is False after a timeout or a request to leave.
        """
        until_s = time.monotonic() + timeout_s
        while self.live_peers() < num_peers:
            if time.monotonic() > until_s or self.leave_requested.wait(POLL_S):
                return False
        return True

    def request_leave(self) -> None:
        """Ask the training loop to end cleanly. This is safe in a signal handler and on any thread."""
        self.leave_requested.set()
        if self._network:
            self._network.service.hurry()

    def wait_while_paused(self) -> None:
        """Wait until the reason for the pause no longer applies or this peer is asked to leave.

        The swarm sees the peer as paused meanwhile. Call `NoLoCo.pause` first, so that no partner waits.
        """
        self.announce("paused")
        while self.pause_requested.is_set() and not self.leave_requested.wait(POLL_S):
            pass
        if not self.leave_requested.is_set():
            self.announce("training")

    def announce(self, state: str) -> None:
        """Change the state that others see to training, paused, leaving or done. Swaps happen only in the state
        "training".
        """
        self._status.change_state(state)
        self._net.service.state = state
        try:
            self._call(self._net.directory.announce_now(), START_TIMEOUT_S)
        except (DirectoryError, TimeoutError) as error:
            log.warning("could not announce the state %r to the swarm: %s", state, error)

    def last_fault(self) -> str:
        """Return a description of the last fault of another peer, or "" if there was none."""
        return self._net.service.counts.last_failure

    def reach(self) -> Verdict:
        """Return the verdict on whether other peers can dial this one, based on their reports."""
        return self._net.reachability.verdict()

    def wait_for_router(self) -> None:
        """Wait until the router has accepted or refused to forward ports, so that the ticket can contain them.

        This takes a few seconds at most, and no time if no router is asked.
        """
        self._call(self._net.reachability.wait_for_router(), START_TIMEOUT_S)

    def count_traffic(self) -> None:
        """Update the counters of bytes, chunks and time in `metrics`."""
        self._status.count()

    def restore_metrics(self, values: dict[str, Any]) -> None:
        """Continue the counters from the values in a checkpoint. Unknown names are ignored."""
        self._status.restore_metrics(values)

    def status(self) -> dict[str, Any]:
        """Return the content of `noloco status`. docs/monitoring.md explains each key."""
        return self._status.as_dict()

    # starting and stopping

    def _start(self) -> None:
        try:
            self._lock.acquire()
            self._identity = Identity.load_or_create(self.settings.state_dir / "identity.key")
            self._invitation = find_invitation(self._target, self.settings)
            self._session = Session(self._identity, self._invitation)
            self._status = PublishedStatus(
                self._run,
                self._identity,
                self._session,
                self._invitation,
                settings=self.settings,
                metrics=self.metrics,
                progress=self.progress,
                pausing=self.pausing,
            )
            self._thread = NetworkThread()
            self._call(self._start_network(), START_TIMEOUT_S + ENTER_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise DirectoryError(
                "the network did not start in time; the machine may be overloaded, so try again"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Announce that this peer is leaving, and stop everything. It is safe to call this twice.

        When it returns, none of the peer's threads or processes is left.
        """
        if self._thread:
            try:
                self._call(self._stop_network(), STOP_TIMEOUT_S)
            except TimeoutError:
                log.error("the network did not stop within %.0f s", STOP_TIMEOUT_S)
            self._thread.stop()
            self._thread = None
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._lock.release()

    async def _start_network(self) -> None:
        target = self._target
        ports = Ports(self.settings)
        ports.check()
        self._directory = directory = await ports.try_both(ports.libp2p, self._start_directory)
        limits = Limits.of(
            upload_bytes_per_s=self.settings.upload_bytes_per_s,
            download_bytes_per_s=self.settings.download_bytes_per_s,
        )
        transport = GrpcTransport(
            self._status.hello, limits, session=self._session, why_banned=self.bans.why, guard=directory.guard
        )
        self._reachability = reachability = Reachability(directory, self.settings, self._address_book)
        live_peers = LivePeers(directory, reachability.tunnels)
        if isinstance(target, Spec):
            self.spec = target
        else:
            self.spec = await find_spec(
                target,
                state_dir=self.settings.state_dir,
                directory=directory,
                transport=transport,
                live_peers=live_peers,
            )
        if self.spec.run_key != (self._invitation.run_key if self._invitation else ""):
            raise TicketError("the run is private, but the ticket contains no invitation; ask for a new ticket")
        states = StateServer(self.spec)
        service = PeerService(
            self.spec,
            hello=self._status.hello,
            transport=transport,
            directory=live_peers,
            executor=self._executor,
            rng=random.SystemRandom(),  # swap ids must be unpredictable
            serve=states.serve,
            on_corrupt=self.bans.strike,
        )
        server = GrpcServer(
            service,
            limits,
            session=self._session,
            why_banned=self.bans.why,
        )
        await ports.try_both(ports.grpc, lambda port: server.start(self.settings.listen_host, port))
        control = ControlServer(self.settings.state_dir, verbs(self))
        await control.start()
        self._network = self._status.network = Network(
            directory,
            transport,
            states,
            service,
            server,
            control,
            reachability,
            live_peers,
            self._make_entering(directory, transport, live_peers, service),
            watch_machine(self.settings, self.pausing),
        )
        self.membership = Membership(
            self._status,
            network=lambda: self._net,
            call=self._call,
            announce=self.announce,
        )
        self.stages = Stages(
            self._status,
            self._identity,
            self._session,
            bans=self.bans,
            limits=limits,
            network=lambda: self._net,
            call=self._call,
        )
        await reachability.start(server, num_calls=lambda: service.num_calls)
        ports.remember(grpc=server.port, libp2p=directory.port)
        write_run(self.spec, self._invitation, self.run_folder)
        await self._status.serve_metrics()

    def _make_entering(
        self, directory: SwarmDirectory, transport: GrpcTransport, live_peers: LivePeers, service: PeerService
    ) -> Entering:
        assert self._thread is not None
        return Entering(
            self.spec,
            thread=self._thread,
            directory=directory,
            transport=transport,
            live_peers=live_peers,
            is_told_stale=service.take_refused_as_stale,
            ticket=self._target if isinstance(self._target, Ticket) else None,
            expects_others=bool(self.settings.bootstrap or self._address_book.addresses()),
            progress=self.progress,
            leaving=self.leave_requested,
        )

    async def _start_directory(self, port: int) -> SwarmDirectory:
        settings = self.settings
        announce_host, announce_port = settings.announced
        return await SwarmDirectory(
            identity_path=settings.state_dir / "identity.key",
            identity=self._identity,
            listen_host=settings.listen_host,
            listen_port=port,
            announce_host=announce_host or None,
            announce_port=announce_port + 1 if announce_port else 0,
            bootstraps=self._entrances(),
            relays=not settings.max_upload,
            address_book=self._address_book,
            spec_digest=self._view,
            describe=self._status.record,
            on_copy=self._on_copy,
            ignores=self._ignores,
            own_addresses=lambda: self._reachability.addresses() if self._reachability else (),
        ).start()

    @property
    def _view(self) -> str:
        """Return the key under which the DHT stores the run's records."""
        return self._invitation.listing(self._run[1]).view if self._invitation else self._run[1]

    def _ignores(self, record: PeerRecord) -> bool:
        return bool(self.bans.why(record.peer_id))

    def _entrances(self) -> list[str]:
        return [*self.settings.bootstrap, *(self._target.addresses if isinstance(self._target, Ticket) else ())]

    async def _stop_network(self) -> None:
        self._status.state = "leaving"
        await self._status.stop()
        if self._network:
            await end_tasks(self._network.watching)
            await self._network.control.stop()
            self._network.service.state = "leaving"
            if self._network.stage_flow:
                await self._network.stage_flow.stop()
        if self._reachability:
            await self._reachability.stop()
        if self._directory:
            # If a copy announced that it is leaving, others would think that the other copy is leaving.
            await self._directory.stop(farewell=self.has_entered and self.fault is None)
        if self._network:
            await self._network.service.stop()
            await self._network.server.stop(0.5)
        self._network = self._status.network = self._directory = self._reachability = None

    def _on_copy(self, other: PeerRecord) -> None:
        if self.fault is None:
            where = ", ".join(other.addresses) or "another machine"
            self.fault = IdentityError(
                f"the key of this peer is also in use at {where} by a peer that started later, so this peer is "
                "stopping. Two peers must not use the same key: on one of the two machines, move "
                f"{self.settings.state_dir / 'identity.key'} away, and run `noloco id` to create a new key"
            )
            log.error("%s", self.fault)
            self.request_leave()

    @property
    def _net(self) -> Network:
        if self._network is None:
            raise SettingsError(NOT_RUNNING)
        return self._network

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        if self._thread is None:
            coroutine.close()
            raise SettingsError(NOT_RUNNING)
        return self._thread.call(coroutine, timeout_s)
