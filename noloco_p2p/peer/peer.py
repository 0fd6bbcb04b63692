"""One peer: the composition root. Builds the parts, owns the network thread, starts and stops them in order.

start   lock, identity -> network thread -> directory -> spec (from the swarm, for a ticket) -> server -> announced
stop    announced as leaving -> swaps abandoned -> server -> network thread -> lock
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from noloco_p2p._version import __version__
from noloco_p2p.bans import BanList
from noloco_p2p.control import ControlServer, FolderLock, Handler
from noloco_p2p.errors import (
    DirectoryError,
    IdentityError,
    NolocoError,
    SettingsError,
    TicketError,
)
from noloco_p2p.gossip.donor import SavedState, StateServer
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import Hello, StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.outcome import LonelyCause, Traffic
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.runner import RoundRunner
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.gossip.watch import SwapProgress, SwapWatch
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import Invitation
from noloco_p2p.net import probe
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.net.server import GrpcServer
from noloco_p2p.net.session import Session
from noloco_p2p.net.throttle import Limits
from noloco_p2p.peer.entering import ENTER_TIMEOUT_S, Entering, find_spec
from noloco_p2p.peer.kept import find_invitation, folder_of, keep
from noloco_p2p.peer.network_thread import STOP_TIMEOUT_S, NetworkThread
from noloco_p2p.peer.outside import Outside
from noloco_p2p.peer.ports import Ports
from noloco_p2p.peer.sketcher import Sketcher
from noloco_p2p.settings import PeerSettings, split_address
from noloco_p2p.spec import RunSpec
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.swarm.node import end_tasks
from noloco_p2p.swarm.reachability import OUTBOUND_ONLY, DialBack, Verdict
from noloco_p2p.swarm.reader import stranger_to
from noloco_p2p.swarm.records import PeerRecord
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.ticket import MAX_ADDRESSES, Ticket, is_ticket

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from noloco_p2p.telemetry.http import HttpServer

log = logging.getLogger(__name__)
T = TypeVar("T")

START_TIMEOUT_S = 120.0  # importing hivemind on a slow disk included
POLL_S = 0.05
DIAL_BACK_S = 12.0  # for one peer to answer whether it gets through; it tries for 4 s
CHECK_CLOCK_S = 6.0  # for those that this peer enters through to be tried once


def resolve(target: RunSpec | Ticket | Path | str) -> RunSpec | Ticket:
    """A spec, a spec file or a ticket -> what it is. Raises SpecError, TicketError."""
    if isinstance(target, RunSpec | Ticket):
        return target
    if isinstance(target, str) and is_ticket(target):
        return Ticket.decode(target)
    return RunSpec.load(target)


@dataclass(slots=True)
class _Network:
    """What lives on the network thread once it has started."""

    directory: SwarmDirectory
    transport: GrpcTransport
    runner: RoundRunner
    states: StateServer
    service: PeerService
    server: GrpcServer
    control: ControlServer
    watch: SwapWatch
    outside: Outside
    entering: Entering
    watching: asyncio.Task[None]


class Peer:
    """A running peer. Use `Peer.join(...)` as a context manager; leaving it says good-bye to the swarm."""

    def __init__(self, target: RunSpec | Ticket, settings: PeerSettings, *, progress: Progress | None = None) -> None:
        self.settings = settings
        self.progress = progress or Progress()  # what takes long now; `noloco status` tells it
        self.metrics = Metrics()
        self.state = "training"
        self.leave_requested = threading.Event()
        self.fault: NolocoError | None = None  # why this peer has to leave, when nobody asked it to
        self.pause_requested = threading.Event()  # look after each inner step
        self.spec: RunSpec
        self.exchange: Exchange
        self._started_at_s = self._state_since_s = time.time()
        self._target = target
        # Name and digest of the run: known before the spec is, when it comes from the swarm.
        self._run = (
            (target.name, target.digest()) if isinstance(target, RunSpec) else (target.run_name, target.spec_digest)
        )
        self._lock = FolderLock(settings.state_dir)
        self._address_book = AddressBook(settings.state_dir / "address_book.json")
        self._identity: Identity
        self._invitation: Invitation | None = None
        self._session: Session
        self.bans = BanList(settings.state_dir / "bans.json")
        self._thread: NetworkThread | None = None
        self._network: _Network | None = None
        self._directory: SwarmDirectory | None = None
        self._outside: Outside | None = None
        self._layout: ModelLayout | None = None
        self._entered = False
        self._traffic_before, self._relayed_before = Traffic(), 0  # before a restart
        self._told_outbound_only = False
        self.metrics_address = ""  # HOST:PORT of /metrics, when it is served
        self._metrics_server: HttpServer | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="noloco-codec")
        self._sketcher = Sketcher(self._run[1])

    @classmethod
    def join(
        cls,
        target: RunSpec | Ticket | Path | str,
        settings: PeerSettings | None = None,
        *,
        progress: Progress | None = None,
        **flags: Any,
    ) -> Self:
        """Start a peer of the run that `target` (spec, spec file or ticket) names.

        `flags` are fields of PeerSettings, for example `listen="0.0.0.0:0"`. `progress` shows what takes long.
        Returns when the peer answers others; for a ticket that includes fetching the spec from a live peer. Raises
        SpecError, TicketError, SettingsError (port or folder in use), DirectoryError, and Unreachable when nobody of
        the ticket's run answers.
        """
        peer = cls(resolve(target), settings or PeerSettings.load(flags), progress=progress)
        peer._start()
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def peer_id(self) -> str:
        return self._identity.peer_id

    @property
    def run_folder(self) -> Path:
        """What this machine keeps of this run: spec, checkpoints, events."""
        return folder_of(self.settings.state_dir, self.spec.run_id)

    @property
    def ticket(self) -> str:
        """Hand it on: whoever has it can enter the run through this peer, its bootstraps, and others alive now."""
        doors = tuple(self._net.outside.doors())[:MAX_ADDRESSES]
        return Ticket(self.spec.name, self.spec.digest(), doors, self._invitation).encode()

    @property
    def address(self) -> str:
        """HOST:PORT that others dial."""
        return self._net.outside.address

    def live_peers(self) -> int:
        """How many other peers are alive, as far as this one has heard: an estimate in a swarm of more than 48."""
        return self._net.directory.headcount().others

    def wait_for_peers(self, num_peers: int, *, timeout_s: float) -> bool:
        """Wait for `num_peers` others, as `live_peers` counts them. False when time is over or it is asked to leave."""
        until_s = time.monotonic() + timeout_s
        while self.live_peers() < num_peers:
            if time.monotonic() > until_s or self.leave_requested.wait(POLL_S):
                return False
        return True

    def request_leave(self) -> None:
        """Ask the training loop to end politely; safe in a signal handler and from any thread."""
        self.leave_requested.set()
        if self._network:
            self._network.runner.hurry()

    def wait_while_paused(self) -> None:
        """Until `noloco resume`, or until this peer is asked to leave; the swarm is told of both ends.

        Call `NoLoCo.withdraw` before it, so that no partner waits.
        """
        self.announce("paused")
        while self.pause_requested.is_set() and not self.leave_requested.wait(POLL_S):
            pass
        if not self.leave_requested.is_set():
            self.announce("training")

    def announce(self, state: str) -> None:
        """Change the state that others see: training, paused, leaving or done. Swaps are offered in training only."""
        if state != self.state:
            self._state_since_s = time.time()
        self.state = state
        self._net.runner.state = state
        try:
            self._call(self._net.directory.announce_now(), START_TIMEOUT_S)
        except (DirectoryError, TimeoutError) as error:
            log.warning("the swarm could not be told that this peer is %s: %s", state, error)

    def last_fault(self) -> str:
        """The last thing that went wrong with another peer, in words; empty when nothing did."""
        return self._net.runner.last_fault

    def tell_long_swaps(self, tell: Callable[[SwapProgress], None]) -> None:
        """Call `tell`, on the network thread, again and again while a swap takes long."""
        self._net.watch.on_long = tell

    def reach(self) -> Verdict:
        """Whether other peers can dial this one, as far as they have told."""
        return self._net.outside.verdict()

    async def _ask_to_dial_back(self, candidate: Candidate, ports: Sequence[int]) -> DialBack:
        probed = await probe.ask(candidate, self._hello(), [*ports], timeout_s=DIAL_BACK_S, session=self._session)
        return DialBack(probed.observed_host, probed.reached)

    def count_traffic(self) -> None:
        """Bring the counters of bytes and chunks in `metrics` up to date."""
        for name, number in asdict(self._net.runner.traffic).items():
            setattr(self.metrics, name, getattr(self._traffic_before, name) + number)
        self.metrics.relayed_bytes = self._relayed_before + self._net.directory.relayed_bytes

    def restore_metrics(self, values: dict[str, Any]) -> None:
        """Go on counting where a checkpoint stopped; unknown names are ignored."""
        for name in Metrics.__dataclass_fields__:
            if name in values:
                setattr(self.metrics, name, values[name])
        counted = asdict(self._traffic_before)
        self._traffic_before = Traffic(**{name: getattr(self.metrics, name) for name in counted})
        self._relayed_before = self.metrics.relayed_bytes

    # for the outer step

    def enter(self, *, layout: ModelLayout, target: Path | None) -> StateManifest | None:
        """Tell the network which model trains here; with `target`, fetch the state of a live peer into that file.

        Raises Left when this peer is asked to leave meanwhile, and ModelError, with the first tensor that differs, when
        live peers train another model.
        """
        self._layout = layout
        self._net.runner.layout = self._net.states.layout = layout
        manifest = None
        if target is not None:
            manifest = self._net.entering.enter(layout, target=target)
        self._call(self._net.directory.check_clock(CHECK_CLOCK_S), START_TIMEOUT_S)
        self._call(self._net.outside.wait_for_dial_back(), START_TIMEOUT_S)
        self._entered, self._state_since_s = True, time.time()
        self.announce("training")
        return manifest

    def catch_up(self, *, progress: float, inner_steps: int, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` when most of the swarm is far ahead; None when it is not.

        Costs nothing to ask. None, too, when nobody gives a newer state: it is then tried again after a while.
        """
        assert self._layout, "`enter` comes first"
        return self._net.entering.catch_up(
            self._layout,
            progress=progress,
            round_progress=inner_steps / self.spec.train.total_steps,
            target=target,
        )

    def serve_state(self, saved: SavedState) -> None:
        """From now on newcomers get this state."""
        self._net.states.saved = saved

    def sketch(self, slow_weights: Tensor) -> None:
        """Sketch these weights in the background, for the record of this peer; at most once an announcement."""
        self._sketcher.sketch(slow_weights)

    # starting and stopping

    def _start(self) -> None:
        try:
            self._lock.acquire()
            self._identity = Identity.load_or_create(self.settings.state_dir / "identity.key")
            self._invitation = find_invitation(self._target, self.settings)
            self._session = Session(self._identity, self._invitation)
            self._thread = NetworkThread()
            self._call(self._start_network(), START_TIMEOUT_S + ENTER_TIMEOUT_S)
        except TimeoutError:
            self.close()
            raise DirectoryError(
                "the network did not start in time; the machine may be overloaded: try again"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Say good-bye and stop everything; returns when no thread and no process is left. Safe to call twice."""
        self.state = "leaving"
        if self._thread:
            try:
                self._call(self._stop_network(), STOP_TIMEOUT_S)
            except TimeoutError:
                log.error("the network did not stop within %.0f s", STOP_TIMEOUT_S)
            self._thread.stop()
            self._thread = None
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._sketcher.close()
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
        transport = GrpcTransport(self._hello, limits, session=self._session, why_banned=self.bans.why)
        entrances = self._entrances()
        self._outside = outside = Outside(
            directory, self.settings, self._address_book, entrances=entrances, ask=self._ask_to_dial_back
        )
        if isinstance(target, RunSpec):
            self.spec = target
        else:
            self.spec = await find_spec(
                target,
                state_dir=self.settings.state_dir,
                directory=directory,
                transport=transport,
                outside=outside,
            )
        if self.spec.run_key != (self._invitation.run_key if self._invitation else ""):
            raise TicketError("the run is private, and the ticket holds no invitation to it: ask for a new ticket")
        pace = Pace(self.spec.outer.first_inner_steps)
        runner = RoundRunner(
            hello=self._hello,
            transport=transport,
            directory=outside,
            pace=pace,
            executor=self._executor,
            rng=random.SystemRandom(),  # ids of swaps must not be guessed
            on_corrupt=self.bans.strike,
        )
        self.exchange = Exchange(spec=self.spec, loop=asyncio.get_running_loop(), runner=runner, pace=pace)
        states = StateServer(self.spec)
        service = PeerService(runner=runner, states=states, status=self._status)
        server = GrpcServer(service, limits, session=self._session, why_banned=self.bans.why)
        await ports.try_both(ports.grpc, lambda port: server.start(self.settings.listen_host, port))
        control = ControlServer(self.settings.state_dir, self._verbs())
        await control.start()
        watch = SwapWatch(runner)
        self._network = _Network(
            directory,
            transport,
            runner,
            states,
            service,
            server,
            control,
            watch,
            outside,
            self._make_entering(directory, transport, outside),
            asyncio.create_task(watch.run()),
        )
        await outside.start(server, num_calls=lambda: service.num_calls)
        ports.remember(grpc=server.port, libp2p=directory.port)
        keep(self.spec, self._invitation, self.run_folder)
        await self._serve_metrics()

    def _make_entering(self, directory: SwarmDirectory, transport: GrpcTransport, outside: Outside) -> Entering:
        assert self._thread is not None
        return Entering(
            self.spec,
            thread=self._thread,
            directory=directory,
            transport=transport,
            outside=outside,
            ticket=self._target if isinstance(self._target, Ticket) else None,
            expects_others=bool(self.settings.bootstrap or self._address_book.addresses()),
            progress=self.progress,
            leaving=self.leave_requested,
        )

    async def _serve_metrics(self) -> None:
        if not self.settings.metrics:
            return
        from noloco_p2p.telemetry.http import HttpServer, metrics_app

        host, port = split_address(self.settings.metrics)
        self._metrics_server = HttpServer(metrics_app(self._metrics_page), host=host, port=port)
        await self._metrics_server.start(flag="--metrics")
        self.metrics_address = f"{host}:{self._metrics_server.port}"

    def _metrics_page(self) -> bytes:
        from noloco_p2p.telemetry.prometheus import peer_page

        self.count_traffic()
        return peer_page(self.metrics, peer_id=self.peer_id, run=self._run[0], live_peers=self.live_peers())

    async def _start_directory(self, port: int) -> SwarmDirectory:
        settings = self.settings
        announce_host, announce_port = settings.announced
        return await SwarmDirectory.start(
            identity_path=settings.state_dir / "identity.key",
            identity=self._identity,
            listen_host=settings.listen_host,
            listen_port=port,
            announce_host=announce_host or None,
            announce_port=announce_port + 1 if announce_port else 0,
            bootstraps=self._entrances(),
            relays=not settings.max_upload,
            address_book=self._address_book,
            spec_digest=self._run[1],
            describe=self._describe,
            on_copy=self._on_copy,
            ignores=self._ignores,
        )

    def _ignores(self, record: PeerRecord) -> bool:
        return stranger_to(self._invitation)(record) or bool(self.bans.why(record.peer_id))

    def _entrances(self) -> list[str]:
        return [*self.settings.bootstrap, *(self._target.addresses if isinstance(self._target, Ticket) else ())]

    async def _stop_network(self) -> None:
        if self._metrics_server:
            await self._metrics_server.stop()
        if self._network:
            await end_tasks([self._network.watching])
            await self._network.control.stop()
            self._network.runner.state = "leaving"
        if self._outside:
            await self._outside.stop()
        if self._directory:
            # The last words of a copy would be taken for those of the other.
            await self._directory.stop(farewell=self._entered and self.fault is None)
        if self._network:
            await self._network.runner.stop()
            await self._network.server.stop(0.5)
        self._network = self._directory = self._outside = None

    # what others are told

    def _hello(self) -> Hello:
        return Hello(self._identity.peer_id, *self._run, layout=self._layout.digest() if self._layout else "")

    def _status(self) -> tuple[Hello, str, int, float]:
        return self._hello(), self.state, self.metrics.round, self.metrics.progress

    def _describe(self) -> PeerRecord | None:
        """The record of this peer; None until it has a model, as it cannot swap before."""
        if not self._entered:
            return None
        self.count_traffic()
        metrics, reach, (sketch, norm) = self.metrics, self.reach(), self._sketcher.latest
        if reach.state == OUTBOUND_ONLY and not self._told_outbound_only:
            self._told_outbound_only = True
            log.warning("outbound only: %s", reach.sentence)
        return PeerRecord(
            peer_id=self.peer_id,
            run_name=self.spec.name,
            spec_digest=self.spec.digest(),
            addresses=self._net.outside.addresses(),
            multiaddrs=self._net.outside.ways_in(),
            state=self.state,
            progress=metrics.progress,
            round=metrics.round,
            swaps=metrics.swaps,
            alone=metrics.alone,
            inner_steps_per_s=metrics.inner_steps_per_s,
            tokens_per_s=metrics.tokens_per_s,
            loss=metrics.loss,
            last_partner=metrics.last_partner,
            reachability=reach.state,
            bytes_sent=metrics.bytes_sent,
            bytes_received=metrics.bytes_received,
            halves=metrics.halves,
            late=metrics.late,
            lonely=tuple(getattr(metrics, f"alone_{cause}") for cause in LonelyCause),
            validation_loss=metrics.validation_loss,
            blocked_s=round(metrics.blocked_s, 3),
            sketch=sketch,
            norm=norm,
            session_key=self._session.key_text,
            started_at_ms=self._session.started_at_ms,
            mark=self._invitation.mark(self.peer_id) if self._invitation else "",
        )

    def status(self) -> dict[str, Any]:
        """What `noloco status` shows; docs/monitoring.md tells what each key means."""
        self.count_traffic()
        now_s, net = time.time(), self._net
        swap, reach = net.watch.now(now_s=time.monotonic()), self.reach()
        headcount = net.directory.headcount()
        return {
            "peer_id": self.peer_id,
            "pid": os.getpid(),
            "software": __version__,
            "run": self.spec.name,
            "spec_digest": self.spec.digest(),
            "state": self.state if self._entered else "entering",
            "state_since_s": round(now_s - (self._state_since_s if self._entered else self._started_at_s), 1),
            "running_since_s": round(now_s - self._started_at_s, 1),
            "doing": self.progress.now(),
            "swap": asdict(swap) if swap else None,
            "address": self.address,
            "reach": {"state": reach.state, "sentence": reach.sentence},
            "ticket": self.ticket,
            "live_peers": headcount.others,
            "live_peers_is_estimate": headcount.is_estimate,
            "last_fault": self.last_fault(),
            "last_fault_since_s": round(now_s - net.runner.faults.at_s, 1) if net.runner.last_fault else None,
            "last_fault_advice": net.runner.faults.advice,
            "settings": self._settings(),
            **self.metrics.as_dict(),
        }

    def _settings(self) -> dict[str, dict[str, Any]]:
        values, origins = self.settings.model_dump(mode="json"), self.settings.origins()
        return {name: {"value": value, "origin": origins[name]} for name, value in values.items()}

    def _verbs(self) -> dict[str, Handler]:
        return {"status": self.status, "leave": self._on_leave, "pause": self._on_pause, "resume": self._on_resume}

    def _on_leave(self) -> dict[str, Any]:
        self.request_leave()
        return {"leaving": True, "pid": os.getpid()}

    def _on_copy(self, other: PeerRecord) -> None:
        if self.fault is None:
            where = ", ".join(other.addresses) or "another machine"
            self.fault = IdentityError(
                f"the key of this peer is in use at {where}, too, by a peer that started later: this one stops. A key "
                f"must not be used twice: move {self.settings.state_dir / 'identity.key'} away on one of the two "
                "machines, and `noloco id` creates a new one there"
            )
            log.error("%s", self.fault)
            self.request_leave()

    def _on_pause(self) -> dict[str, Any]:
        refusal = self._why_no_pause()
        was_asked = self.pause_requested.is_set()
        if not refusal:
            self.pause_requested.set()
        return {"refusal": refusal, "was_asked": was_asked, "state": self.state, "pid": os.getpid()}

    def _on_resume(self) -> dict[str, Any]:
        was_asked = self.pause_requested.is_set()
        self.pause_requested.clear()
        return {"was_asked": was_asked, "state": self.state, "pid": os.getpid()}

    def _why_no_pause(self) -> str:
        if self.leave_requested.is_set():
            return "it is leaving"
        if not self._entered:
            return "it has not begun to train yet; try again, or stop it with `noloco leave`"
        return "the run is done, and it trains no more" if self.state == "done" else ""

    @property
    def _net(self) -> _Network:
        if self._network is None:
            raise SettingsError("this peer is not running")
        return self._network

    def _call(
        self, coroutine: Coroutine[Any, Any, T], timeout_s: float, *, leaving: threading.Event | None = None
    ) -> T:
        if self._thread is None:
            coroutine.close()
            raise SettingsError("this peer is not running")
        return self._thread.call(coroutine, timeout_s, leaving=leaving)
