"""One swap with one partner, after its offer was accepted: both directions at once over one stream.

Each part goes stage -> verify -> commit: its sections arrive whole and are checked (order, length, digest, finite),
both sides say Ready, and a side that has said and heard Ready commits. Nothing is applied here; what came stays coded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor

from blake3 import blake3
from torch import Tensor

from noloco_p2p.codec import num_chunks, section_bytes
from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import (
    Abort,
    AbortCode,
    Chunk,
    End,
    Frame,
    Header,
    Part,
    Payload,
    Ready,
    SectionName,
    SwapState,
)
from noloco_p2p.gossip.outcome import SectionPair, SectionPlan, Traffic
from noloco_p2p.gossip.pipeline import CheckBehind, Staged, code_ahead
from noloco_p2p.gossip.seams import FrameStream

RECEIVE_TIMEOUT_S = 86_400.0  # `_progress` and the owner of the swap end it long before


class Ledger:
    """How far a swap came. Small: it is remembered when the swap and its payloads are gone."""

    def __init__(self) -> None:
        self.verified: set[Part] = set()
        self.committed: set[Part] = set()
        self.has_ended = False  # nothing is committed from now on

    def state(self) -> SwapState:
        """What the partner is told when it asks. A part that was verified but given up counts as not verified."""
        verified = self.committed if self.has_ended else self.verified
        return SwapState(known=True, verified=tuple(verified), committed=tuple(self.committed))


class Swap:
    """`run` carries it out; `on_commit(part)` is called, on the loop, the moment a part is committed."""

    def __init__(
        self,
        stream: FrameStream,
        *,
        swap_id: bytes,
        partner: str,
        plans: Sequence[SectionPlan],
        early_state: Mapping[SectionName, Tensor],
        staged: Staged,
        executor: Executor,
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
        self._stream = stream
        self._plans = plans
        self._early_state = early_state
        self._staged = staged
        self._executor = executor
        self._traffic = traffic
        self._on_commit = on_commit
        self._ask_partner = ask_partner
        self._deadlines = deadlines
        self._own: dict[SectionName, list[Payload]] = {plan.name: [] for plan in plans}
        self._own[SectionName.OUTER_GRADIENT] = staged.chunks
        self._theirs: dict[SectionName, list[Payload]] = {plan.name: [] for plan in plans}
        self._partner_ready: set[Part] = set()
        self._sent = {part: asyncio.Event() for part in Part}
        self._moving = 0  # sections on their way now, either direction
        self._send_lock = asyncio.Lock()
        self._early_done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._abandoned: asyncio.Future[None] = self._loop.create_future()
        self._timer = asyncio.timeout(None)

    def pair(self, name: SectionName) -> SectionPair:
        """The coded vectors of both sides; the part that `name` belongs to must be committed."""
        plan = next(plan for plan in self._plans if plan.name is name)
        assert plan.part in self.ledger.committed, (name, self.ledger.committed)
        return SectionPair(plan, self._own[name], self._theirs[name])

    def pairs(self) -> dict[SectionName, SectionPair]:
        return {plan.name: self.pair(plan.name) for plan in self._plans if plan.part in self.ledger.committed}

    def bytes_until(self, part: Part) -> int:
        """Payload bytes each way when `part` is whole, those of the parts before it too."""
        plans = [plan for plan in self._plans if plan.part in (Part.EARLY, part)]
        return sum(section_bytes(plan.codec, plan.num_elements) for plan in plans)

    def abandon(self, reason: PeerError) -> None:
        """End the swap from outside: nothing more is committed, `run` raises `reason`. Harmless when it has ended."""
        self.ledger.has_ended = True
        if not self._abandoned.done():
            self._abandoned.set_exception(reason)
            self._abandoned.exception()  # retrieved here, as `run` may already be gone

    async def run(self) -> None:
        """Returns when both parts are committed. Raises PeerError otherwise; the ledger tells how far it came."""
        sender = asyncio.create_task(self._send_parts())
        receiver = asyncio.create_task(self._receive_parts())
        try:
            async with self._timer:
                self._progress()
                await self._both_ways(sender, receiver)
        except TimeoutError:
            if await self._committed_after_silence():
                return
            fault: PeerError = TimedOut(f"nothing moved for {self._deadlines.progress_s:g} s", peer=self.partner)
            await self._farewell(AbortCode.TIMED_OUT, fault)
            raise fault from None
        except CorruptPayload as error:
            await self._farewell(AbortCode.CORRUPT, error)
            raise
        except _Abandoned as error:
            await self._farewell(AbortCode.ABANDONED, error.reason)
            raise error.reason from None
        finally:
            # Only now, after the farewell: a read or write that is cancelled may take the whole stream with it.
            self.ledger.has_ended = True
            for task in (sender, receiver):
                task.cancel()
            await asyncio.gather(sender, receiver, return_exceptions=True)
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
                # The receiver may hold the partner's Abort, which tells more than a broken connection.
                await asyncio.wait({receiver}, timeout=self._deadlines.farewell_s)
                if receiver.done():
                    receiver.result()
            for task in done:
                task.result()

    # sending

    async def _send_parts(self) -> None:
        for part in Part:
            for plan in self._plans_of(part):
                await self._send_section(plan)
            self._sent[part].set()
            self._progress()
            if part is Part.EARLY:
                await self._early_done.wait()  # keeps the frames of the two parts apart on the wire
                self._progress()

    async def _send_section(self, plan: SectionPlan) -> None:
        source = self._staged if plan.part is Part.LATE else self._early_state[plan.name]
        digests, has_begun = blake3(), False
        async with contextlib.aclosing(code_ahead(plan, source, self._executor)) as batches:
            async for chunk in self._each(batches, plan):
                if not has_begun:
                    has_begun = True
                    self._moving += 1
                    self._progress()
                    await self._send(_header(plan))
                digests.update(chunk.digest)
                await self._send(chunk)
                self.bytes_sent += len(chunk.payload)
                self._traffic.sent_bytes += len(chunk.payload)
                self._progress()
        await self._send(End(plan.name, digests.digest()))
        self._moving -= 1

    async def _each(self, batches: AsyncIterator[list[Chunk]], plan: SectionPlan) -> AsyncIterator[Chunk]:
        """Chunk after chunk; early payloads are kept, for the half-differences (the staged ones are)."""
        try:
            async for batch in batches:
                for chunk in batch:
                    if plan.part is Part.EARLY:
                        self._own[plan.name].append(chunk.payload)
                    yield chunk
        except ValueError as error:
            raise CorruptPayload(f"own {plan.name.name.lower()} cannot be sent: {error}", peer=self.partner) from None

    async def _send(self, frame: Frame) -> None:
        async with self._send_lock:  # sections and Ready come from two tasks; a stream takes one writer
            await self._stream.send(frame)

    # receiving

    async def _receive_parts(self) -> None:
        for part in Part:
            for plan in self._plans_of(part):
                await self._receive_section(plan)
            self.ledger.verified.add(part)
            self._progress()
            with contextlib.suppress(Unreachable):  # the partner may still be heard, or asked
                await self._send(Ready(part))
            await self._hear_ready(part)
            await self._sent[part].wait()  # a partner may claim to have what was never sent to it
            self._commit(part)
            self._progress()

    def _commit(self, part: Part) -> None:
        if self.ledger.has_ended:
            raise Unreachable("the swap was given up", peer=self.partner)
        if part not in self.ledger.committed:
            self.ledger.committed.add(part)
            self._on_commit(self, part)
            self._early_done.set()

    async def _committed_after_silence(self) -> bool:
        """Only a Ready may be missing: ask for it before giving up. True = both parts are committed now."""
        for part in Part:
            if part not in self.ledger.verified - self.ledger.committed or not self._sent[part].is_set():
                continue
            if part in (await self._ask_partner(self.partner, self.swap_id)).verified:
                self._commit(part)
        return Part.LATE in self.ledger.committed

    async def _receive_section(self, plan: SectionPlan) -> None:
        header = await self._receive()
        if header != _header(plan):
            raise CorruptPayload(f"announced {_show(header)}, expected {_show(_header(plan))}", peer=self.partner)
        self._moving += 1
        self._progress()
        digests = blake3()
        kept, check = self._theirs[plan.name], CheckBehind(plan, self._executor)
        for index in range(num_chunks(plan.num_elements)):
            chunk = await self._receive()
            if not isinstance(chunk, Chunk) or (chunk.section, chunk.index) != (plan.name, index):
                wanted = f"chunk {index} of {plan.name.name.lower()}"
                raise CorruptPayload(f"{wanted} is missing: got {_show(chunk)}", peer=self.partner)
            await check.add(chunk)
            digests.update(chunk.digest)
            kept.append(chunk.payload)
            self.bytes_received += len(chunk.payload)
            self._traffic.received_bytes += len(chunk.payload)
            self._progress()
        if await self._receive() != End(plan.name, digests.digest()):
            raise CorruptPayload(f"{plan.name.name.lower()} does not end as it should", peer=self.partner)
        await check.finish()
        self._moving -= 1

    async def _hear_ready(self, part: Part) -> None:
        while part not in self._partner_ready:
            try:
                frame = await self._receive(until_ready=True)
            except _Ended:
                raise  # it said that it will not commit
            except (Unreachable, TimedOut):
                # The Ready may be lost on the way: ask once what the partner has; unknown counts as not committed.
                if part not in (await self._ask_partner(self.partner, self.swap_id)).verified:
                    self.ledger.has_ended = True  # from this moment on, as the partner may be asking, too
                    raise
                return
            if frame is not None:
                raise CorruptPayload(f"expected Ready, got {_show(frame)}", peer=self.partner)

    async def _receive(self, *, until_ready: bool = False) -> Frame | None:
        """The next frame that is no Ready (those are noted); with `until_ready` a Ready ends the wait, with None."""
        while True:
            frame = await self._stream.receive(RECEIVE_TIMEOUT_S)
            if isinstance(frame, Abort):
                raise _Ended(f"the partner ended the swap ({frame.code.name}): {frame.sentence}", peer=self.partner)
            if not isinstance(frame, Ready):
                return frame
            self._partner_ready.add(frame.part)
            self._progress()
            if until_ready:
                return None

    # both

    def _plans_of(self, part: Part) -> list[SectionPlan]:
        return [plan for plan in self._plans if plan.part is part]

    def _progress(self) -> None:
        """Something moved: start the progress timer anew, or stop it while both sides wait for a boundary."""
        if self.ledger.has_ended or self._timer.expired():
            return
        late_pending = Part.LATE in self.ledger.verified and self._sent[Part.LATE].is_set()
        waiting = Part.EARLY in self.ledger.committed and not self._moving and not late_pending
        self._timer.reschedule(None if waiting else self._loop.time() + self._deadlines.progress_s)

    async def _farewell(self, code: AbortCode, reason: PeerError) -> None:
        self.ledger.has_ended = True
        with contextlib.suppress(PeerError, TimeoutError):  # it is gone: nobody to tell
            await asyncio.wait_for(self._send(Abort(code, str(reason))), self._deadlines.farewell_s)


class _Ended(Unreachable):
    """The partner sent Abort: what it has not committed it never will."""


class _Abandoned(Exception):
    def __init__(self, reason: PeerError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _header(plan: SectionPlan) -> Header:
    total_bytes = section_bytes(plan.codec, plan.num_elements)
    return Header(plan.name, plan.codec.name, plan.num_elements, num_chunks(plan.num_elements), total_bytes)


def _show(frame: Frame | None) -> str:
    """A frame in a log line, without its payload."""
    if isinstance(frame, Chunk):
        return f"chunk {frame.index} of {frame.section.name.lower()} ({len(frame.payload)} bytes)"
    return str(frame)
