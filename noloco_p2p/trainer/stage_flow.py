"""Run the pipeline of a peer that holds a stage: `flow/` on the network thread, next to the thread that computes.

The computing thread is the only one that touches weights. While it computes, other threads decode the input of the next
task and encode the result of the previous one, so it waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from noloco_p2p.errors import NotFinite, PeerError
from noloco_p2p.flow.frames import Backward, Forward, Frame, Mark, Want
from noloco_p2p.flow.head import Head
from noloco_p2p.flow.node import Task
from noloco_p2p.flow.replica import Replica
from noloco_p2p.flow.rooms import Kind
from noloco_p2p.identity import short_id
from noloco_p2p.net.connection import Connector
from noloco_p2p.net.flow import FlowLinks
from noloco_p2p.net.tickets import Tickets
from noloco_p2p.peer.network import Network
from noloco_p2p.swarm.records import SERVING
from noloco_p2p.trainer.stage_work import StageLoop

P = ParamSpec("P")
T = TypeVar("T")

CODING_THREADS = 2  # one decodes the next input while the other encodes the previous result


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
    """The pipeline of a peer that holds a stage, as its `network` sees it. It is the `Computer` of its node.

    `num_rooms` comes from `flow.limits`, and `progress` is the position of this peer in the schedule. A head has
    `batches` and `first_number`. If a head is not listed in the directory, a replica looks for its record before it
    handles a ticket of that head, because a record reaches it later than the first microbatch may.

    The computing thread calls `turn` and `tell`, and reads the counts of `node`. The other methods belong to the
    network thread.
    """

    def __init__(
        self,
        network: Network,
        work: StageLoop,
        *,
        num_rooms: int,
        progress: float,
        batches: Iterator[object] | None,
        first_number: int,
    ) -> None:
        spec, bans, peer_id = work.spec, network.bans, network.identity.peer_id
        self.stage, self.num_stages = work.stage.index, spec.pipeline.stages
        max_tokens = spec.pipeline.microbatch * (spec.data.sequence_length - 1)
        guard = network.directory.node.guard
        self.links = FlowLinks(
            network.hello,
            Tickets(network.identity, spec_digest=spec.digest(), max_tokens=max_tokens),
            stage=self.stage,
            num_stages=self.num_stages,
            forward_bytes=work.forward_bytes,
            backward_bytes=work.backward_bytes,
            connector=Connector(network.session, network.limits, why_banned=bans.why, guard=guard),
            find=network.live_peers.find,
            check=self._check,
            strike=bans.strike,
            why_banned=bans.why,
        )
        rng = random.SystemRandom()
        self.node: Head | Replica
        if self.stage == 0:
            self.node = Head(
                spec,
                self.links,
                self,
                peer_id=peer_id,
                num_rooms=num_rooms,
                first_number=first_number,
                rng=rng,
                progress=progress,
            )
        else:
            self.node = Replica(
                spec,
                self.links,
                self,
                stage=self.stage,
                heads=network.live_peers.heads,
                num_rooms=num_rooms,
                rng=rng,
                progress=progress,
            )
        self.links.node = self.node
        self._network, self._work = network, work
        self._batches: Iterator[object] = batches or iter(())
        self._loop = asyncio.get_running_loop()
        self._coding = ThreadPoolExecutor(CODING_THREADS, thread_name_prefix="noloco-activations")
        self._computing = TurnExecutor()

    def start(self) -> None:
        self.node.start()
        self.node.follow(self._taking_part, self._network.reachability.is_closed)

    async def stop(self) -> None:
        await self.links.stop()
        await self.node.stop()
        self._coding.shutdown(wait=False, cancel_futures=True)

    @property
    def sends_to(self) -> tuple[str, ...]:
        """Return the short ids of the replicas to which microbatches are sent next."""
        return tuple(short_id(peer) for peer in self.node.downstream.chosen)

    def turn(self, wait_s: float) -> bool:
        """Compute the next task, and return False if there is none within `wait_s`.

        A neighbour's fault never raises an error here. Raises any error of a head's data source.
        """
        return self._computing.turn(wait_s)

    def tell(self, function: Callable[[], None]) -> None:
        """Call a method of the node on the network thread, without waiting for it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    # what the node asks for

    async def next_microbatch(self) -> object:
        try:
            return await self._elsewhere(lambda: next(self._batches, None))
        except Exception as error:  # noqa: BLE001 - raised again on the computing thread
            self._computing.submit(_raise, error)
            return None

    async def compute(self, task: Task) -> object:
        inputs = await self._elsewhere(partial(self._work.decoded, task))
        return await self._loop.run_in_executor(self._computing, self._work.compute, inputs)

    async def encoded(self, kind: Kind, result: object) -> object:
        assert isinstance(result, Tensor)
        return await self._elsewhere(partial(self._work.encoded, kind, result))

    async def close_step(self, num_tokens: int, progress: float | None) -> float:
        return await self._loop.run_in_executor(self._computing, self._work.close_step, num_tokens, progress)

    def _elsewhere(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._coding, function)

    # neighbours

    async def _check(self, peer: str, frame: Frame) -> Frame:
        """Check a frame and return it. If the payload contains non-finite values, it is removed, and the peer gets a
        strike.

        Raises CorruptPayload for damage that the network cannot cause.
        """
        if isinstance(frame, Want | Mark) and self.stage > 0:
            await self._network.live_peers.heads.look_for(frame.ticket.id.head)
        if isinstance(frame, Forward | Backward) and frame.payload is not None:
            payload = frame.payload
            assert isinstance(payload, memoryview)
            try:
                await self._elsewhere(partial(self._work.check, payload, is_backward=isinstance(frame, Backward)))
            except NotFinite as error:
                self._network.bans.strike(peer, str(error))
                return replace(frame, payload=None)
        return frame

    def _taking_part(self) -> dict[int, list[str]]:
        """Return, by stage, the live peers that take part in the pipeline.

        A peer that cannot be dialled takes part while it has a stream to this peer.
        """
        streams, of_stage = self.links.stages, defaultdict[int, list[str]](list)
        for peer in self._network.live_peers.reached():
            if peer.state in SERVING and (peer.can_be_called or peer.peer_id in streams):
                of_stage[peer.stage].append(peer.peer_id)
        return of_stage


def _raise(error: Exception) -> None:
    raise error
