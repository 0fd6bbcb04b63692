"""One peer's rounds on the network thread: the beats that the main thread calls, and the parts that answer them.

    open     seeking.py looks for a partner, answering.py may find one first; swapping.py carries the swap out
    stage    the own outer gradient joins it at the boundary
    collect  ending.py waits for what may still come, and tells the outcome

Every method runs on the event loop; `exchange.py` is the door for the main thread. Decisions are those of `round.py`
and `pairing.py`; what the parts share is the `LiveRound`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from noloco_p2p.errors import CorruptPayload, Unreachable
from noloco_p2p.gossip import ending
from noloco_p2p.gossip.answering import Answering, check_hello
from noloco_p2p.gossip.deadlines import INTERNET, Deadlines
from noloco_p2p.gossip.frames import Hello, Payload, SwapState
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.live_round import Faults, LiveRound, Opening, OwnedTasks
from noloco_p2p.gossip.outcome import Alone, Correction, Outcome, Traffic
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.pairing import Pairing
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.round import Phase, Round
from noloco_p2p.gossip.seams import Directory, FrameStream, Transport
from noloco_p2p.gossip.sections import SectionPlan
from noloco_p2p.gossip.seeking import Seeking
from noloco_p2p.gossip.swap import Swap
from noloco_p2p.gossip.swapping import Swapping

FAREWELL_S = 2.0  # for the last words of swaps that are broken off


class RoundRunner:
    """`rng` draws partners and the ids of swaps; `clock` gives seconds, those by which `pace` is fed.

    `on_corrupt` is told of a partner that sent what no honest peer sends, and what it was.
    """

    def __init__(
        self,
        *,
        hello: Callable[[], Hello],
        transport: Transport,
        directory: Directory,
        pace: Pace,
        executor: Executor,
        rng: random.Random,
        deadlines: Deadlines = INTERNET,
        clock: Callable[[], float] = time.monotonic,
        on_corrupt: Callable[[str, str], None] = lambda peer_id, reason: None,
    ) -> None:
        self._tasks = OwnedTasks()
        self._live = live = LiveRound(hello=hello, directory=directory, pace=pace, pairing=Pairing(rng), clock=clock)
        self._swapping = Swapping(live, self._tasks, transport=transport, executor=executor, deadlines=deadlines)
        self._swapping.on_corrupt = on_corrupt
        self._answering = Answering(live, self._swapping, deadlines=deadlines)
        self._seeking = Seeking(live, self._swapping, self._tasks, transport=transport, rng=rng, deadlines=deadlines)
        self._seeker: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        """How far the round of now has come."""
        return self._live.round.phase

    @property
    def partner(self) -> str:
        """Of the round of now; "" while there is none."""
        return self._live.round.partner

    @property
    def state(self) -> str:
        """What the swarm is told: training, paused, leaving or done. Offers are accepted in training only."""
        return self._answering.state

    @state.setter
    def state(self, state: str) -> None:
        self._answering.state = state

    @property
    def layout(self) -> ModelLayout | None:
        """Which tensors the model has that trains here, once it is known."""
        return self._live.layout

    @layout.setter
    def layout(self, layout: ModelLayout) -> None:
        self._live.layout = layout

    @property
    def faults(self) -> Faults:
        return self._live.faults

    @property
    def last_fault(self) -> str:
        return self._live.faults.last

    def take_told_stale(self) -> bool:
        """Whether anybody has refused this peer as too far away in the run since this was asked last. Any thread."""
        told, self._live.told_stale = self._live.told_stale, False
        return told

    @property
    def traffic(self) -> Traffic:
        return self._swapping.traffic

    @property
    def memory(self) -> PayloadMemory:
        return self._swapping.memory

    @property
    def corrections(self) -> deque[Correction]:
        return self._live.corrections

    def hurry(self) -> None:
        """This peer was asked to leave: no boundary waits any more. Safe in a signal handler and from any thread."""
        self._live.is_leaving = True

    def swap_now(self) -> tuple[Swap, float] | None:
        """The swap that runs, or whose late part is still on its way, and when it began (monotonic seconds)."""
        running = self._live.running or self._live.trailing
        return (running.swap, running.began_s) if running else None

    # the beats of a round, called for the main thread

    async def open(self, opening: Opening, plans: tuple[SectionPlan, ...]) -> None:
        live = self._live
        if live.round.phase is not Phase.CLOSED:  # this thread was silent when the last outcome was asked for
            self._conclude(live.round)
            live.drop_trailing()
        live.open(opening, plans)
        self._seeker = self._tasks.start(self._seeking.run(live.round))
        live.notify()

    async def begin_stage(self) -> bool:
        """The boundary is here: a late part of the last round is given up.

        False = no partner can be had in this round, so that nothing needs to be coded.
        """
        live = self._live
        live.drop_trailing()
        live.boundary_s = live.clock()
        if live.running:
            live.running.boundary_s = live.boundary_s
        live.notify()
        if live.round.phase is Phase.CLOSED:
            return False
        if live.is_hopeless():
            live.round.close()  # nobody may join a round whose gradient is not coded
            return False
        return True

    def stage(self, payload: Payload) -> None:
        self._live.staged.put(payload)

    def cannot_stage(self, reason: str) -> None:
        """The own outer gradient cannot be sent: a committed early part stays half, everything else ends here."""
        live = self._live
        if live.running:
            live.running.swap.abandon(CorruptPayload(f"the own outer gradient cannot be sent: {reason}"))
        if not live.round.early_committed:
            live.round.close()

    async def collect(self, wait_s: float) -> Outcome:
        """Ends the round: waits up to `wait_s` while something may still come in that time, then tells what was got."""
        round_ = self._live.round
        await ending.wait_for_partner(self._live, wait_s)
        return self._conclude(round_)

    async def withdraw(self) -> Outcome:
        """Ends the round now, before its boundary: no partner waits for this peer. Its outer gradient is never sent."""
        live = self._live
        if live.round.early_committed:
            live.drop_trailing()
        outcome = self._conclude(live.round)
        if not isinstance(outcome, Alone):
            live.drop_trailing()  # the swap of this round, whose late part will not come
        return outcome

    async def take_correction(self, before: int) -> Correction | None:
        """A late part of a round before `before`, to be applied at once; `corrected` tells that it was.

        None while the vectors that it changes are on their way to a partner.
        """
        live = self._live
        if not live.corrections or live.corrections[0].round >= before or live.round.phase is Phase.SWAPPING:
            return None
        live.correcting = True
        return live.corrections.popleft()

    def corrected(self) -> None:
        self._live.correcting = False
        self._live.notify()

    async def forget(self) -> None:
        """The vectors of earlier rounds are gone: late parts for them are of no use."""
        self._live.drop_trailing()
        self._live.corrections.clear()

    async def stop(self) -> None:
        """Abandon what runs and wait until all tasks have ended."""
        live = self._live
        live.round.close()
        live.drop_trailing()
        if live.running:
            live.running.swap.abandon(Unreachable("this peer leaves"))
        if self._seeker:
            self._seeker.cancel()
        await self._tasks.stop(grace_s=FAREWELL_S)

    # what other peers ask

    def admit(self, hello: Hello) -> None:
        """Raises Refused when the caller is of another protocol version, run or spec."""
        check_hello(self._live.hello(), hello)

    def swap_state(self, swap_id: bytes) -> SwapState:
        return self._swapping.state(swap_id)

    async def on_swap(self, stream: FrameStream) -> None:
        """Answer one offer, and carry the swap out when it is accepted."""
        await self._answering.on_swap(stream)

    def _conclude(self, round_: Round) -> Outcome:
        if self._seeker:
            self._seeker.cancel()
        outcome = ending.conclude(self._live, round_)
        self._live.notify()
        return outcome
