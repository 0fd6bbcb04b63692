"""A running peer of a run, as a script sees it. Its parts are in `peer/network.py`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_p2p._version import __version__
from noloco_p2p.control import Handler, hold
from noloco_p2p.errors import DirectoryError, NolocoError, SettingsError
from noloco_p2p.peer.membership import Membership
from noloco_p2p.peer.network import ENTER_TIMEOUT_S, Network
from noloco_p2p.peer.network_thread import START_TIMEOUT_S, STOP_TIMEOUT_S, NetworkThread
from noloco_p2p.peer.run_folder import folder_of
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import RunSpec, Spec
from noloco_p2p.swarm.dial_back import Verdict
from noloco_p2p.swarm.records import STATES
from noloco_p2p.telemetry.console import duration
from noloco_p2p.telemetry.progress import Progress
from noloco_p2p.ticket import Ticket, find

if TYPE_CHECKING:
    from typing import Self


log = logging.getLogger(__name__)

POLL_S = 0.05


def resolve(target: Spec | Ticket | Path | str | None) -> Spec | Ticket:
    """Return the spec or the ticket that `target` names.

    Raises SpecError or TicketError if it is invalid, and SettingsError if it is None or "".
    """
    if isinstance(target, Spec | Ticket):
        return target
    if target is None or target == "":  # for example, if a script passes on an optional argument
        raise SettingsError(f"Peer.join needs a spec, the path of a spec file, or a ticket; it got {target!r}")
    return (find(target) if isinstance(target, str) else None) or Spec.load(target)


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
        with ExitStack() as parts:
            parts.enter_context(hold(settings.state_dir))
            self._thread = NetworkThread()
            parts.callback(self._thread.stop)
            self._network = net = Network(target, settings, self._thread, progress or Progress())
            self.progress, self.metrics = net.progress, net.metrics
            self.pausing, self.pause_requested, self.leave_requested = net.pausing, net.pausing.requested, net.leaving
            parts.callback(self._stop_network)
            try:
                self._thread.call(net.start(self._verbs()), START_TIMEOUT_S + ENTER_TIMEOUT_S)
            except TimeoutError:
                raise DirectoryError(
                    "the network did not start in time; the machine may be overloaded, so try again"
                ) from None
            self._parts = parts.pop_all()
        self.spec = net.spec
        self.membership = Membership(net)

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
        return cls(resolve(target), settings, progress=progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Announce that this peer is leaving, and stop everything. It is safe to call this twice.

        When it returns, none of the peer's threads or processes is left.
        """
        self._parts.close()

    def _stop_network(self) -> None:
        try:
            self._thread.call(self._network.stop(), STOP_TIMEOUT_S)
        except TimeoutError:
            log.error("the network did not stop within %.0f s", STOP_TIMEOUT_S)

    @property
    def peer_id(self) -> str:
        """Return the libp2p id of this peer's key, such as 12D3KooW..."""
        return self._network.identity.peer_id

    @property
    def run_folder(self) -> Path:
        """Return the folder in which this machine keeps the spec, checkpoints and events of this run."""
        return folder_of(self.settings.state_dir, self.spec.run_id)

    @property
    def ticket(self) -> str:
        """Return the ticket to share. Anyone who has it can join the run through this peer, its bootstraps, or other
        live peers.
        """
        return self._network.ticket()

    @property
    def state(self) -> str:
        """Return the state that others see in the record: training, paused, leaving or done."""
        return self._network.status.state

    @property
    def has_entered(self) -> bool:
        """Return whether the peer has a model and has announced itself."""
        return self._network.status.has_entered

    @property
    def fault(self) -> NolocoError | None:
        """Return the reason why this peer has to leave although nobody asked it to, or None."""
        return self._network.fault

    @property
    def metrics_address(self) -> str:
        """Return the HOST:PORT of /metrics, or "" if it is not served."""
        return self._network.metrics_address

    @property
    def address(self) -> str:
        """Return the HOST:PORT that others dial."""
        return self._network.reachability.address

    def live_peers(self) -> int:
        """Return how many other peers are known to be alive. In a swarm of more than 48 peers, this is an estimate."""
        return self._network.directory.headcount().others

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
        self._network.request_leave()

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
        "training". Raises SettingsError for any other state.
        """
        if state not in STATES:
            raise SettingsError(
                f"a peer cannot announce the state {state!r}; the states are {', '.join(sorted(STATES))}"
            )
        self._network.announce(state)

    def last_fault(self) -> str:
        """Return why this peer cannot announce itself, or else the last fault of another peer and how long ago it was.

        The result is "" without any.
        """
        counts, own = self._network.service.counts, self._network.directory.fault
        if own or not counts.last_failure:
            return own
        return f"{duration(time.monotonic() - counts.failed_at_s)} ago: {counts.last_failure}"

    def reach(self) -> Verdict:
        """Return the verdict on whether other peers can dial this one, based on their reports."""
        return self._network.reachability.verdict()

    def wait_for_router(self) -> None:
        """Wait until the router has accepted or refused to forward ports, so that the ticket can contain them.

        This takes a few seconds at most, and no time if no router is asked.
        """
        self._thread.call(self._network.reachability.wait_for_router(), START_TIMEOUT_S)

    def count_traffic(self) -> None:
        """Update the counters of bytes, chunks and time in `metrics`."""
        self._network.count()

    def restore_metrics(self, values: Mapping[str, Any]) -> None:
        """Continue the metrics from the values in a checkpoint. No counter decreases, and unknown names are ignored."""
        self._network.status.restore(values)

    # what `noloco status`, `leave`, `pause` and `resume` ask for

    def status(self) -> dict[str, Any]:
        """Return the content of `noloco status`, whose main keys docs/operators.md explains."""
        net, status, now_s = self._network, self._network.status, time.monotonic()
        net.count()
        reach, headcount = net.reachability.verdict(), net.directory.headcount()
        values, origins = self.settings.model_dump(mode="json"), self.settings.origins()
        return {
            "peer_id": self.peer_id,
            "name": self.settings.name,
            "pid": os.getpid(),
            "software": __version__,
            "run": net.run[0],
            "spec_digest": net.run[1],
            "state": status.state if status.has_entered else "entering",
            "state_since_s": round(now_s - (status.since_s if status.has_entered else status.started_at_s), 1),
            "running_since_s": round(now_s - status.started_at_s, 1),
            "paused_by": net.paused_by,
            "paused_because": self.pausing.sentence if status.state == "paused" else "",
            "doing": self.progress.now(),
            "stage": net.live_peers.stage,
            "stages": net.num_stages,
            "waits_for_stages": status.waits_for_stages,
            "address": self.address,
            "reach": {"state": reach.state, "sentence": reach.sentence},
            "neighbours": net.reachability.neighbours(),
            "ticket": self.ticket,
            "live_peers": headcount.others,
            "live_peers_is_estimate": headcount.is_estimate,
            "peers": dict(net.directory.names()),
            "is_announced": not net.directory.fault,
            "last_fault": self.last_fault(),
            "settings": {name: {"value": value, "origin": origins[name]} for name, value in values.items()},
            **self.metrics.as_dict(),
        }

    def _verbs(self) -> dict[str, Handler]:
        return {"status": self.status, "leave": self._on_leave, "pause": self._on_pause, "resume": self._on_resume}

    def _on_leave(self) -> dict[str, Any]:
        self.request_leave()
        self._network.count()
        return {"leaving": True, "pid": os.getpid(), **self.metrics.as_dict()}

    def _on_pause(self) -> dict[str, Any]:
        refusal, was_asked = self._why_no_pause(), self.pausing.is_asked
        if not refusal:
            self.pausing.ask()
        return {
            "refusal": refusal,
            "was_asked": was_asked,
            "state": self.state,
            "pid": os.getpid(),
            "is_script": isinstance(self._network.spec, RunSpec),
        }

    def _on_resume(self) -> dict[str, Any]:
        was_asked = self.pausing.is_asked
        self.pausing.resume()
        return {
            "was_asked": was_asked,
            "state": self.state,
            "stays_because": "" if self.state == "done" else self.pausing.sentence,
            "pid": os.getpid(),
        }

    def _why_no_pause(self) -> str:
        """Return why this peer cannot be paused now, or "" if it can."""
        if self.leave_requested.is_set():
            return "the peer is leaving"
        if not self.has_entered:
            return "the peer has not started training yet; try again later, or stop it with `noloco leave`"
        return "the run is done, so the peer is no longer training" if self.state == "done" else ""
