"""Build the parts of a peer that live on its network thread, and stop them in the opposite order.

start   directory -> spec (from the swarm, for a ticket) -> server -> control socket -> ways to reach this peer
stop    announcement of leaving -> end of swaps -> server -> directory
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from threading import Event
from typing import Any, Protocol, TypeVar

from noloco_p2p.bans import BanList
from noloco_p2p.control import Handler, answering
from noloco_p2p.errors import DirectoryError, IdentityError, NolocoError, TicketError, Unreachable
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.gossip import Link
from noloco_p2p.gossip.seams import Candidate, Outside
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.gossip.swap import Counts
from noloco_p2p.identity import Identity
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.flow import FlowLinks
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.throttle import Limits
from noloco_p2p.owned_tasks import end_tasks
from noloco_p2p.peer.network_thread import START_TIMEOUT_S, NetworkThread
from noloco_p2p.peer.pausing import Pausing, watch_machine
from noloco_p2p.peer.reachability import Reachability
from noloco_p2p.peer.run_folder import Ports, find_invitation, folder_of, read_spec, warn_if_edited, write_run
from noloco_p2p.settings import THIS_MACHINE, PeerSettings, split_address
from noloco_p2p.spec import Spec
from noloco_p2p.swarm.dial_back import Reach
from noloco_p2p.swarm.dialer import AddressBook
from noloco_p2p.swarm.directory import SwarmDirectory, find_somebody, leads_to_itself
from noloco_p2p.swarm.records import PausedBy, PeerRecord
from noloco_p2p.swarm.tunnel import Tunnels
from noloco_p2p.telemetry.metrics import CONTRIBUTION, FAILED, Metrics
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.ticket import MAX_ADDRESSES, Ticket
from noloco_p2p.transfer.donor import StateServer
from noloco_p2p.transfer.fetch import fetch_spec

log = logging.getLogger(__name__)

COUNTED = ("swaps", "bytes_sent", "bytes_received", "chunks", "repeated_chunks")  # metrics that are fields of `Counts`

ENTER_TIMEOUT_S = 30.0  # for finding a live peer of the run that a ticket names
ASK_AGAIN_S = 1.0  # between two requests to the live peers
HEAD_S = 5.0  # longest wait for the record of a head
CHECK_CLOCK_S = 6.0  # for one attempt with each of the peers that this one enters through


class LivePeers:
    """The live peers that this one can call. It implements `gossip.seams.Directory`.

    In a run with stages, `stage` is the stage of this peer. Once it is set, the interface returns only peers of that
    stage. `live`, `find` and `reached` must be called on the network thread, because they may open a tunnel. The other
    methods are thread-safe.
    """

    def __init__(self, directory: SwarmDirectory, tunnels: Tunnels) -> None:
        self.stage: int | None = None
        self.heads = ListedHeads(directory)
        self._directory = directory
        self._tunnels = tunnels

    def live(self) -> Sequence[Candidate]:
        return self._of_own_stage(self.reached())

    def num_live(self) -> int:
        others = self._directory.headcount().others
        if self.stage is None:
            return 1 + others
        known = self.everyone()
        return 1 + round(others * len(self._of_own_stage(known)) / max(1, len(known)))

    def knows(self, peer_id: str) -> bool:
        return self._directory.knows(peer_id)

    async def find(self, peer_id: str, *, timeout_s: float) -> Candidate | None:
        found = await self._directory.find(peer_id, timeout_s=timeout_s)
        return self.reached([found])[0] if found else None

    def everyone(self) -> Sequence[Candidate]:
        """Return the live peers of all stages from their records, without waiting."""
        return self._directory.live()

    def mates(self) -> Sequence[Candidate]:
        """Return the live peers of this peer's stage, or of all stages if it does not hold one yet."""
        return self._of_own_stage(self.everyone())

    def reached(self, candidates: Sequence[Candidate] | None = None) -> Sequence[Candidate]:
        """Return the same peers, or the live peers of all stages, each with a tunnel's address if it has no other."""
        return self._tunnels.reached(self.everyone() if candidates is None else candidates)

    def _of_own_stage(self, peers: Sequence[Candidate]) -> Sequence[Candidate]:
        return peers if self.stage is None else [peer for peer in peers if peer.stage == self.stage]


