"""Build the pipeline of a peer that holds a stage: its streams, the driver of its state machine, and its neighbours.

A replica sends to a few replicas of the next stage, and redraws one of them from time to time. A head keeps streams to
replicas of the last stage, through which its microbatches return. A head chooses only a few of them, so each replica of
the last stage also keeps streams to a few heads. All of this runs on the network thread.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from noloco_p2p.flow.head import Head
from noloco_p2p.flow.limits import MAX_SINKS
from noloco_p2p.flow.replica import Replica
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import Identity, short_id
from noloco_p2p.net.connection import Connector
from noloco_p2p.net.flow import Find, FlowLinks
from noloco_p2p.net.flow_link import PayloadSizes
from noloco_p2p.net.server import ServeFlow
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.owned_tasks import OwnedTasks
from noloco_p2p.peer.flow_driver import FlowDriver, LookFor, Work
from noloco_p2p.peer.threaded_flow import ThreadedFlow
from noloco_p2p.swarm.records import SERVING

NUM_NEIGHBOURS = 4  # replicas of the next stage to which a replica sends
NUM_HEADS = 2  # heads to which a replica of the last stage keeps a stream
LOOK_S = 2.0  # how often the live peers are checked
REDRAW_S = 60.0  # how often one neighbour is redrawn
CODING_THREADS = 2  # one decodes the next payload while the other encodes the previous result


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A peer's role in the pipeline.

    `microbatch_tokens` is the number of tokens in the loss of each microbatch. A head has `batches`.
    """

    stage: int
    num_stages: int
    machine: Head | Replica
    work: Work
    sizes: PayloadSizes
    microbatch_tokens: int
    batches: Iterator[object] | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the peer that the pipeline needs.

    `look_for` reads the record of a head again if it is not listed. `live` returns the reachable peers of all stages.
    `is_closed` returns whether no peer can dial this one, in which case it must dial all its neighbours.
    """

    identity: Identity
    spec_digest: str
    hello: Callable[[], Hello]
    connector: Connector
    find: Find
    look_for: LookFor
    live: Callable[[], Sequence[Candidate]]
    is_closed: Callable[[], bool]
    why_banned: Callable[[str], str]
    strike: Callable[[str, str], None]


class Neighbours:
    """The peers that this one sends to. They are a few random live peers, which are kept as long as they are alive."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self.chosen: tuple[str, ...] = ()
        self._rng = rng
        self._most = most

    def update(self, live: Collection[str]) -> None:
        kept = [peer for peer in self.chosen if peer in live]
        others = sorted(set(live) - set(kept))
        num_new = max(0, min(self._most - len(kept), len(others)))
        self.chosen = (*kept, *self._rng.sample(others, num_new))

    def drop_one(self) -> None:
        """Drop one neighbour. The next `update` draws a replacement, possibly the same peer."""
        if self.chosen:
            left_out = self._rng.choice(self.chosen)
            self.chosen = tuple(peer for peer in self.chosen if peer != left_out)


class StageFlow:
    """The pipeline of a peer that holds a stage."""

    def __init__(self, plan: StagePlan, around: Surroundings) -> None:
        self._plan = plan
        self._around = around
        self._executor = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="noloco-activations")
        rng = random.SystemRandom()
        self._downstream, self._upstream = Neighbours(rng, NUM_NEIGHBOURS), Neighbours(rng, NUM_NEIGHBOURS)
        self._heads, self._sinks = Neighbours(rng, NUM_HEADS), Neighbours(rng, MAX_SINKS)
        self._redraw_at_s = asyncio.get_running_loop().time() + REDRAW_S
        self._links = FlowLinks(
            around.hello,
            stage=plan.stage,
            num_stages=plan.num_stages,
            sizes=plan.sizes,
            connector=around.connector,
            find=around.find,
            why_banned=around.why_banned,
            strike=around.strike,
        )
        max_tokens = plan.microbatch_tokens
        self.driver = FlowDriver(
            plan.machine,
            self._links,
            plan.work,
            Tickets(around.identity, spec_digest=around.spec_digest, max_tokens=max_tokens),
            look_for=around.look_for,
            stage=plan.stage,
            num_stages=plan.num_stages,
            executor=self._executor,
            strike=around.strike,
            batches=plan.batches,
            microbatch_tokens=max_tokens,
        )
        self.threaded = ThreadedFlow(self.driver, asyncio.get_running_loop())
        self._tasks = OwnedTasks("the neighbours of a stage")

    @property
    def serve(self) -> ServeFlow:
        """Return the handler of streams that others open."""
        return self._links.serve

    @property
    def num_stages(self) -> int:
        return self._plan.num_stages

    @property
    def sends_to(self) -> tuple[str, ...]:
        """Return the short ids of the replicas to which microbatches are sent next."""
        return tuple(short_id(peer) for peer in self._downstream.chosen)

    def start(self) -> None:
        self.driver.start()
        self._tasks.start(self._look_after_neighbours())

    async def stop(self) -> None:
        await self._tasks.stop(grace_s=0.0)
        await self._links.stop()
        await self.driver.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _look_after_neighbours(self) -> None:
        before = None
        while True:
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._redraw_at_s:
                self._redraw_at_s = now_s + REDRAW_S
                self._downstream.drop_one()
            neighbours = self._draw()
            if neighbours != before:
                before = neighbours
                self.driver.meet(*neighbours)
            await asyncio.sleep(LOOK_S)

    def _draw(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the peers to send to, and the peers to which a stream is kept open where the pipeline closes."""
        stage, last = self._plan.stage, self._plan.num_stages - 1
        of_stage = self._taking_part()
        kept: set[str] = set()
        self._downstream.update(of_stage[(stage + 1) % (last + 1)])
        if stage == 0:
            self._sinks.update(of_stage[last])
            kept.update(self._sinks.chosen)
        if stage == last:
            self._heads.update(of_stage[0])
            kept.update(self._heads.chosen)
        if self._around.is_closed():
            self._upstream.update(of_stage[(stage - 1) % (last + 1)])
            kept.update(self._upstream.chosen)
        return frozenset(self._downstream.chosen), frozenset(kept)

    def _taking_part(self) -> defaultdict[int, set[str]]:
        """Return, by stage, the live peers that take part in the pipeline.

        A peer that cannot be dialled takes part while it has a stream to this peer.
        """
        streams, found = self._links.stages, defaultdict[int, set[str]](set)
        for peer in self._around.live():
            if peer.state in SERVING and (peer.can_be_called or peer.peer_id in streams):
                found[peer.stage].add(peer.peer_id)
        return found
