"""This module runs one swap with one partner after an offer has been accepted.

Both directions use the same stream at the same time.

Each part goes through three steps: stage, verify and commit. A peer verifies the order, length, digest and finiteness
of all sections of the part. Then it sends Ready, and once it has also received Ready, it commits the part. Nothing is
applied here, and received sections stay encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec import num_chunks, section_bytes
from noloco_p2p.codec.dither import dither_seed
from noloco_p2p.codec.modulo import Bounds, agree
from noloco_p2p.codec.modulo import Grid as AgreedGrid
from noloco_p2p.errors import CorruptPayload, NotFinite, PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import (
    Abort,
    AbortCode,
    Chunk,
    End,
    Frame,
    Grid,
    Header,
    Part,
    Payload,
    Ready,
    SectionName,
    SwapState,
)
from noloco_p2p.gossip.outcome import Traffic
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.pipeline import Beside, CheckBehind, Staged, code_ahead
from noloco_p2p.gossip.seams import FrameStream
from noloco_p2p.gossip.sections import Coding, Kept, SectionPair, SectionPlan, Squares

ALIVE_PER_PROGRESS = 4  # keep-alive frames sent per `progress_s`; silence for that long ends a swap
Again = tuple[Coding, Sequence[int]]  # chunks that failed or are sent again: their encoding and their indices
RECEIVE_TIMEOUT_S = 86_400.0  # never reached, because the progress timer or the owner of the swap ends the swap first


class Ledger:
    """The progress of a swap. It is small enough to be kept after the swap and its payloads have been freed."""

    def __init__(self) -> None:
        self.verified: set[Part] = set()
        self.committed: set[Part] = set()
        self.has_ended = False  # if true, nothing more is committed

    def state(self) -> SwapState:
        """Return the state to report to the partner. If the swap has ended, only committed parts count as verified."""
        verified = self.committed if self.has_ended else self.verified
        return SwapState(known=True, verified=tuple(verified), committed=tuple(self.committed))


class Swap:
    """A swap with one partner. `run` calls `on_commit` on the event loop at the moment when a part is committed."""

    def __init__(
        self,
        stream: FrameStream,
        *,
        swap_id: bytes,
        partner: str,
        plans: Sequence[SectionPlan],
        early_state: Mapping[SectionName, Tensor],
        bounds: Mapping[SectionName, Bounds],
        staged: Staged,
        executor: Executor,
        memory: PayloadMemory,
        traffic: Traffic,
        on_commit: Callable[[Swap, Part], None],
        ask_partner: Callable[[str, bytes], Awaitable[SwapState]],
        deadlines: Deadlines,
    ) -> None:
        self.swap_id = swap_id
        self.partner = partner
        self.ledger = Ledger()
        self.bytes_sent = 0
        self.bytes_received = 0
        self.partner_staged_s: float | None = None  # when its late part began to arrive, on the loop's clock
        self._stream = stream
        self._plans = plans
        self._early_state = early_state
        self._bounds = bounds
        self._proposals = {name: each.propose() for name, each in bounds.items()}
        self._staged = staged
        self._executor = executor
        self._traffic = traffic
        self._on_commit = on_commit
        self._ask_partner = ask_partner
        self._deadlines = deadlines
        self._codings: dict[SectionName, asyncio.Future[Coding]] = {}
        self._own: dict[SectionName, list[Kept | None]] = {  # sections of the early part; None = not encoded yet
            plan.name: [None] * num_chunks(plan.num_elements) for plan in plans if plan.part is Part.EARLY
        }
        self._theirs: dict[SectionName, list[Payload]] = {}
        # The expected sizes. They become exact once the grids are agreed, and grow if chunks are sent again.
        self._num_bytes = {plan.name: plan.num_bytes for plan in plans}
        self._squares = Squares()  # of the outer gradients
        sizes = {plan.name: section_bytes(plan.codec, plan.num_elements) for plan in plans}
        # The outer gradient needs no memory here, because it is already staged.
        self._own_slabs = {name: memory.take(size if name in early_state else 0) for name, size in sizes.items()}
        self._their_slabs = {name: memory.take(size) for name, size in sizes.items()}
        self._partner_ready: set[Part] = set()
        self._parts = [part for part in Part if self._plans_of(part)]
        self._sent = {part: asyncio.Event() for part in self._parts}
        self._send_lock = asyncio.Lock()
        self._early_done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for plan in plans:
            self._codings[plan.name] = self._loop.create_future()
            if not plan.modulo:
                self._codings[plan.name].set_result(Coding(plan))
        self._again: asyncio.Queue[Sequence[Again]] = asyncio.Queue()
        self._abandoned: asyncio.Future[None] = self._loop.create_future()
        self._timer = asyncio.timeout(None)

    def pair(self, name: SectionName) -> SectionPair:
        """Return both partners' encoded vectors of a section. Call this once, after its part was committed.

        The swap drops its references to the vectors. A swap can outlive its round, but the next swap needs the memory.
        """
        assert self._plan(name).part in self.ledger.committed, (name, self.ledger.committed)
        for slabs in (self._own_slabs, self._their_slabs):
            slabs.pop(name)
        own = self._own.pop(name, self._staged.chunks)
        return SectionPair(self._codings[name].result(), own, self._theirs.pop(name), self._squares)

    def pairs(self) -> dict[SectionName, SectionPair]:
        return {plan.name: self.pair(plan.name) for plan in self._plans if plan.part in self.ledger.committed}

    def num_bytes(self, part: Part) -> int:
        """Return the known size of a part in each direction. The size includes chunks that are sent again."""
        return sum(self._num_bytes[plan.name] for plan in self._plans if plan.part is part)

    @property
    def waits(self) -> bool:
        """Return whether the early part is committed and neither partner has begun its late part."""
        has_begun = self.partner_staged_s is not None or bool(self._staged.chunks)
        return Part.EARLY in self.ledger.committed and not has_begun

    @property
    def bytes_moved(self) -> int:
        """The payload bytes transferred so far in the slower direction."""
        return min(self.bytes_sent, self.bytes_received)

    def abandon(self, reason: PeerError) -> None:
        """End the swap from outside, so that nothing more is committed and `run` raises `reason`.

        The call has no effect after the swap has ended.
        """
        self.ledger.has_ended = True
        if not self._abandoned.done():
            self._abandoned.set_exception(reason)
            self._abandoned.exception()  # retrieved here, because `run` may already have returned

    async def run(self) -> None:
        """Run the swap until all parts are committed.

        Raises PeerError if the swap fails; the ledger shows its progress.
        """
        sender = asyncio.create_task(self._send_parts())
        receiver = asyncio.create_task(self._receive_parts())
        alive = asyncio.create_task(self._keep_alive())
        try:
            async with self._timer:
                self._progress()
                await self._both_ways(sender, receiver)
        except TimeoutError:
            if await self._committed_after_silence():
                return
            fault: PeerError = TimedOut(f"no progress for {self._deadlines.progress_s:g} s", peer=self.partner)
            await self._farewell(AbortCode.TIMED_OUT, fault)
            raise fault from None
        except CorruptPayload as error:
            self._traffic.refused_not_finite += isinstance(error, NotFinite)
            await self._farewell(AbortCode.CORRUPT, error)
            raise
        except _Abandoned as error:
            await self._farewell(AbortCode.ABANDONED, error.reason)
            raise error.reason from None
        finally:
            # This must come after the Abort, because a cancelled read or write may end the whole stream.
            self.ledger.has_ended = True
            for task in (sender, receiver, alive):
                task.cancel()
            await asyncio.gather(sender, receiver, alive, return_exceptions=True)
            await self._stream.close()

    async def _both_ways(self, sender: asyncio.Task[None], receiver: asyncio.Task[None]) -> None:
        pending: set[asyncio.Future[None]] = {sender, receiver}
        while pending:
            done, _ = await asyncio.wait({*pending, self._abandoned}, return_when=asyncio.FIRST_COMPLETED)
            if self._abandoned in done:
                reason = self._abandoned.exception()
                assert isinstance(reason, PeerError)
                raise _Abandoned(reason)
            pending -= done
            if sender in done and isinstance(sender.exception(), Unreachable):
                # The receiver may have the partner's Abort, which is more informative than a broken connection.
                await asyncio.wait({receiver}, timeout=self._deadlines.farewell_s)
                if receiver.done():
                    receiver.result()
            for task in done:
                task.result()

    # sending

    async def _send_parts(self) -> None:
        for name, proposal in self._proposals.items():
            await self._send(Grid(name, proposal))
        for part in self._parts:
            for plan in self._plans_of(part):
                coding = await self._codings[plan.name]
                await self._send_section(coding, range(num_chunks(plan.num_elements)))
            if part is Part.EARLY:
                while again := await self._again.get():
                    for coding, indices in again:
                        await self._send_section(coding, indices)
            self._sent[part].set()
            self._progress()
            if part is Part.EARLY:
                await self._early_done.wait()  # so that frames of the two parts are not mixed on the stream
                self._progress()

    async def _send_section(self, coding: Coding, indices: Sequence[int]) -> None:
        digests, has_begun = blake3(), False
        async with contextlib.aclosing(self._code_ahead(coding, indices)) as batches:
            async for chunk in self._each(batches, coding):
                if not has_begun:
                    has_begun = True
                    self._progress()
                    await self._send(_header(coding, indices))
                digests.update(chunk.digest)
                await self._send(chunk)
                self.bytes_sent += len(chunk.payload)
                self._traffic.bytes_sent += len(chunk.payload)
                self._progress()
        await self._send(End(coding.plan.name, digests.digest()))

    def _code_ahead(self, coding: Coding, indices: Sequence[int]) -> AsyncGenerator[list[Chunk]]:
        name = coding.plan.name
        source = self._staged if coding.plan.part is Part.LATE else self._early_state[name]
        slab, squares = self._own_slabs[name], self._squares
        return code_ahead(coding, indices, source, executor=self._executor, slab=slab, squares=squares)

    async def _each(self, batches: AsyncIterator[list[Chunk]], coding: Coding) -> AsyncIterator[Chunk]:
        """Yield the chunks, and keep the early payloads, which the half-differences need.

        Late payloads are already staged.
        """
        name, own = coding.plan.name, self._own.get(coding.plan.name)
        try:
            async for batch in batches:
                for chunk in batch:
                    if own is not None:
                        on_grid = coding.modulo(chunk.index)
                        own[chunk.index] = on_grid[0] if on_grid else chunk.payload
                    yield chunk
        except ValueError as error:
            # This is not the partner's fault.
            raise CorruptPayload(f"this peer's {name.name.lower()} cannot be sent: {error}") from None

    async def _send(self, frame: Frame) -> None:
        async with self._send_lock:  # two tasks send sections and Ready, but a stream supports only one writer
            with self._of_partner():  # send() also raises decode errors
                await self._stream.send(frame)

    # receiving

    async def _receive_parts(self) -> None:
        with self._of_partner():
            for name, proposal in self._proposals.items():
                await self._agree_on_grid(name, proposal)
            await self._take_parts()

    async def _take_parts(self) -> None:
        for part in self._parts:
            broken = [await self._receive_section(plan) for plan in self._plans_of(part)]
            if part is Part.EARLY:
                await self._repair([(coding, indices) for coding, indices in broken if indices])
            self.ledger.verified.add(part)
            self._progress()
            with contextlib.suppress(Unreachable):  # the partner may still send data or answer a status request
                await self._send(Ready(part))
            await self._hear_ready(part)
            await self._sent[part].wait()  # a partner may claim to have data that was never sent to it
            self._commit(part)
            self._progress()

    async def _agree_on_grid(self, name: SectionName, proposal: bytes) -> None:
        frame = await self._receive()
        if not isinstance(frame, Grid) or frame.section is not name:
            raise CorruptPayload(f"expected the grid of {name.name.lower()}, got {_show(frame)}")
        exponents = agree(proposal, frame.exponents)
        coding = Coding(self._plan(name), AgreedGrid(exponents, dither_seed(self.swap_id, name)))
        self._num_bytes[name] = coding.num_bytes(range(num_chunks(coding.plan.num_elements)))
        self._codings[name].set_result(coding)

    async def _repair(self, broken: Sequence[Again]) -> None:
        """Repeat the exchange of the chunks in which modulo coding failed. These chunks are the same for both partners.

        At first only further bits are sent. Chunks that keep failing are sent again without modulo coding.
        """
        while broken:
            again = [(coding.follows or Coding(coding.plan), indices) for coding, indices in broken]
            self._again.put_nowait(again)
            broken = [
                (coding, left) for coding, indices in again if (left := await self._receive_again(coding, indices))
            ]
        self._again.put_nowait([])

    async def _receive_again(self, coding: Coding, indices: Sequence[int]) -> Sequence[int]:
        """Receive these chunks again and return the ones that still fail."""
        name = coding.plan.name
        self._num_bytes[name] += coding.num_bytes(indices)
        check = await self._receive_chunks(coding, indices)
        for index, payload in zip(indices, check.kept, strict=True):
            self._theirs[name][index] = payload
        if coding.grid:
            self._traffic.extended_chunks += len(indices)
        else:
            self._traffic.broken_chunks += len(indices)
        return check.broken

    def _commit(self, part: Part) -> None:
        if self.ledger.has_ended:
            raise Unreachable("the swap was abandoned", peer=self.partner)
        if part not in self.ledger.committed:
            self.ledger.committed.add(part)
            self._on_commit(self, part)
            self._early_done.set()

    async def _committed_after_silence(self) -> bool:
        """Ask the partner about parts that lack only its Ready message. Return whether all parts are now committed."""
        for part in self._parts:
            if part not in self.ledger.verified - self.ledger.committed or not self._sent[part].is_set():
                continue
            if part in (await self._ask_partner(self.partner, self.swap_id)).verified:
                self._commit(part)
        return self.ledger.committed.issuperset(self._parts)

    async def _receive_section(self, plan: SectionPlan) -> Again:
        """Receive a section. Return its encoding and the chunks in which modulo coding failed."""
        indices = range(num_chunks(plan.num_elements))
        coding = await self._codings[plan.name]
        check = await self._receive_chunks(coding, indices)
        self._theirs[plan.name] = check.kept
        if plan.modulo:
            num_modulo = sum(coding.modulo(index) is not None for index in indices)
            self._traffic.modulo_chunks += num_modulo
            self._traffic.plain_chunks += len(indices) - num_modulo
        return coding, check.broken

    async def _receive_chunks(self, coding: Coding, indices: Sequence[int]) -> CheckBehind:
        plan = coding.plan
        header, expected = await self._receive(), _header(coding, indices)
        if header != expected:
            raise CorruptPayload(f"expected {_show(expected)}, got {_show(header)}")
        if plan.part is Part.LATE:
            self.partner_staged_s = self._loop.time()
        self._progress()
        digests = blake3()
        beside = self._beside(plan) if plan.modulo else None
        squares = self._squares if plan.part is Part.LATE else None
        slab = self._their_slabs[plan.name]
        check = CheckBehind(coding, executor=self._executor, slab=slab, beside=beside, squares=squares)
        for index in indices:
            chunk = await self._receive()
            if not isinstance(chunk, Chunk) or (chunk.section, chunk.index) != (plan.name, index):
                wanted = f"chunk {index} of {plan.name.name.lower()}"
                raise CorruptPayload(f"expected {wanted}, got {_show(chunk)}")
            await check.add(chunk)
            digests.update(chunk.digest)
            self.bytes_received += len(chunk.payload)
            self._traffic.bytes_received += len(chunk.payload)
            self._progress()
        if await self._receive() != End(plan.name, digests.digest()):
            raise CorruptPayload(f"{plan.name.name.lower()} does not end with the expected digest")
        await check.finish()
        return check

    def _beside(self, plan: SectionPlan) -> Beside:
        return Beside(self._early_state[plan.name], self._bounds[plan.name], self._theirs.get(plan.name, ()))

    async def _hear_ready(self, part: Part) -> None:
        while part not in self._partner_ready:
            try:
                frame = await self._receive(until_ready=True)
            except Ended:
                raise  # the partner announced that it will not commit
            except (Unreachable, TimedOut):
                # The Ready may be lost, so ask the partner once. Without an answer, the part is not committed.
                if part not in (await self._ask_partner(self.partner, self.swap_id)).verified:
                    self.ledger.has_ended = True  # set before the error is handled, because the partner may ask now
                    raise
                return
            if frame is not None:
                raise CorruptPayload(f"expected Ready, got {_show(frame)}")

    async def _receive(self, *, until_ready: bool = False) -> Frame | None:
        """Return the next frame that is not a Ready, and record every Ready before it.

        If `until_ready` is true, return None after the first Ready.
        """
        while True:
            frame = await self._stream.receive(RECEIVE_TIMEOUT_S)
            if isinstance(frame, Abort):
                raise Ended(frame, peer=self.partner)
            if not isinstance(frame, Ready):
                return frame
            if frame.part not in self._partner_ready or self._waits_for_boundary():
                self._progress()
            self._partner_ready.add(frame.part)
            if until_ready:
                return None

    # both directions

    @contextlib.contextmanager
    def _of_partner(self) -> Iterator[None]:
        """Add the partner's peer id to CorruptPayload errors, because the code that raises them may not know it."""
        try:
            yield
        except CorruptPayload as error:
            error.peer = self.partner
            raise

    def _plan(self, name: SectionName) -> SectionPlan:
        return next(plan for plan in self._plans if plan.name is name)

    def _plans_of(self, part: Part) -> list[SectionPlan]:
        return [plan for plan in self._plans if plan.part is part]

    async def _keep_alive(self) -> None:
        """Repeat Ready while both partners wait for a boundary and send no data, so that each notices a frozen partner.

        gRPC's keepalive is not used, because on a slow link its pings would wait behind megabytes of data.
        """
        await self._early_done.wait()
        with contextlib.suppress(Unreachable):  # the receiver reports it as well
            while True:
                await asyncio.sleep(self._deadlines.progress_s / ALIVE_PER_PROGRESS)
                await self._send(Ready(Part.EARLY))

    def _waits_for_boundary(self) -> bool:
        """Return whether one of the partners is still training, so that no data needs to arrive.

        The partner is training if none of its late part has arrived. This peer is training if it has the partner's
        whole late part, but has not staged its own.
        """
        if Part.EARLY not in self.ledger.committed:
            return False
        return self.partner_staged_s is None or (Part.LATE in self.ledger.verified and not self._staged.chunks)

    def _progress(self) -> None:
        """Restart the progress timer, because the swap has made progress."""
        if not (self.ledger.has_ended or self._timer.expired()):
            self._timer.reschedule(self._loop.time() + self._deadlines.progress_s)

    async def _farewell(self, code: AbortCode, reason: PeerError) -> None:
        self.ledger.has_ended = True
        with contextlib.suppress(PeerError, TimeoutError):  # the partner is gone
            await asyncio.wait_for(self._send(Abort(code, str(reason))), self._deadlines.farewell_s)


class Ended(Unreachable):
    """The partner sent Abort and will not commit anything more."""

    def __init__(self, abort: Abort, *, peer: str) -> None:
        super().__init__(f"the partner ended the swap ({abort.code.name}): {abort.sentence}", peer=peer)
        self.code = abort.code


class _Abandoned(Exception):
    def __init__(self, reason: PeerError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _header(coding: Coding, indices: Sequence[int]) -> Header:
    name = coding.plan.codec_name if coding.grid else coding.plan.codec.name
    return Header(coding.plan.name, name, coding.plan.num_elements, len(indices), coding.num_bytes(indices))


def _show(frame: Frame | None) -> str:
    """Describe a frame for a log line, without the fields whose length a stranger controls."""
    if isinstance(frame, Chunk):
        return f"chunk {frame.index} of {frame.section.name.lower()} ({len(frame.payload)} bytes)"
    if isinstance(frame, Header):
        return str(frame)
    section = getattr(frame, "section", None)
    return type(frame).__name__ + (f" of {section.name.lower()}" if section else "")
