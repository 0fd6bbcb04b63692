"""Provide the network services that training uses: they let a peer enter, swap, catch up and hold a stage.

A peer fetches a state from live peers when it enters, and a newer one whenever it is far behind the swarm.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median, median_low
from threading import Event
from typing import Any, TypeVar

from noloco_p2p.errors import CheckpointError, Left, ModelError, TimedOut, Unreachable
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import StateManifest
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.outer.saved_state import read_state
from noloco_p2p.outer.weights import vectors_of
from noloco_p2p.peer.network import ASK_AGAIN_S, ENTER_TIMEOUT_S, AnyFlow, Network
from noloco_p2p.peer.network_thread import START_TIMEOUT_S
from noloco_p2p.peer_name import named
from noloco_p2p.swarm.directory import find_somebody
from noloco_p2p.telemetry.console import duration
from noloco_p2p.ticket import Ticket
from noloco_p2p.transfer.donor import SavedState
from noloco_p2p.transfer.fetch import (
    Admission,
    ask_for_positions,
    can_give,
    fetch_state,
    find_difference,
    forget,
    positions,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_AROUND_S = 10.0  # for finding a live peer without a ticket; there may be none
HOLD_S = 10.0  # in which swaps may end before a pause
ANSWER_S = 120.0  # for quick requests, on a slow machine
FETCH_STATE_TIMEOUT_S = 24 * 3600.0  # long, because a starting peer has nothing else to do
CATCH_UP_TIMEOUT_S = 600.0  # shorter, because training waits; the next attempt continues with the data that arrived
CATCH_UP_AGAIN_S = 60.0  # minimum pause after an attempt; after a longer attempt, the pause is as long as the attempt
LONGEST_PAUSE_S = 30.0  # between two attempts to get a first state
DONORS_ASKED = 3  # donors that are asked for the layout of their model if none of them had a matching state


class Membership:
    """The network services of the main thread: the `Membership` of `outer/noloco.py`, and what a stage needs besides.

    Its methods send their requests on the network thread. Long ones raise Left once this peer must end.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._catch_up_again_s = 0.0
        self._ask_again_s = 0.0
        self._asked: Future[Sequence[Candidate]] | None = None
        self._loss_of: Callable[[Path | None], float] | None = None
        self._has_model = Event()  # from `enter` on
        self._losses: list[float] = []  # of states that have been refused
        self._refusals: dict[str, str] = {}  # peer id -> why the last fetch got no state from it
        self._fetching: Future[StateManifest | None] | None = None

    # taking part

    @contextmanager
    def fetching(self, layout: ModelLayout, target: Path) -> Iterator[None]:
        """Fetch the state of a live peer into `target` while the caller builds the model that has this layout.

        `enter` then waits for the state. If the caller fails before, the fetch ends, and so does this peer.
        """
        self._network.states.layout = layout
        with ThreadPoolExecutor(1, thread_name_prefix="noloco-fetch") as thread:
            self._fetching = thread.submit(self._fetch_first, target)
            try:
                yield
            except BaseException:
                self._network.leaving.set()
                raise
            finally:
                self._has_model.set()
                self._fetching = None

    @property
    def is_fetching(self) -> bool:
        """Return whether a state is on its way while the caller builds its model."""
        return self._fetching is not None and not self._fetching.done()

    def enter(
        self, *, layout: ModelLayout, target: Path | None, loss_of: Callable[[Path | None], float] | None = None
    ) -> StateManifest | None:
        """Announce which model this peer trains. If `target` is given, fetch the state of a live peer into that file.

        `loss_of` returns the loss of a state, or for None of the current weights, on this peer's own data. Raises the
        errors of `_fetch_first`.
        """
        net, self._loss_of = self._network, loss_of
        self._has_model.set()
        assert self._fetching is None or net.states.layout == layout
        net.states.layout = layout
        manifest = None
        if target:
            manifest = self._fetching.result() if self._fetching else self._fetch_first(target)
        net.thread.call(net.enter(), START_TIMEOUT_S)
        return manifest

    def begin_swaps(self, num_elements: int, *, progress: float) -> Exchange:
        """Begin to swap a vector of this size at this position in the run, and end the swaps of the vector before."""
        service = self._network.service
        return self._network.thread.call(service.begin(num_elements, progress=progress), START_TIMEOUT_S)

    def hold_swaps(self) -> None:
        """Begin no swap until the state is "training" again, and let the running swaps end. A closed peer has none."""
        if not self._network.thread.has_stopped:
            self._network.thread.call(self._network.service.hold(timeout_s=HOLD_S), START_TIMEOUT_S)

    def serve_state(self, saved: SavedState) -> None:
        """Serve this state to newcomers from now on."""
        self._network.states.saved = saved

    def take_state_wanted(self) -> bool:
        """Return once whether a newcomer needs a newer state than the one that is served."""
        return self._network.states.take_wanted()

    # stages

    def members(self) -> Sequence[Candidate]:
        """Return the other live peers of all stages, from their records."""
        return self._network.live_peers.everyone()

    def hold(self, stage: int) -> None:
        """Hold a stage, so that this peer swaps only with peers of that stage and fetches its state from them.

        Call this before a NoLoCo is created. The layout of a stage that was held before is dropped, because peers of
        the new stage would refuse it as another model.
        """
        self._network.live_peers.stage = stage
        self._network.states.layout = None

    def wait_for(self, stages: Sequence[int]) -> None:
        """Set the stages that this peer waits for because no peer holds them. `noloco status` shows them."""
        self._network.status.waits_for_stages = tuple(stages)

    def start_flow(self, make: Callable[[Network], AnyFlow]) -> AnyFlow:
        """Take part in the pipeline with what `make` returns. Other peers find this one in the directory and send it
        microbatches.
        """
        return self._network.thread.call(self._network.start_flow(make), START_TIMEOUT_S)

    def stop_flow(self) -> None:
        """Stop taking part in the pipeline, before this peer holds another stage."""
        self._network.thread.call(self._network.stop_flow(), START_TIMEOUT_S)

    # fetching states

    def look_around(self) -> Sequence[Candidate]:
        """Wait until a live peer is known, if one is expected, and return those that may have a state.

        The result is empty if this peer is the first. Peers that are behind come last. Raises Left, or Unreachable if
        this peer has a ticket and no peer is live.
        """

        async def find() -> Sequence[Candidate]:
            net = self._network
            if isinstance(net.target, Ticket):
                await find_somebody(net.target, net.directory, timeout_s=ENTER_TIMEOUT_S)
            elif net.expects_others:
                await net.directory.wait_for_peers(LOOK_AROUND_S)
            return [peer for peer in net.live_peers.live() if can_give(peer)]

        with self._network.progress.task("looking for live peers"):
            donors = list(self._answer(find()))
        random.shuffle(donors)
        middle = median([donor.progress for donor in donors] or [0.0])
        return sorted(donors, key=lambda donor: donor.progress < middle)

    def _fetch_first(self, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target`, and return its manifest, or None if the run begins with this
        peer.

        A peer that begins with its own weights would drag a swarm back that is already training. So this waits until a
        peer gives its state or all records have expired, because the records of dead peers remain for a while.

        Raises Left or TimedOut; Unreachable if there is a ticket but no live peer; CheckpointError if the state cannot
        be written; and ModelError if live peers train another model. The ModelError names the first tensor that
        differs.
        """
        donors, told, pause_s = self.look_around(), set[str](), ASK_AGAIN_S
        while donors or any(peer.progress > 0 for peer in self._network.live_peers.mates()):
            manifest = self._fetch_state(donors, target=target, timeout_s=FETCH_STATE_TIMEOUT_S) if donors else None
            if manifest:
                return manifest
            self._check_model(donors)  # a peer that trains another model refuses every other request
            answering = self.answering()  # where they are now, because a record can be as old as one heartbeat
            if donors and all(peer.progress == 0 for peer in answering or donors):
                return None
            why = "no live peer gives its state" if answering else "no peer of the run is answering"
            if why not in told:
                told.add(why)
                log.warning(
                    "%s%s; the run has begun, so this peer cannot start from its own weights, and waits until one does "
                    "or all records have expired",
                    why,
                    "".join(f"; {named(peer)}: {refusal}" for peer, refusal in self._refusals.items()),
                )
            if self._network.leaving.wait(pause_s):
                raise Left("asked to leave before any peer of the run gave its state")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)  # because a state that fails its checks is fetched again
            donors = self.look_around()
        if told and self._network.live_peers.stage is not None:
            raise Unreachable("the peers that held this stage are gone; restart this peer to wait for their return")
        return None

    def answering(self) -> Sequence[Candidate]:
        """Request the current status of some of this peer's possible partners, and return those that answer.

        In a run with stages, these are peers with the same stage. Unlike the directory, the result contains no dead
        peers. Raises Left.
        """
        return self._answer(self._ask_for_positions())

    async def _ask_for_positions(self) -> Sequence[Candidate]:
        return await ask_for_positions(self._network.transport, self._network.live_peers.live())

    def rescue(self, *, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target`, because this peer's own weights are lost."""
        try:
            donors = self.look_around()
            return self._fetch_state(donors, target=target, timeout_s=CATCH_UP_TIMEOUT_S)
        except (Left, Unreachable, CheckpointError, TimedOut, TimeoutError) as error:
            log.error("no live peer gave its state: %s", error)
            return None

    def catch_up(self, *, progress: float, target: Path) -> StateManifest | None:
        """Fetch the state of a live peer into `target` if most of the swarm is far ahead, and return its manifest.

        `progress` is this peer's position in the schedule. Calling this is cheap, except after a refusal. The result is
        None if the swarm is not far ahead. It is also None if no peer serves a newer state. A later call tries again.
        """
        if self._network.thread.has_stopped or time.monotonic() < self._catch_up_again_s:
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
            manifest = self._fetch_state(ahead, target=target, newer_than=progress, timeout_s=CATCH_UP_TIMEOUT_S)
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
        It does so rarely, because anybody can send such a refusal, and a later call finds the answers, because a peer
        that does not answer must not stop training. Raises Left.
        """
        live = self._network.live_peers.mates()
        if time.monotonic() >= self._ask_again_s and self._network.service.take_refused_as_stale():
            self._ask_again_s = time.monotonic() + CATCH_UP_AGAIN_S
            self._asked = self._network.thread.begin(self._ask_for_positions())
        if self._asked and self._asked.done():
            live, self._asked = self._asked.result(), None
        middle = median_low(positions(live) or [0.0])  # the median decides, so a minority has no effect, nor one of two
        if middle - progress <= self._network.spec.furthest:
            return []

        async def reach() -> Sequence[Candidate]:
            return self._network.live_peers.reached(live)

        ahead = [each for each in self._answer(reach()) if can_give(each) and each.progress >= middle]
        random.shuffle(ahead)
        return ahead

    def _answer(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a quick request on the network thread, and return the answer. Raises Left."""
        return self._network.thread.call(coroutine, ANSWER_S, leaving=self._network.leaving)

    def _fetch_state(
        self,
        donors: Sequence[Candidate],
        *,
        target: Path,
        timeout_s: float,
        newer_than: float = -math.inf,
    ) -> StateManifest | None:
        net, layout = self._network, self._layout
        check_file = partial(read_state, expected=vectors_of(net.spec.outer, layout.num_elements))
        try:
            with net.progress.task("fetching the state of the swarm", unit="bytes") as report:
                admission = Admission(
                    net.spec,
                    net.transport,
                    layout,
                    live=net.live_peers.live,
                    check_file=check_file,
                    loss_of=self._loss,
                    has_own=math.isfinite(newer_than),
                    losses=self._losses,
                )
                self._refusals = admission.refused
                fetching = fetch_state(
                    net.transport,
                    donors,
                    admission,
                    target=target,
                    newer_than=newer_than,
                    live=net.live_peers.live,
                    on_progress=report,
                )
                manifest = net.thread.call(fetching, timeout_s, leaving=net.leaving)
            if manifest is None:
                forget(target)
        except TimeoutError:
            raise TimedOut(f"the state of the swarm did not arrive within {duration(timeout_s)}") from None
        except OSError as error:
            raise CheckpointError(f"the state of the swarm cannot be written to {target}: {error}") from None
        return manifest

    def _loss(self, path: Path | None) -> float:
        """Return the loss of a state, or of the current weights, as soon as the caller has built its model.

        It is -inf if no loss is checked.
        """
        self._has_model.wait()
        return self._loss_of(path) if self._loss_of else -math.inf

    @property
    def _layout(self) -> ModelLayout:
        assert self._network.states.layout, "call `enter` first"
        return self._network.states.layout

    def _check_model(self, donors: Sequence[Candidate]) -> None:
        """Raise ModelError if the swarm trains a different model. It would then always refuse this peer."""
        for donor in donors[:DONORS_ASKED]:
            if difference := self._answer(find_difference(self._network.transport, donor, self._layout)):
                raise ModelError(
                    f"the swarm is training a different model, according to {named(donor.peer_id, donor.name)}: "
                    f"{difference}. Use the same revision, folder and versions of torch and transformers as the other "
                    "peers"
                )
