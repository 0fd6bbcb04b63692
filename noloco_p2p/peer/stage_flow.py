"""Run the pipeline of a peer that holds a stage: `flow/` on the network thread, next to the thread that computes.

The computing thread is the only one that touches weights. While it computes, other threads decode the input of the next
task and encode the result of the previous one, so it waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from noloco_p2p.errors import NotFinite, PeerError, Refused
from noloco_p2p.flow.frames import Backward, Forward, Frame, Mark, Want
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.neighbours import Neighbours
from noloco_p2p.flow.node import Task
from noloco_p2p.flow.replica import Replica
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.identity import short_id
from noloco_p2p.net.flow import FlowLinks
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.owned_tasks import OwnedTasks
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.swarm.records import SERVING

P = ParamSpec("P")
T = TypeVar("T")

CODING_THREADS = 2  # one decodes the next input while the other encodes the previous result
MAX_DROPPED = 16  # consecutive forwards from one neighbour; an honest neighbour sends only after a Credit


class Work(Protocol):
    """The computations of a stage, as in `trainer.stage_work.StageLoop`.

    `compute` and `close_step` run on the computing thread, and the others on any thread. `flow.node.Computer` explains
    them.
    """

    @property
    def forward_bytes(self) -> int: ...

    @property
    def backward_bytes(self) -> int: ...

    def check(self, payload: memoryview, *, is_backward: bool) -> None: ...

    def decoded(self, task: Task) -> Task: ...

    def compute(self, task: Task) -> object: ...

    def encoded(self, kind: Kind, values: Any) -> memoryview: ...

    def close_step(self, num_tokens: int, progress: float | None) -> float: ...


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A peer's role in the pipeline. `num_rooms` comes from `flow.limits`. A head has `batches`."""

    spec: TrainerSpec
    stage: int
    work: Work
    num_rooms: int
    progress: float
    batches: Iterator[object] | None = None


class FlowCounts(NamedTuple):
    """Counts of microbatches.

    `late` counts the microbatches in `done` whose forward pass was in an earlier inner step. `held` is the number held
    now.
    """

    done: int
    lost: int
    late: int
    held: int