class ListedHeads:
    """The peers that the directory lists as heads now. It is a container of their peer ids.

    A peer of a private run has no record here without an invitation, because the records are kept under a secret key.
    """

    def __init__(self, directory: SwarmDirectory) -> None:
        self._directory = directory

    def __contains__(self, peer_id: object) -> bool:
        record = self._directory.record_of(peer_id) if isinstance(peer_id, str) else None
        return record is not None and record.stage == 0

    async def look_for(self, peer_id: str) -> None:
        """Read the record of a peer that is not listed as a head, because this peer may not have seen it yet."""
        if peer_id not in self:
            await self._directory.look_for(peer_id, timeout_s=HEAD_S)


class Status:
    """The state of a peer, and the counters in its metrics.

    `state` is training, paused, leaving or done. It is published once the peer `has_entered`, which means that it has a
    model. `waits_for_stages` has the stages that this peer waits for because no peer holds them.
    `started_at_s` and `since_s` are monotonic times.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.state = "training"
        self.has_entered = False
        self.waits_for_stages: Sequence[int] = ()
        self.started_at_s = self.since_s = time.monotonic()
        self._metrics = metrics
        self._before: dict[str, float] = {}  # what was counted before a restart
        # The time in the state "training" until the last change, and when that was; it stops while the machine sleeps.
        self._trained: tuple[float, float | None] = 0.0, None

    def enter(self) -> None:
        """Publish the state from now on."""
        self.has_entered = True
        self._begin(self.state)

    def change(self, state: str) -> None:
        if state != self.state:
            self._begin(state)

    def _begin(self, state: str) -> None:
        is_training = self.has_entered and state == "training"
        self._trained = self._trained_s(), time.monotonic() if is_training else None
        self.state, self.since_s = state, time.monotonic()

    def _trained_s(self) -> float:
        before_s, since_s = self._trained
        return before_s if since_s is None else before_s + time.monotonic() - since_s

    def count(self, counts: Counts, link: Link, *, relayed_bytes: int) -> None:
        """Update the metrics that follow from swaps, relays and time. Any thread may call this."""
        for name, number in _counted(counts, relayed_bytes).items():
            setattr(self._metrics, name, self._before.get(name, 0) + number)
        self._metrics.swaps_per_min, self._metrics.link_use = link.last_minute(time.monotonic())
        self._metrics.swap_s = link.usual_s("")
        self._metrics.trained_s = self._before.get("trained_s", 0.0) + self._trained_s()

    def restore(self, values: Mapping[str, Any]) -> None:
        """Continue the metrics from the values in a checkpoint."""
        for name, added in self._metrics.restore(values).items():
            self._before[name] = self._before.get(name, 0) + added


def _counted(counts: Counts, relayed_bytes: int) -> dict[str, int]:
    """Return what a peer has counted since its start, by the names of the metrics."""
    return {
        **{name: getattr(counts, name) for name in COUNTED},
        **{name: counts.failures[name.removeprefix("failed_")] for name in FAILED},
        **{f"refused_{code.lower()}": counts.refused[code] for code in ("OVER_SHARE", "UNLISTED")},
        "relayed_bytes": relayed_bytes,
    }


class Flow(Protocol):
    """What a peer tells others about its pipeline: the `trainer.stage_flow.StageFlow` of a peer that holds a stage."""

    links: FlowLinks
    num_stages: int

    @property
    def sends_to(self) -> tuple[str, ...]: ...

    def start(self) -> None: ...

    async def stop(self) -> None: ...


AnyFlow = TypeVar("AnyFlow", bound=Flow)


class Network:
    """The parts of a peer that live on its network thread, and what they tell other peers about this one.

    Create it on any thread, then `start` it on `thread`. It stays readable after `stop`. `run` is the name and the
    digest of the run, which are known even before the spec arrives from the swarm. `states` holds the layout of the
    model. `fault` is the reason why this peer has to leave although nobody asked it to, or None. `stage_flow` is set
    while this peer holds a stage. Raises TicketError, SettingsError or IdentityError if this machine has no invitation
    to a private run.
    """

    limits: Limits
    directory: SwarmDirectory
    reachability: Reachability
    live_peers: LivePeers
    transport: GrpcTransport
    spec: Spec
    service: PeerService
    server: GrpcServer

    def __init__(
        self,
        target: Spec | Ticket,
        settings: PeerSettings,
        thread: NetworkThread,
        progress: Progress,
    ) -> None:
        is_spec = isinstance(target, Spec)
        self.run = (target.name, target.digest()) if is_spec else (target.run_name, target.spec_digest)
        self.thread = thread
        self.progress = progress
        self.metrics = Metrics()
        self.status = Status(self.metrics)
        self.pausing = Pausing()
        self.leaving = Event()
        self.fault: NolocoError | None = None
        self._has_told_copy = False
        self.metrics_address = ""  # HOST:PORT of /metrics, if it is served
        self.identity = Identity.load_or_create(settings.state_dir / "identity.key")
        self.session = Session(self.identity, find_invitation(target, settings))
        self.bans = BanList(settings.state_dir / "bans.json")
        self.states = StateServer(position=lambda: self.metrics.progress)
        self.stage_flow: Flow | None = None
        self.target = target
        self._settings = settings
        self._entrances = [*settings.bootstrap, *(() if is_spec else target.addresses)]
        self._address_book = AddressBook(settings.state_dir / "address_book.json")
        self._has_directory = False
        self._told_outbound_only = False
        self._parts = AsyncExitStack()

    async def start(self, verbs: Mapping[str, Handler]) -> None:
        """Start all parts. `verbs` answer the control socket. Call `stop` even if this fails."""
        settings, parts = self._settings, self._parts
        self.limits = Limits.of(  # here, because it needs the loop of the network thread
            upload_bytes_per_s=settings.upload_bytes_per_s, download_bytes_per_s=settings.download_bytes_per_s
        )
        ports = Ports(settings)
        ports.check()
        if isinstance(self.target, Ticket) and (why := leads_to_itself(self.target, self.identity.peer_id)):
            log.warning("%s", why)
        self.directory = directory = await ports.try_both(ports.libp2p, self._start_directory)
        parts.push_async_callback(directory.stop, farewell=False)
        self.reachability = Reachability(directory, settings, self._address_book)
        parts.push_async_callback(self.reachability.stop)
        self._has_directory = True
        self.live_peers = LivePeers(directory, self.reachability.tunnels)
        self.transport = GrpcTransport(
            self.hello, self.limits, session=self.session, why_banned=self.bans.why, guard=directory.node.guard
        )
        self.spec = self.states.spec = await self._find_spec()
        executor = ThreadPoolExecutor(1, thread_name_prefix="noloco-codec")
        parts.callback(executor.shutdown, wait=False, cancel_futures=True)
        self.service = PeerService(
            Outside(
                spec=self.spec,
                hello=self.hello,
                transport=self.transport,
                directory=self.live_peers,
                executor=executor,
                rng=random.SystemRandom(),  # swap ids must be unpredictable
                on_corrupt=self.bans.strike,
            ),
            serve=self.states.serve,
        )
        self.server = GrpcServer(
            self.service,
            self.limits,
            session=self.session,
            why_banned=self.bans.why,
        )
        parts.push_async_callback(self.server.stop, 0.5)
        await ports.try_both(ports.grpc, lambda port: self.server.start(settings.listen_host, port))
        parts.push_async_callback(self.service.stop)
        await parts.enter_async_context(answering(settings.state_dir, verbs))
        await self.reachability.start(self.server, self.service)
        ports.remember(grpc=self.server.port, libp2p=directory.node.port)
        if isinstance(self.target, Spec):
            warn_if_edited(self.spec, settings.state_dir)
        write_run(self.spec, self.session.invitation, folder_of(settings.state_dir, self.spec.run_id))
        if settings.metrics:
            await self._serve_metrics(settings.metrics)
        parts.push_async_callback(end_tasks, [asyncio.create_task(watch_machine(settings, self.pausing))])
        parts.push_async_callback(self._leave)

    async def stop(self) -> None:
        """Announce that this peer is leaving, and stop all parts that have started."""
        await self._parts.aclose()

    async def _start_directory(self, port: int) -> SwarmDirectory:
        settings, (announce_host, announce_port) = self._settings, self._settings.announced
        return await SwarmDirectory(
            identity_path=settings.state_dir / "identity.key",
            identity=self.identity,
            listen_host=settings.listen_host,
            listen_port=port,
            announce_host=announce_host or None,
            announce_port=announce_port + 1 if announce_port else 0,
            bootstraps=self._entrances,
            relays=not settings.max_upload,
            address_book=self._address_book,
            spec_digest=self._listed_as()[1],
            describe=self.record,
            on_copy=self._on_copy,
            ignores=self._ignores,
            own_addresses=self._own_addresses,
        ).start()

    async def _find_spec(self) -> Spec:
        """Return the spec that this machine has or that a live peer serves. Raises Unreachable if none does in time."""
        spec = self.target
        if isinstance(spec, Ticket):
            spec = read_spec(spec, self._settings.state_dir) or await self._fetch_spec(spec)
        if spec.run_key != (self.session.invitation.run_key if self.session.invitation else ""):
            raise TicketError("the run is private, but the ticket contains no invitation; ask for a new ticket")
        return spec

    async def _fetch_spec(self, ticket: Ticket) -> Spec:
        await find_somebody(ticket, self.directory, timeout_s=ENTER_TIMEOUT_S)
        until_s = time.monotonic() + ENTER_TIMEOUT_S
        while True:  # a relay to the live peers may be found soon
            donors = [candidate for candidate in self.live_peers.live() if candidate.can_be_called]  # of any stage
            try:
                return await fetch_spec(self.transport, donors, expected_digest=ticket.spec_digest)
            except Unreachable:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(ASK_AGAIN_S)

    async def _serve_metrics(self, address: str) -> None:
        """Serve /metrics. Raises SettingsError if the port is in use."""
        from noloco_p2p.telemetry.http import metrics_app, serving

        host, port = split_address(address, host=THIS_MACHINE)
        page = serving(metrics_app(self._metrics_page), host=host, port=port, flag="--metrics")
        self.metrics_address = f"{host}:{await self._parts.enter_async_context(page)}"

    async def start_flow(self, make: Callable[[Network], AnyFlow]) -> AnyFlow:
        """Take part in the pipeline."""
        self.stage_flow = flow = make(self)
        self.server.serve_flow = flow.links.serve
        flow.start()
        return flow

    async def stop_flow(self) -> None:
        flow, self.stage_flow, self.server.serve_flow = self.stage_flow, None, None
        if flow:
            await flow.stop()

    async def _leave(self) -> None:
        self.status.change("leaving")
        self.service.state = "leaving"
        if self.stage_flow:
            await self.stage_flow.stop()
        # If a copy announced that it is leaving, others would think that the other copy is leaving.
        if self.status.has_entered and self.fault is None:
            await self.directory.say_farewell()

    @property
    def expects_others(self) -> bool:
        """Return whether a peer without a ticket should wait briefly for live peers."""
        return bool(self._settings.bootstrap or self._address_book.addresses())

    # the state that others see

    async def enter(self) -> None:
        """Publish the record from now on. Raises DirectoryError if the clock of this machine is wrong."""
        await self.directory.check_clock(CHECK_CLOCK_S)
        await self.reachability.wait_for_dial_back()
        self.status.enter()
        await self._announce("training")

    def announce(self, state: str) -> None:
        """Change the state that others see. Call this on any other thread."""
        try:
            self.thread.call(self._announce(state), START_TIMEOUT_S)
        except TimeoutError:
            log.warning("could not announce the state %r to the swarm in time", state)

    async def _announce(self, state: str) -> None:
        self.status.change(state)
        self.service.state = state
        try:
            await self.directory.announce_now()
        except (DirectoryError, TimeoutError) as error:
            log.warning("could not announce the state %r to the swarm: %s", state, error)

    # what this peer tells others

    def hello(self) -> Hello:
        """Return the `Hello` that is part of every call."""
        layout = self.states.layout
        return Hello(self.identity.peer_id, *self.run, layout=layout.digest() if layout else "")

    def ticket(self) -> str:
        """Return a ticket.

        Anyone who has it can join the run through this peer, its bootstraps, or other live peers.
        """
        doors = tuple(self.reachability.doors())[:MAX_ADDRESSES]
        return Ticket(*self.run, doors, self.session.invitation).encode()

    def count(self) -> None:
        """Update the metrics that follow from swaps, relays and time. Any thread may call this."""
        link = self.service.gossip.link if self.service.gossip else Link()
        relay = self.directory.relay
        self.status.count(self.service.counts, link, relayed_bytes=relay.passed_bytes if relay else 0)

    def record(self) -> PeerRecord | None:
        """Return the record for the directory, or None while this peer has no model and so cannot swap."""
        if not self.status.has_entered:
            return None
        self.count()
        reach = self.reachability.verdict()
        if reach.state is Reach.OUTBOUND_ONLY and not self._told_outbound_only:
            self._told_outbound_only = True
            log.warning("outbound only: %s", reach.sentence)
        run_name, spec_digest, mark = self._listed_as()
        hidden = CONTRIBUTION if self._settings.hide_contribution else ()
        return PeerRecord(
            peer_id=self.identity.peer_id,
            run_name=run_name,
            spec_digest=spec_digest,
            addresses=self.reachability.addresses(),
            multiaddrs=self.reachability.ways_in(),
            state=self.status.state,
            metrics=replace(self.metrics, **dict.fromkeys(hidden)),
            reachability=reach.state,
            session_key=self.session.key_text,
            started_at_ms=self.session.started_at_ms,
            mark=mark,
            stage=self.live_peers.stage or 0,
            stages=self.num_stages,
            sends_to=self.stage_flow.sends_to if self.stage_flow else (),
            name=self._settings.name,
            paused_by=self.paused_by,
        )

    @property
    def paused_by(self) -> PausedBy:
        return self.pausing.word if self.status.state == "paused" else ""

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the run.

        It is 0 if every peer holds the whole model, or if this peer is not in a pipeline yet.
        """
        return self.stage_flow.num_stages if self.stage_flow else 0

    def _listed_as(self) -> tuple[str, str, str]:
        """Return the name and the digest of the run in the record, and the mark of a member of a private run."""
        if not self.session.invitation:
            return *self.run, ""
        listing = self.session.invitation.listing(self.run[1])
        return "", listing.view, listing.mark(self.identity.peer_id)

    def _metrics_page(self) -> bytes:
        from noloco_p2p.telemetry.prometheus import peer_page

        self.count()
        live_peers = self.directory.headcount().others
        return peer_page(self.metrics, peer_id=self.identity.peer_id, run=self.run[0], live_peers=live_peers)

    # what the directory asks

    def _ignores(self, record: PeerRecord) -> bool:
        return bool(self.bans.why(record.peer_id))

    def _own_addresses(self) -> Sequence[str]:
        return self.reachability.addresses() if self._has_directory else ()

    def _on_copy(self, other: PeerRecord) -> None:
        """Stop if the other process was started later, by the clocks of both machines, so that never both stop."""
        where = ", ".join(other.addresses) or "another machine"
        remedy = (
            "Two peers must not use the same key: on one of the two machines, move "
            f"{self._settings.state_dir / 'identity.key'} away, and run `noloco id` to create a new key"
        )
        if other.start < (self.session.started_at_ms, self.session.key_text):
            if not self._has_told_copy:
                self._has_told_copy = True
                log.warning(
                    "the key of this peer is also in use at %s by a peer that started earlier, which stops now. %s",
                    where,
                    remedy,
                )
        elif self.fault is None:
            self.fault = IdentityError(
                f"the key of this peer is also in use at {where} by a peer that started later, so this peer is "
                f"stopping. {remedy}"
            )
            log.error("%s", self.fault)
            self.request_leave()

    def request_leave(self) -> None:
        """Ask the training loop to end cleanly. This is safe in a signal handler and on any thread."""
        self.leaving.set()
        self.service.hurry()
