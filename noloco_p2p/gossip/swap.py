"""Run one swap after an offer has been accepted: prepare, exchange, verify, and commit or leave no trace."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.coder import Coder, Coding, check_proposal
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import (
    Abort,
    AbortCode,
    Alive,
    Chunk,
    Frame,
    Grid,
    Header,
    Payload,
    Ready,
    Received,
    Slice,
    Standing,
    pass_digest,
)
from noloco_p2p.gossip.seams import FrameStream, Outside

T = TypeVar("T")
F = TypeVar("F")

PATIENCE_S = 10.0  # for the partner's next header, in addition to two of its inner steps
MOST_STEPS = 10  # of this peer: the longest inner step of a partner that this peer waits for, if it takes longer than
MOST_STEP_S = 10.0
REMEMBERED_SWAPS = 64
NEARLY_OVER = 2 / 3  # of the chunks have arrived; the rest is on its way while the next swap prepares
ALIVE_PER_PROGRESS = 3  # Alive frames in the time after which a silent partner counts as gone


@dataclass(slots=True)
class Counts:
    """What a peer counts over all its swaps, including failed ones, and the last failure of another peer."""

    swaps: int = 0  # that were committed
    bytes_sent: int = 0
    bytes_received: int = 0
    chunks: int = 0
    repeated_chunks: int = 0  # chunks that needed more than one pass
    failures: Counter[str] = field(default_factory=Counter)  # failed swaps, by kind
    refused: Counter[str] = field(default_factory=Counter)  # offers of other peers, by reason
    last_failure: str = ""
    failed_at_s: float = 0.0  # when that was, on the clock of the loop
    refused_as_stale: bool = False  # since somebody asked


class Shared:
    """What the swaps of a peer share.

    A swap holds `turn` from its snapshot until it has sent its first pass and received most of the partner's, so only
    one swap of a peer moves at a time, but the next one prepares while the last chunks travel. `changed` is notified
    when a swap begins to move, and when it ends. `verified` holds the swaps that this peer has verified, and whether it
    may still commit them. A partner asks for this if the last Ready was lost.
    """

    def __init__(self, exchange: Exchange, coder: Coder, outside: Outside, counts: Counts) -> None:
        self.exchange = exchange
        self.coder = coder
        self.outside = outside
        self.counts = counts
        self.turn = asyncio.Lock()
        self.changed = asyncio.Condition()
        self.verified: OrderedDict[bytes, bool] = OrderedDict()

    async def tell_change(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Swap:
    """One swap on which two peers have agreed.

    `theirs` is what the partner told about itself when this peer had taken `told_step` inner steps.
    """

    def __init__(
        self,
        shared: Shared,
        stream: FrameStream,
        swap_id: bytes,
        *,
        partner: str,
        theirs: Standing,
        part: Slice,
        told_step: int,
    ) -> None:
        own_step_s = shared.exchange.step_s
        self.stream = stream
        self.partner = partner
        self.part = part
        self.told_step = told_step
        self.progress = theirs.progress  # of the partner
        self.swap_id = swap_id
        self.sent_s = 0.0  # from the first chunk of each pass until the partner had the last one
        self.snapshot_step = 0
        self.is_moving = False  # whether both partners send or have sent
        self.moving_s = 0.0  # when they began
        self.first_s = math.inf  # since when no other swap of this peer comes before this one
        self.cost_s = 0.0  # CPU time for coding
        # how long a wait for the partner's next header may take
        self._patience_s = PATIENCE_S + 2 * min(max(0.0, theirs.step_s), max(MOST_STEP_S, MOST_STEPS * own_step_s))
        self._shared = shared
        self._turn = shared.turn
        self._counts = shared.counts
        self._coder = shared.coder
        self._outside = shared.outside
        self._deadlines = shared.outside.deadlines
        self._loop = asyncio.get_running_loop()
        self._began_s = 0.0  # when the first chunk of this pass was sent
        self._writing = asyncio.Lock()  # a stream supports one writer, but Alive and Abort come from elsewhere
        self._coding: asyncio.Future[Coding] = self._loop.create_future()
        self._grid: asyncio.Future[bytes] = self._loop.create_future()
        self._headers: asyncio.Queue[None] = asyncio.Queue()  # the partner's headers that have arrived
        self._nearly_over = asyncio.Event()
        self._failed: asyncio.Queue[list[int]] = asyncio.Queue()  # the chunks that failed in each pass

    async def run(self) -> Coding:
        """Swap, and return the verified coding, whose half-differences may be applied.

        Raises PeerError if nothing was committed. The partner then commits nothing either, unless it is already
        unreachable after it has verified everything.
        """
        verified = self._shared.verified
        try:
            await _together(self._send_passes(), self._receive_passes())
            verified[self.swap_id] = True
            if len(verified) > REMEMBERED_SWAPS:
                verified.popitem(last=False)
            with contextlib.suppress(Unreachable):  # the partner may still answer a question
                await self._send(Ready())
            await self._hear_ready()
        except BaseException as error:
            if self.swap_id in verified:
                verified[self.swap_id] = False
            await self._farewell(error)
            raise
        coding = self._coding.result()
        coding.learn()
        return coding

    # sending

    async def _send_passes(self) -> None:
        proposal = self._coder.propose(self.part)
        if proposal:
            await self._send(Grid(proposal))
            theirs = await self._grid
        else:
            theirs = b""
        turn = asyncio.ensure_future(self._turn.acquire())
        try:
            await self._while_alive(turn)
            values, self.snapshot_step = await self._while_alive(self.snapshot())
            coding = Coding(self._coder, self.part, values, swap_id=self.swap_id, proposals=(proposal, theirs))
            self._coding.set_result(coding)
            indices = [*range(len(coding.chunks))]
            await self._send_pass(coding, 0, indices)
            await self._while_alive(self._nearly_over.wait())
        finally:
            if not turn.cancelled():  # it may have been acquired when the swap failed
                self._turn.release()
        number = 0
        while indices := await self._while_alive(self._failed.get()):
            number += 1
            await self._send_pass(coding, number, indices)
        self._counts.chunks += len(coding.chunks)

    async def _send_pass(self, coding: Coding, number: int, indices: list[int]) -> None:
        def encode() -> tuple[list[Payload], bytes]:
            payloads = coding.encode(number, indices)
            return payloads, pass_digest(self._outside.hello().peer_id, payloads)

        try:
            payloads, digest = await self._while_alive(self.elsewhere(encode))
        except ValueError as error:  # not the partner's fault
            raise Diverged(f"this peer's weights cannot be sent: {error}", peer=self.partner) from None
        await self._send(Header(digest))
        await self._while_alive(self._headers.get())
        if number == 0:
            self.is_moving = True
            self.moving_s = self._loop.time()
            await self._shared.tell_change()
        self._began_s = self._loop.time()
        for payload in payloads:
            await self._send(Chunk(payload))
            self._counts.bytes_sent += len(payload)
        self._counts.repeated_chunks += len(indices) if number == 1 else 0

    async def snapshot(self) -> tuple[Tensor, int]:
        """Return a copy of this peer's slice, and the number of inner steps before it."""
        exchange, start_stop = self._shared.exchange, self._coder.units.bounds(self.part)
        if exchange.read:
            step = exchange.step
            return await self._loop.run_in_executor(self._outside.executor, exchange.read, *start_stop), step
        return await exchange.snapshot(self.part)

    async def _while_alive(self, work: Awaitable[T]) -> T:
        """Await `work`, and tell the partner meanwhile that this peer is alive."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._deadlines.progress_s / ALIVE_PER_PROGRESS))[0]:
                await self._send(Alive())
            return task.result()
        finally:
            await _end({task})

    async def elsewhere(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` on another thread, and count its CPU time as a cost of this swap."""

        def timed() -> T:
            began_s = self._outside.cpu_clock()
            try:
                return function(*arguments)
            finally:
                self.cost_s += self._outside.cpu_clock() - began_s

        return await self._loop.run_in_executor(self._outside.executor, timed)

    async def _send(self, frame: Frame) -> None:
        async with self._writing:
            await send_within(self._deadlines.progress_s, self.stream, frame, peer=self.partner)

    # receiving

    async def _receive_passes(self) -> None:
        if self._coder.passes:
            proposal = (await self._next(Grid)).exponents
            check_proposal(self._coder, self.part, proposal)
            self._grid.set_result(proposal)
        number, indices = 0, None
        while indices is None or indices:
            header = await self._next(Header)
            self._headers.put_nowait(None)
            coding = await self._coding
            indices = [*range(len(coding.chunks))] if indices is None else indices
            payloads = await self._receive_pass(coding, number, indices)
            if await self.elsewhere(pass_digest, self.partner, payloads) != header.digest:
                raise CorruptPayload("the chunks are not those that the header announced")
            indices = await self.elsewhere(coding.check, number, indices, payloads)
            self._failed.put_nowait(indices)
            number += 1

    async def _receive_pass(self, coding: Coding, number: int, indices: Sequence[int]) -> list[Payload]:
        payloads: list[Payload] = []
        for index in indices:
            chunk = await self._next(Chunk)
            if len(chunk.payload) != (expected := coding.num_bytes(number, index)):
                raise CorruptPayload(f"chunk {index} has {len(chunk.payload)} bytes instead of {expected}")
            self._counts.bytes_received += len(chunk.payload)
            payloads.append(chunk.payload)
            if len(payloads) >= NEARLY_OVER * len(indices):
                self._nearly_over.set()
        await self._send(Received())
        return payloads

    async def _next(self, kind: type[F]) -> F:
        """Return the partner's next frame, which must be of this kind. Only a patient wait allows Alive frames."""
        until_s = self._loop.time() + self._patience_s
        while True:
            frame = await self.stream.receive(self._deadlines.progress_s)
            if isinstance(frame, kind):
                return frame
            if isinstance(frame, Abort):
                raise Ended(frame, peer=self.partner)
            if isinstance(frame, Received):
                self.sent_s += self._loop.time() - self._began_s
            elif not isinstance(frame, Alive):
                raise CorruptPayload(f"expected {kind.__name__}, got {type(frame).__name__}")
            if self._loop.time() > until_s:
                raise TimedOut("its next inner step or its link keeps this peer waiting", peer=self.partner)

    async def _hear_ready(self) -> None:
        try:
            await self._next(Ready)
        except Ended:
            raise
        except PeerError:
            # The Ready may be lost, so ask the partner once. Without an answer, nothing is committed.
            if not await self._has_partner_verified():
                raise

    async def _has_partner_verified(self) -> bool:
        """Ask the partner over a new connection."""
        outside, timeout_s = self._outside, self._deadlines.status_s
        candidate = await outside.directory.find(self.partner, timeout_s=timeout_s)
        if candidate is None:
            return False
        with contextlib.suppress(PeerError):
            answer = await outside.transport.status(candidate, swap_id=self.swap_id, timeout_s=timeout_s)
            return answer.has_verified
        return False

    async def _farewell(self, error: BaseException) -> None:
        if isinstance(error, CorruptPayload):
            error.peer, code = self.partner, AbortCode.CORRUPT
        else:
            code = AbortCode.TIMED_OUT if isinstance(error, TimedOut) else AbortCode.ABANDONED
        with contextlib.suppress(PeerError, TimeoutError):  # the partner is gone
            sentence = str(error) if isinstance(error, PeerError) else "this peer ended the swap"
            await asyncio.wait_for(self._send(Abort(code, sentence)), self._deadlines.farewell_s)


async def send_within(timeout_s: float, stream: FrameStream, frame: Frame, *, peer: str) -> None:
    """Send a frame. Raises TimedOut if the peer does not let it through, and the errors of `send`."""
    try:
        async with asyncio.timeout(timeout_s):
            await stream.send(frame)
    except TimeoutError:
        raise TimedOut(f"it did not read a frame for {timeout_s:.0f} s", peer=peer) from None


class Diverged(PeerError):
    """This peer's weights are not finite."""


class Ended(Unreachable):
    """The partner sent Abort, so it will not commit."""

    def __init__(self, abort: Abort, *, peer: str) -> None:
        super().__init__(f"the partner ended the swap ({abort.code.name}): {abort.sentence}", peer=peer)
        self.code = abort.code


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines at the same time. If one fails, end the others, and raise its error.

    If several fail at once, a partner's Abort is raised first, because it says more than a broken connection.
    """
    tasks = {asyncio.ensure_future(coroutine) for coroutine in coroutines}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in done if (error := task.exception())]
        for error in sorted(errors, key=lambda error: not isinstance(error, Ended)):
            raise error
    finally:
        await _end(tasks)


async def _end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
