"""Carries out the swap of a round: binds it to the round, gives it up when it misses the boundary, notes its end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor

from noloco_p2p.codec.modulo import Bounds
from noloco_p2p.errors import CorruptPayload, PeerError, TimedOut, Unreachable
from noloco_p2p.gossip.deadlines import Deadlines
from noloco_p2p.gossip.frames import AbortCode, Boundary, Part, RefuseCode, SectionName, SwapState
from noloco_p2p.gossip.live_round import POLL_S, LiveRound, OwnedTasks
from noloco_p2p.gossip.outcome import Correction, LonelyCause, Traffic
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.round import Phase, Round
from noloco_p2p.gossip.running import Running
from noloco_p2p.gossip.seams import FrameStream, Transport
from noloco_p2p.gossip.swap import Ended, Ledger, Swap
from noloco_p2p.telemetry.console import named

WATCH_S = 0.5  # how often a swap on its way is judged
REMEMBERED_SWAPS = 16


class Swapping:
    """The swaps of one peer, one at a time and the tail of the one before. `tasks` owns what runs beside."""

    def __init__(
        self, live: LiveRound, tasks: OwnedTasks, *, transport: Transport, executor: Executor, deadlines: Deadlines
    ) -> None:
        self.traffic = Traffic()
        self.memory = PayloadMemory()
        self.unreachable: set[str] = set()  # told once, until a swap with it begins
        self.on_corrupt: Callable[[str, str], None] = lambda peer_id, reason: None
        self._live = live
        self._tasks = tasks
        self._transport = transport
        self._executor = executor
        self._deadlines = deadlines
        self._bounds: dict[SectionName, Bounds] = {}
        self._ledgers: OrderedDict[bytes, Ledger] = OrderedDict()

    def bind(
        self, stream: FrameStream, swap_id: bytes, partner: str, mine: Boundary, theirs: Boundary
    ) -> tuple[Round, Running]:
        """The round has its partner. `run` is to be awaited next; without it the round waits for its boundary."""
        live = self._live
        assert live.opening is not None
        live.round.bind(partner)
        self.unreachable.discard(partner)
        swap = Swap(
            stream,
            swap_id=swap_id,
            partner=partner,
            plans=live.plans,
            early_state=live.opening.early_state,
            bounds=self._bounds_now(),
            staged=live.staged,
            executor=self._executor,
            memory=self.memory,
            traffic=self.traffic,
            on_commit=self._committed,
            ask_partner=self._ask,
            deadlines=self._deadlines,
        )
        self._ledgers[swap_id] = swap.ledger
        if len(self._ledgers) > REMEMBERED_SWAPS:
            self._ledgers.popitem(last=False)
        live.running = Running(
            swap, live.round.index, live.opening.total_steps, mine, theirs, live.clock(), live.boundary_s
        )
        live.notify()
        return live.round, live.running

    async def run(self, round_: Round, running: Running) -> None:
        watch = self._tasks.start(self._watch(round_, running))
        try:
            await running.swap.run()
        except PeerError as error:
            self.ended(round_, running, error)
            # Its frames hold the swap, and the swap holds it: payloads as large as the model would wait for the
            # garbage collector.
            error.__traceback__ = error.__context__ = None
        except BaseException:  # cancelled, or a mistake of ours: the round must not wait for it
            self.ended(round_, running, Unreachable("it was broken off here", peer=running.swap.partner))
            raise
        finally:
            watch.cancel()

    def ended(self, round_: Round, running: Running, error: PeerError) -> None:
        """A swap ended in a fault: it is told, and the round looks for another partner while it may."""
        live = self._live
        kept = "early part kept" if Part.EARLY in running.swap.ledger.committed else "nothing applied"
        if round_.phase is not Phase.CLOSED or running is live.trailing:
            what = f"round {round_.index} | swap with {named(running.swap.partner)} failed: {error} | {kept}"
            live.faults.tell(what, error)
        if isinstance(error, CorruptPayload) and error.peer == running.swap.partner:
            self.on_corrupt(running.swap.partner, str(error))
        if running is live.trailing:
            live.trailing = None
        if running is live.running and round_ is live.round:
            self._lost_partner(round_, running, error)
        live.notify()

    def state(self, swap_id: bytes) -> SwapState:
        """What became of a swap, for the partner who asks."""
        ledger = self._ledgers.get(swap_id)
        return ledger.state() if ledger else SwapState()

    def _bounds_now(self) -> dict[SectionName, Bounds]:
        """Those of each section that goes modulo; they learn from swap to swap."""
        for plan in self._live.plans:
            if plan.modulo and plan.name not in self._bounds:
                self._bounds[plan.name] = Bounds(plan.num_elements, codec=plan.modulo)
        return {plan.name: self._bounds[plan.name] for plan in self._live.plans if plan.modulo}

    async def _watch(self, round_: Round, running: Running) -> None:
        """Gives up an early part that will miss the boundary, while there is time for another partner."""
        live = self._live
        while round_.phase is Phase.SWAPPING and running is live.running and live.boundary_s is None:
            await asyncio.sleep(WATCH_S)
            now_s = live.clock()
            left_s = live.pace.seconds_to_boundary(now_s)
            if left_s is not None and running.misses(now_s + left_s, now_s, live.goodput):
                running.swap.abandon(TimedOut("too slow for this round", peer=running.swap.partner))
                return

    def _committed(self, swap: Swap, part: Part) -> None:
        """Called by the swap in the moment of the commit: the round moves on, or a late part becomes a correction."""
        live = self._live
        if live.running and swap is live.running.swap:
            live.running.committed(part, live.clock(), live.goodput)
            if part is Part.EARLY:
                live.round.commit_early()
                live.pairing.met(swap.partner)
            else:
                live.round.commit_late()
        elif live.trailing and swap is live.trailing.swap:
            gradient, trailing = swap.pair(SectionName.OUTER_GRADIENT), live.trailing
            live.corrections.append(Correction(gradient, swap.partner, trailing.round, trailing.agreed))
            live.trailing = None
        live.notify()

    def _lost_partner(self, round_: Round, running: Running, error: PeerError) -> None:
        live, now_s, partner = self._live, self._live.clock(), running.swap.partner
        running.broken_off(now_s, live.goodput)
        if isinstance(error, Ended) and error.code is AbortCode.ABANDONED:
            # No fault: its boundary came first, and its next round may fit.
            live.pairing.refused(partner, code=RefuseCode.BETWEEN_ROUNDS, retry_after_s=POLL_S, now_s=now_s)
        else:
            live.pairing.failed(partner, now_s=now_s)
        if round_.phase is Phase.SWAPPING:
            live.failed_link, live.running = running.link(now_s), None
        round_.swap_failed()
        live.reason = f"the swap with {named(partner)} failed: {error}"
        live.cause = LonelyCause.FAILED

    async def _ask(self, partner: str, swap_id: bytes) -> SwapState:
        """What the partner knows of a swap; nothing when it cannot be asked."""
        candidate = await self._live.directory.find(partner, timeout_s=self._deadlines.status_s)
        if candidate is None:
            return SwapState()
        try:
            status = await self._transport.status(candidate, swap_id=swap_id, timeout_s=self._deadlines.status_s)
        except PeerError:
            return SwapState()
        return status.swap
