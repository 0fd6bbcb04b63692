"""Run one swap after an offer has been accepted: prepare, exchange, verify, and commit or leave no trace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from blake3 import blake3
from torch import Tensor

from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.coder import Coder, Coding, check_proposal
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
    chunk_digest,
)
from noloco_p2p.gossip.seams import FrameStream, Outside
from noloco_p2p.gossip.units import Slice

T = TypeVar("T")
F = TypeVar("F")

PATIENCE_S = 10.0  # for the partner's next header, in addition to two of its inner steps
NEARLY_OVER = 2 / 3  # of the chunks have arrived; the rest is on its way while the next swap prepares
ALIVE_PER_PROGRESS = 3  # Alive frames in the time after which a silent partner counts as gone


@dataclass(slots=True)
class Traffic:
    """Counters of all swaps of a peer, including failed ones."""

    bytes_sent: int = 0
    bytes_received: int = 0
    chunks: int = 0
    repeated_chunks: int = 0  # chunks that needed more than one pass


@dataclass(slots=True)
class Ledger:
    """How far a swap has come. A partner asks for it if the last Ready was lost."""

    verified: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """A swap on which two peers have agreed. `step_s` is the duration of the partner's inner steps.

    `told_step` is the number of inner steps that this peer had taken when the partner told its progress.
    """

    stream: FrameStream
    swap_id: bytes
    partner: str
    progress: float
    told_step: int
    step_s: float
    part: Slice


class Swap:
    """One swap.

    `snapshot` returns a copy of a slice of this peer's weights, and the number of inner steps before it. A swap holds
    `turn` from its snapshot until it has sent its first pass and received most of the partner's, so only one swap of a
    peer moves at a time, but the next one prepares while the last chunks travel. `ask_partner` returns whether the
    partner has verified the swap; it is called if the partner's Ready does not arrive.
    """

    def __init__(
        self,
        agreed: Agreed,
        coder: Coder,
        outside: Outside,
        *,
        snapshot: Callable[[Slice], Coroutine[Any, Any, tuple[Tensor, int]]],
        turn: asyncio.Lock,
        on_moving: Callable[[], Awaitable[None]],
        traffic: Traffic,
        ledger: Ledger,
        ask_partner: Callable[[], Awaitable[bool]],
    ) -> None:
        self.agreed = agreed
        self.sent_s = 0.0  # from the first chunk of each pass until the partner had the last one
        self.snapshot_step = 0
        self.is_moving = False  # whether both partners send or have sent
        self.moving_s = 0.0  # when they began
        self.cost_s = 0.0  # CPU time for coding
        self._coder = coder
        self._snapshot = snapshot
        self._turn = turn
        self._on_moving = on_moving
        self._outside = outside
        self._deadlines = outside.deadlines
        self._traffic = traffic
        self._ledger = ledger
        self._ask_partner = ask_partner
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
        try:
            await _together(self._send_passes(), self._receive_passes())
            self._ledger.verified = True
            with contextlib.suppress(Unreachable):  # the partner may still answer a question
                await self._send(Ready())
            await self._hear_ready()
        except BaseException as error:
            self._ledger.ended = True
            await self._farewell(error)
            raise
        coding = self._coding.result()
        coding.learn()
        return coding

    # sending

    async def _send_passes(self) -> None:
        part, proposal = self.agreed.part, self._coder.propose(self.agreed.part)
        if proposal:
            await self._send(Grid(proposal))
            theirs = await self._grid
        else:
            theirs = b""
        turn = asyncio.ensure_future(self._turn.acquire())
        try:
            await self._while_alive(turn)
            values, self.snapshot_step = await self._while_alive(self._snapshot(part))
            coding = Coding(self._coder, part, values, swap_id=self.agreed.swap_id, proposals=(proposal, theirs))
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
        self._traffic.chunks += len(coding.chunks)

    async def _send_pass(self, coding: Coding, number: int, indices: list[int]) -> None:
        try:
            payloads = await self._while_alive(self.elsewhere(coding.encode, number, indices))
        except ValueError as error:  # not the partner's fault
            raise Diverged(f"this peer's weights cannot be sent: {error}", peer=self.agreed.partner) from None
        digests = [chunk_digest(payload) for payload in payloads]
        num_bytes = sum(len(payload) for payload in payloads)
        await self._send(Header(number, len(indices), num_bytes, blake3(b"".join(digests)).digest()))
        await self._while_alive(self._headers.get())
        if number == 0:
            self.is_moving = True
            self.moving_s = self._loop.time()
            await self._on_moving()
        self._began_s = self._loop.time()
        for index, payload, digest in zip(indices, payloads, digests, strict=True):
            await self._send(Chunk(index, payload, digest))
            self._traffic.bytes_sent += len(payload)
        self._traffic.repeated_chunks += len(indices) if number == 1 else 0

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
            await send_within(self._deadlines.progress_s, self.agreed.stream, frame, peer=self.agreed.partner)

    # receiving

    async def _receive_passes(self) -> None:
        if self._coder.passes:
            proposal = (await self._next(Grid)).exponents
            check_proposal(self._coder, self.agreed.part, proposal)
            self._grid.set_result(proposal)
        number, indices = 0, None
        while indices is None or indices:
            header = await self._next(Header)
            self._headers.put_nowait(None)
            coding = await self._coding
            indices = [*range(len(coding.chunks))] if indices is None else indices
            payloads = await self._receive_pass(coding, number, indices, header)
            indices = await self.elsewhere(coding.check, number, indices, payloads)
            self._failed.put_nowait(indices)
            number += 1

    async def _receive_pass(self, coding: Coding, number: int, indices: Sequence[int], header: Header) -> list[Payload]:
        told = (header.number, header.num_chunks, header.num_bytes)
        expected = (number, len(indices), coding.num_bytes(number, indices))
        if told != expected:
            raise CorruptPayload(f"expected a pass of {expected}, got {told}")
        payloads, digests = [], blake3()
        for index in indices:
            chunk = await self._next(Chunk)
            if chunk.index != index:
                raise CorruptPayload(f"expected chunk {index}, got chunk {chunk.index}")
            if chunk_digest(chunk.payload) != chunk.digest:
                raise CorruptPayload(f"chunk {index} is damaged")
            digests.update(chunk.digest)
            self._traffic.bytes_received += len(chunk.payload)
            payloads.append(chunk.payload)
            if len(payloads) >= NEARLY_OVER * len(indices):
                self._nearly_over.set()
        if digests.digest() != header.digest:
            raise CorruptPayload("the chunks are not those that the header announced")
        await self._send(Received())
        return payloads

    async def _next(self, kind: type[F]) -> F:
        """Return the partner's next frame, which must be of this kind. Only a patient wait allows Alive frames."""
        until_s = self._loop.time() + PATIENCE_S + 2 * self.agreed.step_s
        while True:
            frame = await self.agreed.stream.receive(self._deadlines.progress_s)
            if isinstance(frame, kind):
                return frame
            if isinstance(frame, Abort):
                raise Ended(frame, peer=self.agreed.partner)
            if isinstance(frame, Received):
                self.sent_s += self._loop.time() - self._began_s
            elif not isinstance(frame, Alive):
                raise CorruptPayload(f"expected {kind.__name__}, got {type(frame).__name__}")
            if self._loop.time() > until_s:
                raise TimedOut("its next inner step or its link keeps this peer waiting", peer=self.agreed.partner)

    async def _hear_ready(self) -> None:
        try:
            await self._next(Ready)
        except Ended:
            raise
        except PeerError:
            # The Ready may be lost, so ask the partner once. Without an answer, nothing is committed.
            if not await self._ask_partner():
                raise

    async def _farewell(self, error: BaseException) -> None:
        if isinstance(error, CorruptPayload):
            error.peer = self.agreed.partner
        codes = {CorruptPayload: AbortCode.CORRUPT, TimedOut: AbortCode.TIMED_OUT}
        code = next((code for kind, code in codes.items() if isinstance(error, kind)), AbortCode.ABANDONED)
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
