"""Fetch the spec, the initial state and, whenever it is needed, a newer state from live peers.

A newer state is needed if this peer is far behind the swarm.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from noloco_p2p.errors import CheckpointError, Left, ModelError, TimedOut, Unreachable
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.questions import find_difference
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net.client import GrpcTransport
from noloco_p2p.peer.live_peers import LivePeers
from noloco_p2p.peer.network_thread import NetworkThread
from noloco_p2p.peer.run_folder import read_spec
from noloco_p2p.peer.state_admission import StateAdmission, ask_for_positions
from noloco_p2p.spec import Spec
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.swarm.reader import find_somebody
from noloco_p2p.telemetry.console import duration, named
from noloco_p2p.telemetry.progress import Progress, Report
from noloco_p2p.ticket import Ticket
from noloco_p2p.transfer.donor import state_file_bytes
from noloco_p2p.transfer.fetch import can_give, fetch_spec, fetch_state
from noloco_p2p.transfer.kept_chunks import forget

log = logging.getLogger(__name__)
T = TypeVar("T")

ENTER_TIMEOUT_S = 30.0  # for finding a live peer of the run that a ticket names
LOOK_AROUND_S = 10.0  # the same without a ticket, in which case there may be no live peer
ASK_AGAIN_S = 1.0  # between two requests for the spec
ANSWER_S = 120.0  # for quick requests, on a slow machine
FETCH_STATE_TIMEOUT_S = 24 * 3600.0  # long, because a starting peer has nothing else to do
CATCH_UP_TIMEOUT_S = 600.0  # shorter, because training waits; the next attempt continues with the data that arrived
CATCH_UP_AGAIN_S = 60.0  # minimum pause after an attempt; after a longer attempt, the pause is as long as the attempt
DONORS_ASKED = 3  # donors that are asked for the layout of their model if none of them had a matching state


async def find_spec(
    ticket: Ticket, *, state_dir: Path, directory: SwarmDirectory, transport: GrpcTransport, live_peers: LivePeers
) -> Spec:
    """Return the spec that this machine has kept or that a live peer serves.

    Raises Unreachable if no live peer serves it in time.
    """
    if kept := read_spec(ticket, state_dir):
        return kept
    await find_somebody(ticket, directory, timeout_s=ENTER_TIMEOUT_S)
    until_s = time.monotonic() + ENTER_TIMEOUT_S
    while True:  # a relay to the live peers may be found soon
        donors = [candidate for candidate in live_peers.live() if candidate.can_be_called]  # of any stage
        try:
            return await fetch_spec(transport, donors, expected_digest=ticket.spec_digest)
        except Unreachable:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(ASK_AGAIN_S)


class Entering:
    """A client that fetches states from live peers, when this peer enters the swarm and when it is far behind.

    `enter` and `catch_up` are called on the main thread. They send their requests on the network thread.

    `is_told_stale` returns whether, since the last call, any peer has refused this peer because of its position in the
    run. `ticket` is the ticket that this peer enters with. If `expects_others` is true, a peer without a ticket waits
    briefly for a live peer. `leaving` is set when this peer must end. Long operations then raise Left.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        thread: NetworkThread,
        directory: SwarmDirectory,
        transport: GrpcTransport,
        live_peers: LivePeers,
        is_told_stale: Callable[[], bool],
        ticket: Ticket | None,
        expects_others: bool,
        progress: Progress,
        leaving: threading.Event,
    ) -> None:
        self._spec = spec
        self._thread = thread
        self._directory = directory
        self._transport = transport
        self._live_peers = live_peers
        self._is_told_stale = is_told_stale
        self._ticket = ticket
        self._expects_others = expects_others
        self._progress = progress
        self._leaving = leaving
        self._catch_up_again_s = 0.0
        self._ask_again_s = 0.0

    def look_around(self) -> None:
        """Wait until a live peer is known, if one is expected.

        Raises Left, or Unreachable if this peer has a ticket and no peer is live.
        """
        with self._progress.task("looking for live peers"):
            self._answer(self._look_around())

    def enter(self, layout: ModelLayout, *, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target`, and return its manifest, or None if no peer has a state.

        If no listed peer answers, this waits until one does or until all records have expired, because the records of
        dead peers remain for a while.

        Raises Left or TimedOut; Unreachable if there is a ticket but no live peer; CheckpointError if the state cannot
        be written; and ModelError if live peers train another model. The ModelError names the first tensor that
        differs.
        """
        donors, told = self._look_for_donors(), False
        while donors:
            manifest = self._fetch_state(donors, layout, target=target, timeout_s=FETCH_STATE_TIMEOUT_S)
            if manifest:
                return manifest
            self._check_model(donors, layout)  # a peer that trains another model refuses every other request
            if all(donor.progress == 0 for donor in donors):
                break
            if self.answering():
                log.warning(
                    "no live peer has a saved state yet; this peer starts from the initial weights, as those peers did"
                )
                break
            if not told:
                told = True
                log.warning("no peer of the run is answering; waiting until one does or all records have expired")
            if self._leaving.wait(ASK_AGAIN_S):
                raise Left("asked to leave before any peer of the run answered")
            donors = self._look_for_donors()
        if told and not donors and self._live_peers.stage is not None:
            raise Unreachable("the peers that held this stage are gone; restart this peer to wait for their return")
        return None

    def answering(self) -> Sequence[Candidate]:
        """Request the current status of some of this peer's possible partners, and return those that answer.

        Unlike the directory, the result contains no dead peers. Raises Left.
        """

        async def ask() -> Sequence[Candidate]:
            return await ask_for_positions(self._transport, self._live_peers.live())

        return self._answer(ask())

    def rescue(self, layout: ModelLayout, *, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target`, because this peer's own weights are lost."""
        try:
            donors = self._look_for_donors()
            return self._fetch_state(donors, layout, target=target, timeout_s=CATCH_UP_TIMEOUT_S)
        except (Left, Unreachable, CheckpointError, TimedOut, TimeoutError) as error:
            log.error("no live peer gave its state: %s", error)
            return None

    def catch_up(self, layout: ModelLayout, *, progress: float, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` if most of the swarm is far ahead, and return its manifest.

        `progress` is this peer's position in the schedule. Calling this is cheap, except after a refusal. The result is
        None if the swarm is not far ahead. It is also None if no peer serves a newer state. A later call tries again.
        """
        if time.monotonic() < self._catch_up_again_s:
            return None
        try:
            ahead = self._far_ahead(progress)
        except (Left, TimeoutError):  # this peer was asked to leave, or the network thread hangs
            return None
        if not ahead:
            return None
        began_s = time.monotonic()
        log.warning(
            "this peer is at %.1f %% of the schedule, but most of the swarm is at %.1f %% or beyond; catching up",
            100 * progress,
            100 * min(donor.progress for donor in ahead),
        )
        try:
            manifest = self._fetch_state(
                ahead, layout, target=target, newer_than=progress, timeout_s=CATCH_UP_TIMEOUT_S
            )
        except Left:
            return None
        except (CheckpointError, TimedOut) as error:
            log.error("%s", error)
            return None
        finally:
            now_s = time.monotonic()
            self._catch_up_again_s = now_s + max(CATCH_UP_AGAIN_S, now_s - began_s)
        if manifest is None:
            log.warning("no peer can provide a newer state at the moment; this peer will try again later")
            return None
        log.warning("caught up with the swarm: %.1f %% of the schedule", 100 * manifest.progress)
        return manifest

    def _far_ahead(self, progress: float) -> list[Candidate]:
        """Return the peers at the position of the swarm, shuffled, or an empty list if this peer is not far behind.

        Records can be as old as one heartbeat. In a short run, the swarm can advance in that time by more than two
        partners may be apart. So a peer that was refused because of its position asks some others for theirs.
        It does so rarely, because anybody can send such a refusal, and training waits for the answers. Raises Left.
        """
        live = self._live_peers.mates()
        if time.monotonic() >= self._ask_again_s and self._is_told_stale():
            self._ask_again_s = time.monotonic() + CATCH_UP_AGAIN_S
            live = self.answering()
        positions = [each.progress for each in live if each.state in ("training", "done")]
        middle = median(positions) if positions else 0.0  # the median decides, so a minority has no effect
        if middle - progress <= self._spec.furthest:
            return []

        async def reach() -> Sequence[Candidate]:
            return self._live_peers.reached(live)

        ahead = [each for each in self._answer(reach()) if can_give(each) and each.progress >= middle]
        random.shuffle(ahead)
        return ahead

    def _look_for_donors(self) -> Sequence[Candidate]:
        with self._progress.task("looking for live peers"):
            return self._answer(self._find_donors())

    def _answer(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a quick request on the network thread, and return the answer. Raises Left."""
        return self._thread.call(coroutine, ANSWER_S, leaving=self._leaving)

    async def _look_around(self) -> None:
        """Wait until a live peer is known, if one is expected. Raises Unreachable if there is a ticket but no live
        peer.
        """
        if self._ticket:
            await find_somebody(self._ticket, self._directory, timeout_s=ENTER_TIMEOUT_S)
        elif self._expects_others:
            await self._directory.wait_for_peers(LOOK_AROUND_S)

    async def _find_donors(self) -> Sequence[Candidate]:
        """Return the live peers that may have a state, or an empty list if this peer is the first.

        Raises Unreachable.
        """
        await self._look_around()
        donors = [peer for peer in self._live_peers.live() if can_give(peer)]
        random.shuffle(donors)
        middle = median(donor.progress for donor in donors) if donors else 0.0
        return sorted(donors, key=lambda donor: donor.progress < middle)  # peers that are behind come last

    def _fetch_state(
        self,
        donors: Sequence[Candidate],
        layout: ModelLayout,
        *,
        target: Path,
        timeout_s: float,
        newer_than: float = -math.inf,
    ) -> StateManifest | None:
        def fetching(report: Report) -> Coroutine[Any, Any, StateManifest | None]:
            return fetch_state(
                self._transport,
                donors,
                layout=layout.digest(),
                num_elements=layout.num_elements,
                num_bytes=state_file_bytes(layout.num_elements, self._spec.outer),
                target=target,
                admission=StateAdmission(self._spec, self._transport, live=self._live_peers.live),
                newer_than=newer_than,
                live=self._live_peers.live,
                patience_s=math.inf,
                on_progress=report,
            )

        try:
            with self._progress.task("fetching the state of the swarm", unit="bytes") as report:
                manifest = self._thread.call(fetching(report), timeout_s, leaving=self._leaving)
            if manifest is None:
                forget(target)
        except TimeoutError:
            raise TimedOut(f"the state of the swarm did not arrive within {duration(timeout_s)}") from None
        except OSError as error:
            raise CheckpointError(f"the state of the swarm cannot be written to {target}: {error}") from None
        return manifest

    def _check_model(self, donors: Sequence[Candidate], layout: ModelLayout) -> None:
        """Raise ModelError if the swarm trains a different model. It would then always refuse this peer."""
        for donor in donors[:DONORS_ASKED]:
            if difference := self._answer(find_difference(self._transport, donor, layout)):
                raise ModelError(
                    f"the swarm is training a different model, according to {named(donor.peer_id)}: "
                    f"{difference}. Use the same revision, folder and versions of torch and transformers as the other "
                    "peers"
                )
