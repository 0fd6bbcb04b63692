"""The rounds of a simulated peer: the code of a real peer on a virtual network, with counters of the outcomes.

`SimulatedReplica` trains a whole model, and `StageNode` trains one stage.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from noloco_p2p.gossip.deadlines import INTERNET, Deadlines
from noloco_p2p.gossip.exchange import Exchange, LoopExchange
from noloco_p2p.gossip.frames import Hello, SectionName
from noloco_p2p.gossip.outcome import Alone, Correction, Half, Outcome, Swapped
from noloco_p2p.gossip.rate_estimators import StepRate
from noloco_p2p.gossip.round_stack import build_round_stack
from noloco_p2p.optim.gates import GateLimits, gate_limits
from noloco_p2p.optim.mixing import closing_wait_s
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.outer.rounds import RoundEnd, Rounds
from noloco_p2p.outer.update_filter import UpdateFilter
from noloco_p2p.simulate.clock import InlineExecutor
from noloco_p2p.simulate.network import LinkNetwork, LinkTransport
from noloco_p2p.spec import TrainerSpec, TrainSpec
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.testing.memory import MemoryDirectory, Wrap, unchanged
from noloco_p2p.trainer.inner_step import InnerStep


class SimulatedPeer:
    """The base class of simulated peers. Its counters can be read at any time.

    `train` configures the inner optimizer. `absent` is the fraction of rounds in which no other peer can reach this
    one. If `gates` is None, the limits of the spec apply. `Rounds` explains `follows_caller`.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        model: PreTrainedModel,
        train: TrainSpec,
        *,
        peer_id: str,
        network: LinkNetwork,
        absent: float,
        seed: int,
        gates: GateLimits | None = None,
        wrap: Wrap = unchanged,
        follows_caller: bool = False,
        deadlines: Deadlines = INTERNET,
    ) -> None:
        self.peer_id = peer_id
        self.model = model
        self.state = OuterState(model, spec.outer, limits=gates or gate_limits(spec.codec))
        self.inner = InnerStep(model, train)
        self.steps = 0
        self.cut_share = 0.0  # `Clipped.cut_share`, summed over swaps
        self.clipped = 0  # rounds in which a gate clipped what a partner sent
        self.swapped = self.half = self.alone = 0  # rounds with inner steps, by outcome
        self._spec = spec
        self._network = network
        self._wrap = wrap
        self._absent = absent
        self._absences = random.Random(f"absent/{seed}/{peer_id}")
        self._is_leaving = False
        self._metrics = Metrics()
        self._hello = Hello(peer_id, spec.name, spec.digest(), layout=self.state.layout)
        self.directory = MemoryDirectory(network, own_id=peer_id)
        self._stack = build_round_stack(
            spec,
            hello=lambda: self._hello,
            transport=LinkTransport(network, lambda: self._hello, wrap=wrap),
            directory=self.directory,
            executor=InlineExecutor(),
            rng=random.Random(f"pairing/{seed}/{peer_id}"),
            deadlines=deadlines,
            clock=now_s,
        )
        self.driver = self._stack.driver
        self._admission = UpdateFilter(self.state, self._metrics)
        self._exchange: Exchange = LoopExchange(spec, self.driver)
        self._rounds = Rounds(
            spec, self._exchange, self.state, self._admission, follows_caller=follows_caller, clock=now_s
        )

    @property
    def progress(self) -> float:
        return self._rounds.progress

    @property
    def is_at_boundary(self) -> bool:
        return self._rounds.is_at_boundary

    @property
    def refused(self) -> int:
        """The number of times that a gate refused what a partner sent."""
        return self._metrics.refused_gradients

    @property
    def late(self) -> int:
        """The number of outer gradients that were applied after their boundary."""
        return self._metrics.late

    def take(self, donor: SimulatedPeer) -> None:
        """Take over the state of another peer, as a newcomer does."""
        self.state.take(donor.state.tensors())
        self._rounds.restart(round_index=donor._rounds.round, progress=donor.progress)

    # one round

    def _enter(self) -> None:
        self._network.add(self.peer_id, self._stack.service, wrap=self._wrap)

    def _open_round(self) -> None:
        if self._absences.random() < self._absent:
            self._network.vanish(self.peer_id)
            self._rounds.exchange = Absent(self._exchange)
        else:
            self._enter()
            self._rounds.exchange = self._exchange
        self._rounds.open()

    async def _closing_round(self) -> None:
        """Run a round without training, in which both partners move to their midpoint."""
        self._rounds.exchange = self._exchange
        wait_s = closing_wait_s(self._spec.outer, self.driver.step_rate.seconds_per_round())
        self._rounds.open(patience_s=wait_s, is_closing=True)
        self._rounds.reach_boundary(wait_s=wait_s)
        await self._end()

    async def _end(self) -> RoundEnd:
        while True:
            await self._wait_until_over()
            if end := self._poll():
                return end

    async def _wait_until_over(self) -> None:
        if not isinstance(self._rounds.exchange, Absent):
            await self.driver.wait_until_over(self._rounds.wait_left_s)

    def _poll(self) -> RoundEnd | None:
        """If the round is over, take the outer step and return its result. Otherwise, return None."""
        end = self._rounds.poll()
        if end is None:
            return None
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


class Around:
    """An `Exchange` that wraps another one and forwards all calls to it."""

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner

    @property
    def step_rate(self) -> StepRate:
        return self._inner.step_rate

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
    """An exchange for a replica that cannot be reached. The replica trains, but its rounds are not open to others."""

    def open(self, round_index: int, *, state: dict[SectionName, Tensor], **options: Any) -> None:
        steps = {name: options[name] for name in ("steps_done", "inner_steps", "shortest_round_s")}
        self.step_rate.open_round(now_s(), **steps)

    def stage(self, chunks: Callable[[], Iterable[Tensor]]) -> None:
        pass

    def poll(self, *, wait_s: float) -> Outcome | None:
        return Alone("this replica cannot be reached")


def now_s() -> float:
    return asyncio.get_running_loop().time()
