"""Publish the status of a peer: a record for the swarm, a status for its user, and metrics for a scraper."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from noloco_p2p._version import __version__
from noloco_p2p.errors import SettingsError
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.gossip import Counts, Link
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.identity import Identity
from noloco_p2p.invitation import Invitation
from noloco_p2p.net.session import Session
from noloco_p2p.peer.network import Network
from noloco_p2p.peer.pausing import Pausing
from noloco_p2p.settings import PeerSettings, split_address
from noloco_p2p.swarm.dial_back import Reach
from noloco_p2p.swarm.records import PausedBy, PeerRecord
from noloco_p2p.telemetry.metrics import CONTRIBUTION, FAILED, Metrics
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.ticket import MAX_ADDRESSES, Ticket

if TYPE_CHECKING:
    from noloco_p2p.telemetry.http import HttpServer

log = logging.getLogger(__name__)


class Stopwatch:
    """A stopwatch that stops while the machine sleeps. Several threads can read it."""

    def __init__(self) -> None:
        # The seconds counted before the last start, and the time of that start, or None while stopped.
        self._now: tuple[float, float | None] = 0.0, None

    def run(self, is_running: bool) -> None:
        """Start or stop the stopwatch."""
        self._now = self.seconds(), time.monotonic() if is_running else None

    def add(self, seconds: float) -> None:
        before_s, since_s = self._now
        self._now = before_s + seconds, since_s

    def seconds(self) -> float:
        before_s, since_s = self._now
        return before_s if since_s is None else before_s + time.monotonic() - since_s


class PublishedStatus:
    """The status that a peer publishes.

    `network` is set once everything has started. Until then, only `hello` and the counters are used. `run` is the name
    and the digest of the run, and `layout` is the model's layout once it is known. `state` is the state in the record:
    training, paused, leaving or done. It is published once the peer `has_entered`.
    """

    def __init__(
        self,
        run: tuple[str, str],
        identity: Identity,
        session: Session,
        invitation: Invitation | None,
        *,
        settings: PeerSettings,
        metrics: Metrics,
        progress: Progress,
        pausing: Pausing,
    ) -> None:
        self.network: Network | None = None
        self.layout: ModelLayout | None = None
        self.state = "training"
        self.has_entered = False
        self.metrics_address = ""  # HOST:PORT of /metrics, if it is served
        self.waits_for_stages: tuple[int, ...] = ()  # stages that this peer waits for because no peer holds them
        self._run = run
        self._identity = identity
        self._session = session
        self._invitation = invitation
        self._settings = settings
        self._metrics = metrics
        self._progress = progress
        self._pausing = pausing
        self._training_time = Stopwatch()
        self._started_at_s = self._state_since_s = time.time()
        self._before: dict[str, int] = {}  # what was counted before a restart
        self._told_outbound_only = False
        self._metrics_server: HttpServer | None = None

    async def serve_metrics(self) -> None:
        """Start serving /metrics if the settings say so. Raises SettingsError if the port is in use."""
        if not self._settings.metrics:
            return
        from noloco_p2p.telemetry.http import HttpServer, metrics_app

        host, port = split_address(self._settings.metrics)
        self._metrics_server = HttpServer(metrics_app(self._metrics_page), host=host, port=port)
        await self._metrics_server.start(flag="--metrics")
        self.metrics_address = f"{host}:{self._metrics_server.port}"

    async def stop(self) -> None:
        if self._metrics_server:
            await self._metrics_server.stop()

    def enter(self) -> None:
        """Publish the status from now on."""
        self.has_entered, self._state_since_s = True, time.time()
        self._training_time.run(self.state == "training")

    def change_state(self, state: str) -> None:
        if state != self.state:
            self._state_since_s = time.time()
        self.state = state
        self._training_time.run(self.has_entered and state == "training")

    # counters

    def count(self) -> None:
        """Update the metrics that follow from swaps, relays and time. Any thread may call this."""
        net, metrics = self._net, self._metrics
        for name, number in counted(net.service.counts, relayed_bytes=net.directory.relayed_bytes).items():
            setattr(metrics, name, self._before.get(name, 0) + number)
        link = net.service.gossip.link if net.service.gossip else Link()
        metrics.swaps_per_min, metrics.link_use = link.last_minute(time.monotonic())
        metrics.trained_s = self._training_time.seconds()

    def restore_metrics(self, values: dict[str, Any]) -> None:
        """Continue the counters from the values in a checkpoint. Unknown names are ignored."""
        for name in Metrics.__dataclass_fields__:
            if name in values:
                setattr(self._metrics, name, values[name])
        self._before = {name: getattr(self._metrics, name) for name in counted(Counts(), relayed_bytes=0)}
        self._training_time.add(self._metrics.trained_s or 0.0)

    # the data that is published

    def hello(self) -> Hello:
        """Return the `Hello` that is part of every call."""
        return Hello(self._identity.peer_id, *self._run, layout=self.layout.digest() if self.layout else "")

    def ticket(self) -> str:
        """Return a ticket.

        Anyone who has it can join the run through this peer, its bootstraps, or other live peers.
        """
        doors = tuple(self._net.reachability.doors())[:MAX_ADDRESSES]
        return Ticket(*self._run, doors, self._invitation).encode()

    def record(self) -> PeerRecord | None:
        """Return the record for the directory, or None while this peer has no model and so cannot swap."""
        if not self.has_entered:
            return None
        self.count()
        reachability = self._net.reachability
        listing = self._invitation.listing(self._run[1]) if self._invitation else None
        reach = reachability.verdict()
        if reach.state is Reach.OUTBOUND_ONLY and not self._told_outbound_only:
            self._told_outbound_only = True
            log.warning("outbound only: %s", reach.sentence)
        return PeerRecord(
            peer_id=self._identity.peer_id,
            run_name="" if listing else self._run[0],
            spec_digest=listing.view if listing else self._run[1],
            addresses=reachability.addresses(),
            multiaddrs=reachability.ways_in(),
            state=self.state,
            metrics=replace(self._metrics, **dict.fromkeys(CONTRIBUTION))
            if self._settings.hide_contribution
            else self._metrics,
            reachability=reach.state,
            session_key=self._session.key_text,
            started_at_ms=self._session.started_at_ms,
            mark=listing.mark(self._identity.peer_id) if listing else "",
            stage=self._net.live_peers.stage or 0,
            stages=self._num_stages,
            sends_to=self._net.stage_flow.sends_to if self._net.stage_flow else (),
            name=self._settings.name,
            paused_by=self._paused_by(),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `noloco status`. docs/monitoring.md explains each key."""
        self.count()
        now_s, net = time.time(), self._net
        reach, headcount = net.reachability.verdict(), net.directory.headcount()
        return {
            "peer_id": self._identity.peer_id,
            "name": self._settings.name,
            "pid": os.getpid(),
            "software": __version__,
            "run": self._run[0],
            "spec_digest": self._run[1],
            "state": self.state if self.has_entered else "entering",
            "state_since_s": round(now_s - (self._state_since_s if self.has_entered else self._started_at_s), 1),
            "running_since_s": round(now_s - self._started_at_s, 1),
            "paused_by": self._paused_by(),
            "paused_because": self._pausing.sentence if self.state == "paused" else "",
            "doing": self._progress.now(),
            "stage": net.live_peers.stage,
            "stages": self._num_stages,
            "waits_for_stages": self.waits_for_stages,
            "address": net.reachability.address,
            "reach": {"state": reach.state, "sentence": reach.sentence},
            "neighbours": net.reachability.neighbours(),
            "ticket": self.ticket(),
            "live_peers": headcount.others,
            "live_peers_is_estimate": headcount.is_estimate,
            "last_fault": net.service.counts.last_failure,
            "settings": self._settings_by_origin(),
            **self._metrics.as_dict(),
        }

    def _paused_by(self) -> PausedBy:
        return self._pausing.word if self.state == "paused" else ""

    def _settings_by_origin(self) -> dict[str, dict[str, Any]]:
        values, origins = self._settings.model_dump(mode="json"), self._settings.origins()
        return {name: {"value": value, "origin": origins[name]} for name, value in values.items()}

    def _metrics_page(self) -> bytes:
        from noloco_p2p.telemetry.prometheus import peer_page

        self.count()
        live_peers = self._net.directory.headcount().others
        return peer_page(self._metrics, peer_id=self._identity.peer_id, run=self._run[0], live_peers=live_peers)

    @property
    def _num_stages(self) -> int:
        """Return the number of stages of the run.

        It is 0 if every peer holds the whole model, or if this peer is not in a pipeline yet.
        """
        return self._net.stage_flow.num_stages if self._net.stage_flow else 0

    @property
    def _net(self) -> Network:
        if self.network is None:
            raise SettingsError("this peer is not running")
        return self.network


def counted(counts: Counts, *, relayed_bytes: int) -> dict[str, int]:
    """Return what a peer has counted since its start, by the names of the metrics."""
    return {
        **asdict(counts.traffic),
        "swaps": counts.swaps,
        **{name: counts.failures[name.removeprefix("failed_")] for name in FAILED},
        **{f"refused_{code.lower()}": counts.refused[code] for code in ("OVER_SHARE", "UNLISTED")},
        "relayed_bytes": relayed_bytes,
    }
