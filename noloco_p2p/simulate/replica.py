"""One simulated replica: the life of a peer as one coroutine, with the rounds, swaps and outer step of a real one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from noloco_p2p.gossip.exchange import Exchange, LoopExchange
from noloco_p2p.gossip.frames import Hello, SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, Half, Outcome, Swapped
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.round_stack import build_round_stack
from noloco_p2p.optim.gates import LIMITS, GateLimits
from noloco_p2p.optim.mixing import closing_wait_s
from noloco_p2p.simulate.clock import InlineExecutor
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.network import LinkNetwork, LinkTransport
from noloco_p2p.simulate.result import Point
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.testing.memory import MemoryDirectory, Wrap, unchanged
from noloco_p2p.train.admission import Admission
from noloco_p2p.train.inner_step import InnerStep
from noloco_p2p.train.outer_state import OuterState
from noloco_p2p.train.rounds import RoundEnd, Rounds

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
        self.steps = 0
        self.cut_share = 0.0  # sum over swaps, of `Clipped`
        self.clipped = 0  # rounds in which a gate shortened what a partner sent
        self.swapped = self.half = self.alone = 0  # rounds with inner steps, by their outcome
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
        self._metrics = Metrics()
        self._hello = Hello(peer_id, self._spec.name, self._spec.digest(), layout=self.state.layout)
        self._stack = build_round_stack(
            self._spec,
            hello=lambda: self._hello,
            transport=LinkTransport(network, lambda: self._hello, wrap=wrap),
            directory=MemoryDirectory(network, own_id=peer_id),
            executor=InlineExecutor(),
            rng=random.Random(f"pairing/{seed}/{peer_id}"),
            clock=now_s,
        )
        self.driver = self._stack.driver
        self._admission = Admission(self.state, self._metrics, None)
        self._exchange: Exchange = LoopExchange(self._spec, self.driver)
        self._rounds = Rounds(self._spec, self._exchange, self.state, self._admission, clock=now_s)

    @property
    def progress(self) -> float:
        return self._rounds.progress

    @property
    def refused(self) -> int:
        """Rounds and late parts in which a gate refused what a partner sent."""
        return self._metrics.refused_gradients

    @property
    def late(self) -> int:
        """Late parts that were applied after their boundary."""
        return self._metrics.late

    def take(self, donor: Replica) -> None:
        """Begin where another replica stands, as a newcomer does."""
        self.state.take(donor.state.tensors())
        self._rounds.restart(round_index=donor._rounds.round, progress=donor.progress)

    def leave(self) -> None:
        """After the current inner step."""
        self._is_leaving = True

    async def run(self, *, closing_rounds: int = 0) -> None:
        """`closing_rounds`: rounds of mixing without training, once the schedule is done."""
        self._network.add(self.peer_id, self._stack.service, wrap=self._wrap)
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
        began_s = now_s()
        if self._absences.random() < self._absent:
            self._network.vanish(self.peer_id)
            self._rounds.exchange = Absent(self._exchange)
        else:
            self._network.add(self.peer_id, self._stack.service, wrap=self._wrap)
            self._rounds.exchange = self._exchange
        self._rounds.open()
        is_at_boundary = False
        while not is_at_boundary:
            self.inner(next(self._batches), progress=self.progress)
            await asyncio.sleep(self._step_s)
            self.steps += 1
            is_at_boundary = self._rounds.step_taken()
            if self._is_leaving:
                return
        self._rounds.reach_boundary()
        self._count(await self._end())
        self.rounds_s.append(now_s() - began_s)
        self._note_point()

    async def _closing_round(self) -> None:
        """Mixing without training: both partners go to the middle."""
        self._rounds.exchange = self._exchange
        wait_s = closing_wait_s(self._spec.outer, self.driver.pace.seconds_per_round())
        self._rounds.open(patience_s=wait_s, is_closing=True)
        self._rounds.reach_boundary(wait_s=wait_s)
        await self._end()

    async def _end(self) -> RoundEnd:
        while True:
            if not isinstance(self._rounds.exchange, Absent):
                await self.driver.wait_until_over(self._rounds.wait_left_s)
            if end := self._rounds.poll():
                break
        if end.diverged:
            self.inner.restore({})
        clipped = self._admission.clipped
        self.cut_share += clipped.cut_share
        self.clipped += clipped.num_clipped > 0 or self._admission.scales.partner < 1
        return end

    def _count(self, end: RoundEnd) -> None:
        match end.outcome:
            case Swapped():
                self.swapped += 1
            case Half():
                self.half += 1
            case Alone():
                self.alone += 1

    # measuring

    def _note_point(self) -> None:
        """Validation loss, where the schedule passes the next of the points."""
        if self.progress * self._num_points >= len(self.curve) + 1 - AT_POINT:
            loss = self._material.loss(self.model)
            self.curve.append(Point(self.number, self.steps, now_s(), loss))


class Around:
    """An `Exchange` around another one; by itself it changes nothing."""

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner

    @property
    def pace(self) -> Pace:
        return self._inner.pace

    def open(self, round_index: int, *, state: dict[SectionName, Tensor], **options: Any) -> None:
        self._inner.open(round_index, state=state, **options)

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        self._inner.stage(chunks)

    def poll(self, *, wait_s: float) -> Outcome | None:
        return self._inner.poll(wait_s=wait_s)

    def withdraw(self) -> Outcome:
        return self._inner.withdraw()

    def late(self, round_index: int) -> Correction | None:
        return self._inner.late(round_index)

    def corrected(self) -> None:
        self._inner.corrected()

    def forget(self) -> None:
        self._inner.forget()


class Absent(Around):
    """The rounds of a replica that cannot be reached: it trains, and no round is opened to others."""

    def open(self, round_index: int, *, state: dict[SectionName, Tensor], **options: Any) -> None:
        steps = {name: options[name] for name in ("steps_done", "inner_steps", "shortest_round_s")}
        self.pace.open_round(now_s(), **steps)

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        pass

    def poll(self, *, wait_s: float) -> Outcome | None:
        return Alone("this replica cannot be reached")


def now_s() -> float:
    return asyncio.get_running_loop().time()