class TurnExecutor(Executor):
    """Runs functions on the thread that calls `turn`, in order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    def turn(self, wait_s: float) -> bool:
        """Run the next function, and return False if there is none within `wait_s`.

        Any error except PeerError is raised here, too.
        """
        try:
            future, function = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return False
        if not future.set_running_or_notify_cancel():
            return True
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, PeerError):
                raise
        return True


class StageFlow:
    """The pipeline of a peer that holds a stage.

    `look_for` reads the record of a head again if it is not listed in `heads`. A replica waits for it before it handles
    a ticket of that head, because a record reaches it later than the first microbatch may. `live` returns the reachable
    peers of all stages. `is_closed` returns whether no peer can dial this one, in which case it must dial all its
    neighbours. `strike` is called with a peer that misbehaved and a description of what it did.

    The computing thread calls `turn` and the methods that follow it. The others belong to the network thread.
    """

    def __init__(
        self,
        plan: StagePlan,
        links: FlowLinks,
        tickets: Tickets,
        *,
        peer_id: str,
        heads: Container[str],
        look_for: Callable[[str], Awaitable[None]],
        live: Callable[[], Sequence[Candidate]],
        is_closed: Callable[[], bool] = lambda: False,
        strike: Callable[[str, str], None],
    ) -> None:
        spec, rng = plan.spec, random.SystemRandom()
        self.stage, self.num_stages = plan.stage, spec.pipeline.stages
        tokens = spec.data.sequence_length - 1
        shared: dict[str, Any] = {
            "num_stages": spec.pipeline.stages,
            "batch_tokens": spec.train.batch_size * tokens,
            "rng": rng,
            "rule": spec.pipeline.routing,
            "progress": plan.progress,
        }
        self.node: Head | Replica
        if plan.stage == 0:
            self.node = Head(
                links,
                self,
                peer_id=peer_id,
                max_in_flight=plan.num_rooms,
                microbatch_tokens=spec.pipeline.microbatch * tokens,
                next_microbatch=self._next_microbatch,
                first_number=int(1000 * time.time()),
                sign=tickets.signed,
                **shared,
            )
        else:
            self.node = Replica(links, self, stage=plan.stage, heads=heads, num_rooms=plan.num_rooms, **shared)
        self._links, self._tickets, self._work = links, tickets, plan.work
        self._look_for, self._live, self._strike = look_for, live, strike
        self._batches: Iterator[object] = plan.batches or iter(())
        self._loop = asyncio.get_running_loop()
        self._coding = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="noloco-activations")
        self._computing = TurnExecutor()
        self._neighbours = Neighbours(
            self.node,
            links,
            stage=self.stage,
            num_stages=self.num_stages,
            live=self._taking_part,
            is_closed=is_closed,
            rng=rng,
        )
        self._num_dropped = Counter[str]()
        self._tasks = OwnedTasks("the neighbours of a stage")
        links.neighbourhood = self

    def start(self) -> None:
        self.node.start()
        self._tasks.start(self._neighbours.look_after())

    async def stop(self) -> None:
        await self._tasks.stop(grace_s=0.0)
        await self._links.stop()
        await self.node.stop()
        self._coding.shutdown(wait=False, cancel_futures=True)

    @property
    def sends_to(self) -> tuple[str, ...]:
        """Return the short ids of the replicas to which microbatches are sent next."""
        return tuple(short_id(peer) for peer in self._neighbours.downstream.chosen)

    # the computing thread

    def turn(self, wait_s: float) -> bool:
        """Compute the next task, and return False if there is none within `wait_s`.

        A neighbour's fault never raises an error here. Raises any error of a head's data source.
        """
        return self._computing.turn(wait_s)

    @property
    def is_over(self) -> bool:
        """Whether, as far as is known, no head is training any more and nothing is left to compute."""
        return self.node.is_over

    @property
    def is_idle(self) -> bool:
        """Whether no microbatch is held or in flight."""
        return self.node.is_idle

    @property
    def counts(self) -> FlowCounts:
        """The counts of microbatches since the start."""
        return FlowCounts(self.node.num_done, self.node.num_lost, self.node.num_late, self.node.num_held)

    def leave(self) -> None:
        """Stop launching and accepting microbatches.

        Once the held microbatches are finished, `is_idle` becomes true.
        """
        self._tell(self.node.leave)

    def rejoin(self) -> None:
        """Take part again after `leave`."""
        self._tell(self.node.rejoin)

    def evaluate(self, microbatches: Collection[object]) -> None:
        """Let a head send these microbatches through the pipeline before any others, without gradients."""
        assert isinstance(self.node, Head)
        self._tell(partial(self.node.evaluate, microbatches))

    def _tell(self, function: Callable[[], None]) -> None:
        """Call a function on the network thread without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    # the `Computer` of the node

    async def compute(self, task: Task) -> object:
        inputs = await self._elsewhere(partial(self._work.decoded, task))
        return await self._loop.run_in_executor(self._computing, self._work.compute, inputs)

    async def encoded(self, kind: Kind, result: object) -> object:
        return await self._elsewhere(partial(self._work.encoded, kind, result))

    async def close_step(self, num_tokens: int, progress: float | None) -> float:
        return await self._loop.run_in_executor(self._computing, self._work.close_step, num_tokens, progress)

    async def _next_microbatch(self) -> object:
        try:
            return await self._elsewhere(lambda: next(self._batches, None))
        except Exception as error:  # noqa: BLE001 - raised again on the computing thread
            self._computing.submit(_raise, error)
            return None

    def _elsewhere(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._coding, function)

    # the streams to neighbours

    def opened(self, peer: str) -> None:
        self.node.opened(peer)

    def closed(self, peer: str) -> None:
        self._num_dropped.pop(peer, None)
        self.node.closed(peer)

    async def checked(self, peer: str, frame: Frame) -> Frame:
        """Check a frame and return it. If the payload contains non-finite values, it is removed, and the peer gets a
        strike.

        Raises CorruptPayload for damage that the network cannot cause.
        """
        if isinstance(frame, Want | Mark):
            self._tickets.check(frame.ticket)
            if self.stage > 0:
                await self._look_for(frame.ticket.id.head)
        elif isinstance(frame, Forward | Backward) and frame.payload is not None:
            payload = frame.payload
            assert isinstance(payload, memoryview)
            try:
                await self._elsewhere(partial(self._work.check, payload, is_backward=isinstance(frame, Backward)))
            except NotFinite as error:
                self._strike(peer, str(error))
                return replace(frame, payload=None)
        return frame

    def received(self, peer: str, frame: Frame) -> None:
        is_expected = self.node.received(peer, frame)
        if not isinstance(frame, Forward):
            return
        self._num_dropped[peer] = 0 if is_expected else self._num_dropped[peer] + 1
        if self._num_dropped[peer] > MAX_DROPPED:
            sentence = f"it sent {MAX_DROPPED} forward frames without a reservation"
            self._strike(peer, sentence)
            self._loop.call_soon(self._links.drop, peer, Refused(sentence, peer=peer))

    def _taking_part(self) -> dict[int, list[str]]:
        """Return, by stage, the live peers that take part in the pipeline.

        A peer that cannot be dialled takes part while it has a stream to this peer.
        """
        streams, of_stage = self._links.stages, defaultdict[int, list[str]](list)
        for peer in self._live():
            if peer.state in SERVING and (peer.can_be_called or peer.peer_id in streams):
                of_stage[peer.stage].append(peer.peer_id)
        return of_stage


def _raise(error: Exception) -> None:
    raise error
