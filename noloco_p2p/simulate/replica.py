"""Simulate a peer: its swaps and its outer optimizer are those of a real peer, on a virtual network and clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel

from noloco_p2p.gossip import gossip
from noloco_p2p.gossip.exchange import Exchange
from noloco_p2p.gossip.frames import Hello
from noloco_p2p.gossip.seams import Outside
from noloco_p2p.gossip.service import PeerService
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.mixing import Closing, Mixing, Swapped
from noloco_p2p.outer.noloco import CLOSING_WAIT_S, LOOK_S
from noloco_p2p.outer.weights import Weights
from noloco_p2p.simulate.clock import InlineExecutor
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan, peer_name
from noloco_p2p.simulate.result import Point, Swaps
from noloco_p2p.spec import TrainerSpec, TrainSpec
from noloco_p2p.telemetry.metrics import Metrics
from noloco_p2p.testing.memory import MemoryDirectory, MemoryNetwork, MemoryTransport
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.model import loss_for
from noloco_p2p.transfer.donor import state_file_bytes

AT_POINT = 1e-6  # tolerance, because progress is a sum of fractions
END_S = 60.0  # for which a peer that leaves lets its swaps end


class SimulatedPeer:
    """The base class of replicas, which train a whole model, and of nodes, which train one stage.

    `train` configures the inner optimizer. `is_absent` returns whether the peer does not swap in an inner step.
    `Mixing` explains `follows_caller`.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        model: PreTrainedModel,
        train: TrainSpec,
        *,
        peer_id: str,
        network: MemoryNetwork,
        seed: int,
        is_absent: Callable[[int], bool],
        follows_caller: bool = False,
    ) -> None:
        self.peer_id = peer_id
        self.model = model
        self.inner = InnerStep(model, train, loss=loss_for(spec.data))
        self.weights = Weights(FlatParameters(model), spec.outer, seed=seed)
        self.steps = 0
        self.swaps: list[Swapped] = []
        self.metrics = Metrics()
        self.mixing: Mixing  # from `enter` on
        self._link: gossip.Link
        self._spec = spec
        self._network = network
        self._is_absent = is_absent
        self._follows_caller = follows_caller
        self._hello = Hello(peer_id, spec.name, spec.digest(), layout=self.weights.parameters.layout())
        self._service = PeerService(
            Outside(
                spec=spec,
                hello=lambda: self._hello,
                transport=MemoryTransport(network, lambda: self._hello),
                directory=MemoryDirectory(network, own_id=peer_id),
                executor=InlineExecutor(),
                rng=random.Random(f"pairing/{seed}/{peer_id}"),
                cpu_clock=now_s,  # computing takes no virtual time
            )
        )
        self._entered_s = self._left_s = 0.0

    @property
    def progress(self) -> float:
        return self.mixing.progress

    @property
    def exchange(self) -> Exchange:
        return self.mixing.exchange

    def current_weights(self) -> Tensor:
        """Return a copy of the model's flat weights."""
        return self.weights.parameters.read(0, self.weights.num_elements)

    @property
    def state_bytes(self) -> int:
        """The size of the state that a newcomer fetches."""
        return state_file_bytes(self.weights.num_elements, self._spec.outer)

    @property
    def sent_bytes(self) -> int:
        """The payload bytes of all swaps."""
        return self._service.counts.bytes_sent

    def swap_figures(self) -> Swaps:
        present_s = (self._left_s or now_s()) - self._entered_s
        return Swaps(
            committed=len(self.swaps),
            failed=sum(self._service.counts.failures.values()),
            age_steps=sum(swap.age_steps for swap in self.swaps) / max(1, len(self.swaps)),
            link_use=self._link.moved_s / max(1e-9, present_s),
            clipped_pieces=self.metrics.clipped_pieces,
        )

    async def enter(self, donor: SimulatedPeer | None = None) -> None:
        """Become reachable. A newcomer takes over the state of its donor."""
        self._entered_s = now_s()
        exchange = await self._service.begin(self.weights.num_swapped)
        assert self._service.gossip
        self._link = self._service.gossip.link
        self.mixing = Mixing(
            self._spec,
            self.weights,
            exchange,
            self.metrics,
            clock=now_s,
            cpu_clock=now_s,
            follows_caller=self._follows_caller,
        )
        if donor:
            self.weights.take(donor.weights.tensors())
            self.mixing.restart(progress=donor.progress)
        self._look_whether_absent()
        self._network.add(self.peer_id, self._service)

    def step_taken(self) -> None:
        """Count an inner step, and apply the swaps that have arrived. The caller takes the outer step if it is due."""
        self.steps += 1
        self.mixing.step_taken()
        self._look_whether_absent()
        self.apply()

    def apply(self) -> bool:
        """Apply the swaps that have arrived. Return whether there were any.

        A peer whose weights are not finite does not swap any more.
        """
        swapped = [] if self.exchange.has_diverged else self.mixing.apply()
        self.swaps += swapped
        return bool(swapped)

    async def close(self) -> None:
        """Swap without training, as `NoLoCo.close` does."""
        self._service.state = "training"
        closing = Closing(self.mixing, now_s(), wait_s=CLOSING_WAIT_S)
        while not (closing.is_over(now_s()) or self.exchange.has_diverged):
            await self.exchange.settled(LOOK_S)
            closing.note(now_s(), has_swapped=self.apply())

    async def depart(self) -> None:
        """Let the swaps that have begun end, and leave the network."""
        await self._service.hold(timeout_s=END_S)
        self.apply()
        self._network.remove(self.peer_id)
        await self.stop()

    async def stop(self) -> None:
        self._left_s = now_s()
        await self._service.stop()

    def _look_whether_absent(self) -> None:
        is_away = self.exchange.has_diverged or self._is_absent(self.steps)
        self._service.state = "paused" if is_away else "training"


