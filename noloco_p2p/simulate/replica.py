"""One simulated replica: the beats of a peer's life as one coroutine, on the production driver and outer state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from torch import Tensor

from noloco_p2p.gossip.donor import StateServer
from noloco_p2p.gossip.frames import Hello, SectionName
from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Received, Swapped
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.round_driver import RoundDriver
from noloco_p2p.gossip.round_events import Opening
from noloco_p2p.gossip.round_length import RoundLength
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.optim.gates import LIMITS, GateLimits
from noloco_p2p.optim.mixing import closing_wait_s
from noloco_p2p.simulate.clock import InlineExecutor
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.network import LinkNetwork, LinkTransport
from noloco_p2p.simulate.result import Point
from noloco_p2p.testing.memory import MemoryDirectory, Wrap, unchanged
from noloco_p2p.train.admission import admitted
from noloco_p2p.train.inner_step import InnerStep
from noloco_p2p.train.outer_state import OuterState, next_progress, progress_after

AT_POINT = 1e-6  # progress is a sum of fractions


class Replica:
    """`run` trains until the schedule is done or `leave` is called; the counters can be read at any time."""

    def __init__(
        self,
        number: int,
        *,
        peer_id: str,
        material: Material,
        network: LinkNetwork,
        step_s: float,
        absent: float,
        num_points: int,
        seed: int,
        gates: GateLimits = LIMITS,
        wrap: Wrap = unchanged,
    ) -> None:
        self.number = number
        self.peer_id = peer_id
        self.model = material.model()
        self.state = OuterState(self.model, material.spec.outer, limits=gates)
        self.inner = InnerStep(self.model, material.spec.train)
        self.progress = 0.0
        self.round = 0
        self.steps = 0
        self.swapped = self.half = self.alone = self.late = 0
        self.cut_share = 0.0  # sum over swaps, of `Clipped`
        self.refused = self.clipped = 0  # rounds in which a gate refused or shortened what a partner sent
        self.curve: list[Point] = []
        self.rounds_s: list[float] = []  # virtual, waiting included
        self._material = material
        self._spec = material.spec
        self._batches = material.batches(peer_id, replica=number)
        self._network = network
        self._wrap = wrap
        self._step_s = step_s
        self._absent = absent
        self._absences = random.Random(f"absent/{seed}/{peer_id}")
        self._num_points = num_points
        self._is_leaving = False
        self._length = RoundLength(self._spec.outer)
        self._pace = Pace(self._length.inner_steps)
        self._hello = Hello(peer_id, self._spec.name, self._spec.digest(), layout=self.state.layout)
        self._plans = section_plans(
            self._spec.codec, swap_momentum=self._spec.outer.sends_momentum, num_elements=self.state.num_elements
        )
        self.driver = RoundDriver(
            hello=lambda: self._hello,
            transport=LinkTransport(network, lambda: self._hello, wrap=wrap),
            directory=MemoryDirectory(network, own_id=peer_id),
            pace=self._pace,
            executor=InlineExecutor(),
            rng=random.Random(f"pairing/{seed}/{peer_id}"),
            clock=self._now_s,
        )
        self._service = PeerService(
            driver=self.driver,
            states=StateServer(self._spec),
            status=lambda: (self._hello, self.driver.peer_state, self.round, self.progress),
        )

    def take(self, donor: Replica) -> None:
        """Begin where another replica stands, as a newcomer does."""
        self.state.take(donor.state.tensors())
        self.round, self.progress = donor.round, donor.progress

    def leave(self) -> None:
        """After the inner step of now."""
        self._is_leaving = True

    async def run(self, *, closing_rounds: int = 0) -> None:
        """`closing_rounds`: rounds of mixing without training, once the schedule is done."""
        self._network.add(self.peer_id, self._service, wrap=self._wrap)
        try:
            while self.progress < 1 and not self._is_leaving:
                await self._round()
            for _ in range(0 if self._is_leaving else closing_rounds):
                await self._closing_round()
        finally:
            self._network.remove(self.peer_id)
            await self.driver.stop()

    # one round

    async def _round(self) -> None:
        began_s = self._now_s()
        is_absent = self._absences.random() < self._absent
        if is_absent:
            self._network.vanish(self.peer_id)
        step_s = self._pace.seconds_per_step
        inner_steps = self._length.next(step_s, others_s=self._pace.others_s(self._now_s()))
        self._pace.open_round(self._now_s(), inner_steps=inner_steps, shortest_round_s=self._length.told_s(step_s))
        if not is_absent:
            self._network.add(self.peer_id, self._service, wrap=self._wrap)
            await self._open()
        for _ in range(inner_steps):
            await self._inner_step()
            if self._is_leaving:
                return
        outcome = (
            Alone("this replica cannot be reached") if is_absent else await self._boundary(self._spec.outer.max_wait_s)
        )
        received = self._apply(outcome)
        if received:
            self.progress = progress_after(self.progress, received, inner_steps=inner_steps, spec=self._spec)
        self.rounds_s.append(self._now_s() - began_s)
        self._note_point()

    async def _inner_step(self) -> None:
        self.inner(next(self._batches), progress=self.progress)
        await asyncio.sleep(self._step_s)
        self.steps += 1
        self.progress = next_progress(self.progress, self._spec.train.total_steps)
        self._pace.step(self._now_s())
        await self._apply_late()

    async def _open(self, *, patience_s: float = 0.0) -> None:
        total_steps, longest_round = self._spec.train.total_steps, self._spec.outer.longest_round
        opening = Opening(self.round, self.progress, total_steps, longest_round, self._sent_state(), patience_s)
        self.driver.open(opening, self._plans)

    def _sent_state(self) -> dict[SectionName, Tensor]:
        return self.state.sections()

    def _sent_gradient(self) -> Iterator[Tensor]:
        return self.state.outer_gradient()

    async def _boundary(self, wait_s: float) -> Outcome:
        if self.driver.reach_boundary():
            codec = self._plans[-1].codec
            for chunk in self._sent_gradient():
                self.driver.stage(codec.encode(chunk))
        outcome = await self.driver.collect(wait_s)
        await self._apply_late()
        return outcome

    def _apply(self, outcome: Outcome, *, is_closing: bool = False) -> Received | None:
        """The outer step with what the gates let through, which is returned."""
        outcome, verdict = admitted(outcome, self.state)
        if not is_closing:
            self._count(outcome)
        received = None if isinstance(outcome, Alone) else outcome.received
        link = outcome.link if isinstance(outcome, Alone) else outcome.received.link
        if link:
            self._length.note(link)
        clipped = self.state.step(received, scales=verdict.scales, is_closing=is_closing)
        if clipped.num_lost:
            self.inner.restore({})
        self.refused += bool(verdict.refusal)
        self.cut_share += clipped.cut_share
        self.clipped += clipped.num_clipped > 0 or verdict.scales.partner < 1
        self.round += 1
        return received

    def _count(self, outcome: Outcome) -> None:
        match outcome:
            case Swapped():
                self.swapped += 1
            case Half():
                self.half += 1
            case Alone():
                self.alone += 1

    async def _apply_late(self) -> None:
        correction = self.driver.take_correction(self.round)
        if correction:
            verdict = self.state.judge(correction.gradient, correction.agreed)
            if not verdict.refusal:
                self.state.correct(correction, scales=verdict.scales)
                self.late += 1
            self.refused += bool(verdict.refusal)
            self.driver.corrected()

    async def _closing_round(self) -> None:
        """Mixing without training, with gamma 1: both partners go to the middle."""
        self._pace.open_round(self._now_s(), steps_done=self._pace.inner_steps)
        wait_s = closing_wait_s(self._spec.outer, self._pace.seconds_per_round())
        await self._open(patience_s=wait_s)
        self._apply(await self._boundary(wait_s), is_closing=True)

    # measuring

    def _note_point(self) -> None:
        """Validation loss, where the schedule passes the next of the points."""
        if self.progress * self._num_points >= len(self.curve) + 1 - AT_POINT:
            loss = self._material.loss(self.model)
            self.curve.append(Point(self.number, self.steps, self._now_s(), loss))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