class SimulatedReplica(SimulatedPeer):
    """A replica of the whole model. `run` trains until the schedule is done or `leave` is called."""

    def __init__(self, number: int, plan: Plan, material: Material, network: MemoryNetwork) -> None:
        peer_id = peer_name(number)
        super().__init__(
            material.spec,
            material.model(),
            material.spec.train,
            peer_id=peer_id,
            network=network,
            seed=plan.seed,
            is_absent=lambda step: plan.churn.is_absent(peer_id, step, seed=plan.seed),
        )
        self.number = number
        self.curve: list[Point] = []
        self._material = material
        self._batches = material.batches(peer_id, replica=number)
        self._step_s = plan.seconds_per_step(number)
        self._num_points, self._next_point = plan.evaluations, 0
        self._is_leaving = False

    def leave(self) -> None:
        """Leave after the current inner step."""
        self._is_leaving = True

    async def run(self, donor: SimulatedPeer | None = None) -> None:
        """Train until the schedule is done, and then take part in closing swaps."""
        await self.enter(donor)
        self._note_point()
        while self.progress < 1 and not self._is_leaving:
            await asyncio.sleep(self._step_s)
            self.inner(next(self._batches), progress=self.progress)
            self.step_taken()
            if self.mixing.is_due:
                await self._outer_step()
            self._note_point()
        if not self._is_leaving:
            await self.close()
        await self.depart()

    async def _outer_step(self) -> None:
        outer = self._spec.outer
        if outer.wait and self._service.state == "training":
            await self.exchange.settled(outer.max_wait_s)
            self.apply()
        self.mixing.outer_step()

    def _note_point(self) -> None:
        """Add the next point to the curve if the progress has reached it."""
        reached = int(self.progress * self._num_points + AT_POINT)
        if reached >= self._next_point:
            self._next_point = reached + 1
            loss = self._material.loss_at_point(self.model, num_points=self._num_points)
            self.curve.append(Point(self.number, self.steps, now_s(), loss, self.sent_bytes))


def now_s() -> float:
    return asyncio.get_running_loop().time()
