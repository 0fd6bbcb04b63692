"""Run the swaps of a swarm on a virtual clock, with all inner steps computed in one batched model.

Weights, coding, update filter, outer step, ages of units, shares and positions in the run are those of real peers. This
file replaces two things. `Steps` computes the inner steps of all replicas at once: the weights of a replica do not
change between two of its steps, so all steps in progress can be computed when the first of them ends. `Swarm` replaces
the protocol with which peers find partners: replicas whose links are free meet at random, and a swap takes as long as
its bytes take on the slower link. One round trip later, both apply it after their next inner step.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from statistics import fmean

import torch
from stack import Stack, StackOptimizer
from torch import Tensor

from noloco_p2p.gossip.coder import Coder, Coding
from noloco_p2p.gossip.exchange import Committed, Exchange
from noloco_p2p.gossip.gossip import IDLE_S, ROUND_TRIPS, SLICE_STEPS, SWAP_ID_BYTES
from noloco_p2p.gossip.pairing import Shares
from noloco_p2p.gossip.units import Slice
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.outer.mixing import Mixing, Swapped
from noloco_p2p.outer.weights import Weights
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Event, Plan, peer_name
from noloco_p2p.simulate.result import Point, Result, Swaps
from noloco_p2p.telemetry.metrics import Metrics

SAME_MOMENT_S = 1e-3
FIRST_BYTES = 0.6  # per element; the size of the first slice assumes it


def run_swarm(material: Material, plan: Plan, *, limit_s: float | None = None, claimed: int = 0) -> Result:
    """Run the lab for the steps of the spec, or for `limit_s`, which is then the whole schedule of the learning rate.

    Transfers take as long as those of a model with `claimed` parameters, or of this one if it is 0.
    """
    return run_virtual(Swarm(material, plan, limit_s=limit_s, claimed=claimed).run())


class Steps:
    """The inner steps of all replicas."""

    def __init__(self, stack: Stack, optimizer: StackOptimizer) -> None:
        self._stack, self._optimizer = stack, optimizer
        self._begun: dict[int, tuple[Tensor, float]] = {}
        self._computed: dict[int, Tensor] = {}

    def begin(self, number: int, tokens: Tensor, progress: float) -> None:
        """Begin a step of a replica, whose weights must not change until it ends."""
        self._begun[number] = tokens, progress

    def end(self, number: int) -> None:
        """End the step of a replica, and set its weights."""
        if number not in self._computed:
            numbers, (tokens, progress) = [*self._begun], zip(*self._begun.values(), strict=True)
            self._begun.clear()
            rows = self._stack.flat[numbers]
            gradients = self._stack.gradients(rows, torch.stack(tokens))
            self._optimizer.step(rows, numbers, gradients, progress)
            self._computed.update(zip(numbers, rows, strict=True))
        self._stack.flat[number] = self._computed.pop(number)

    def drop(self, number: int) -> None:
        self._begun.pop(number, None)
        self._computed.pop(number, None)


class LabReplica:
    """The parts of a peer that the lab does not replace, around one row of the stack."""

    def __init__(self, number: int, lab: Swarm, donor: LabReplica | None) -> None:
        self.number, self.name, self._lab = number, peer_name(number), lab
        spec, plan = lab.material.spec, lab.plan
        self.step_s, self.link = plan.seconds_per_step(number), plan.link(number)
        if donor:
            lab.stack.flat[number] = lab.stack.flat[donor.number]
            lab.optimizer.forget(number)
        self.weights = Weights(FlatParameters(lab.stack.module(number)), spec.outer, seed=number)
        self.exchange = Exchange(self.weights.units, asyncio.get_running_loop())
        self.coder = Coder(spec.codec.weights, self.weights.units)
        self.metrics = Metrics()
        self.mixing = Mixing(spec, self.weights, self.exchange, self.metrics, clock=lab.now_s, cpu_clock=lab.now_s)
        self.exchange.num_live = lambda: len(lab.live)
        self.exchange.on_open = lab.opened
        if donor:
            self.weights.take(donor.weights.tensors())
            self.mixing.restart(progress=donor.mixing.progress)
        self.swaps: list[Swapped] = []
        self.curve: list[Point] = []
        self.steps = self.sent_bytes = self.num_failed = 0
        self.moved_s = 0.0
        self.is_swapping = self.is_leaving = False
        self.shares = Shares()
        self.free_since_s, self.agreed_step = lab.now_s(), -(1 << 60)
        self.bytes_an_element = FIRST_BYTES

    async def train(self, batches: Iterator[Tensor], phase_s: float) -> None:
        lab, outer = self._lab, self._lab.material.spec.outer
        await asyncio.sleep(phase_s)
        while self.mixing.progress < 1 and not self.is_leaving:
            lab.steps.begin(self.number, next(batches), self.mixing.progress)
            await asyncio.sleep(self.step_s)
            lab.steps.end(self.number)
            self.steps += 1
            self.mixing.step_taken()
            self.swaps += self.mixing.apply()
            lab.match()
            left_s = (lab.limit_s or math.inf) - lab.now_s()
            if self.mixing.is_due:
                if outer.wait:
                    await self.exchange.settled(max(0.0, min(outer.max_wait_s, left_s)))
                    self.swaps += self.mixing.apply()
                self.mixing.outer_step()
            if lab.limit_s:
                self.mixing.progress = min(1.0, lab.now_s() / lab.limit_s)
            elif self.mixing.progress * lab.plan.evaluations >= len(self.curve) + 1 - 1e-9:
                [loss] = lab.stack.evaluate(lab.stack.flat[[self.number]], lab.material.validation)
                self.curve.append(Point(self.number, self.steps, lab.now_s(), loss, self.sent_bytes))

    def may_swap(self) -> bool:
        plan, is_waiting = self._lab.plan, self._lab.material.spec.outer.wait
        is_absent = plan.churn.is_absent(self.name, self.steps, seed=plan.seed)
        is_early = self.exchange.step < self.agreed_step + self._lab.least_steps
        return not (self.is_swapping or is_absent or is_early) and (self.exchange.is_open or not is_waiting)

    def takes(self, other: LabReplica) -> bool:
        """Return whether another replica has a share left of this one's swaps, or this one is idle.

        If a replica with a least number of steps between swaps did not wait for all others, the same two would be the
        first to meet in each round. Peers need no such rule, because they do not look for each other at fixed times.
        """
        is_late = self.exchange.step >= self.agreed_step + 2 * self._lab.least_steps
        is_idle = is_late and self._lab.now_s() - self.free_since_s >= IDLE_S
        return is_idle or not self.shares.has_had(other.name)

    def slice_s(self) -> float:
        return max(SLICE_STEPS * self.step_s, ROUND_TRIPS * 4 * self.link.delay_ms / 1e3)

    def at_most(self) -> int:
        """Return how many units a swap of this replica carries, as `Gossip` chooses it."""
        if self._lab.material.spec.outer.wait:
            return self.weights.units.num_units
        bytes_per_s = min(self.link.up_mbit_s, self.link.down_mbit_s) * 1e6 / 8 / self._lab.scale
        return self.weights.units.count_of(bytes_per_s / self.bytes_an_element * self.slice_s())


class Swarm:
    def __init__(self, material: Material, plan: Plan, *, limit_s: float | None = None, claimed: int = 0) -> None:
        self.material, self.plan, self.limit_s = material, plan, limit_s
        self.stack = Stack(material, plan.num_replicas)
        self.optimizer = StackOptimizer(self.stack, material.spec.train)
        self.steps = Steps(self.stack, self.optimizer)
        self.scale = claimed / self.stack.num_parameters if claimed else 1.0
        least = material.spec.outer.min_inner_steps
        self.least_steps = 0 if least == "auto" else least
        self.live: dict[int, LabReplica] = {}
        self.all: list[LabReplica] = []
        self._rng = random.Random(f"lab/{plan.seed}")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._is_over = False
        self._looks_again: asyncio.TimerHandle | None = None

    @staticmethod
    def now_s() -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> Result:
        events = self.plan.churn.events
        first = {event.replica: event.kind for event in reversed(events)}
        async with self._group:
            for number in range(self.plan.num_replicas):
                if first.get(number) != "join":
                    self._start(number, None)
            self.match()
            for event in events:
                asyncio.get_running_loop().call_at(event.at_s, self._change, event)
            while pending := [task for task in self._tasks.values() if not task.done()]:
                await asyncio.wait(pending)
            self._is_over = True  # swaps that have begun still end
        virtual_s = self.now_s()
        for replica in self.live.values():
            replica.swaps += replica.mixing.apply()
        self._close()
        return self._result(virtual_s)

    def _start(self, number: int, donor: LabReplica | None) -> None:
        replica = LabReplica(number, self, donor)
        self.live[number] = replica
        self.all.append(replica)
        batches = self.material.batches(replica.name, replica=number)
        # The steps of real peers do not end at the same moment. Those of the paper's algorithm do, so that pairs are
        # random; otherwise, the same neighbours would meet at each outer step.
        phase_s = 0.0 if self.material.spec.outer.wait else self._rng.random() * replica.step_s
        self._tasks[number] = self._group.create_task(replica.train(batches, phase_s))

    def _change(self, event: Event) -> None:
        if self._is_over:
            return
        if event.kind == "join" and event.replica not in self.live:
            self._start(event.replica, self._rng.choice([*self.live.values()]))
            self.match()
        elif event.kind != "join" and event.replica in self.live:
            self.live.pop(event.replica).is_leaving = True
            self._tasks[event.replica].cancel()
            self.steps.drop(event.replica)

    # swaps

    def opened(self) -> None:
        """Match replicas that wait for a swap, after all that wait from this moment on have said so."""
        asyncio.get_running_loop().call_later(SAME_MOMENT_S, self.match)

    def match(self) -> None:
        """Let replicas whose links are free meet at random, if each may have a swap of the other."""
        waiting = [replica for replica in self.live.values() if replica.may_swap() and not self._is_over]
        self._rng.shuffle(waiting)
        while len(waiting) > 1:
            one = waiting.pop()
            other = next((each for each in waiting if one.takes(each) and each.takes(one)), None)
            if other is not None and self._begin(one, other):
                waiting.remove(other)
            else:
                self._look_again()

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        if self._looks_again is None or self._looks_again.when() <= loop.time():
            self._looks_again = loop.call_later(IDLE_S, self.match)

    def _begin(self, one: LabReplica, other: LabReplica) -> bool:
        ages, is_waiting = one.exchange.ages, self.material.spec.outer.wait
        reserved = ages.reserve(one.exchange.step, at_most=one.at_most(), all_free=is_waiting)
        if reserved is None:
            return False
        told, window = reserved
        at_most = min(one.at_most(), other.at_most())
        part = other.exchange.ages.choose(told, other.exchange.step, at_most=at_most)
        ages.end(window, mixed_at=None)
        if part is None:
            return False
        for replica, partner in ((one, other), (other, one)):
            replica.exchange.ages.begin(part)
            replica.is_swapping, replica.agreed_step = True, replica.exchange.step
            others = [each.name for each in self.live.values() if each is not replica]
            replica.shares.earn(others, num_live=1 + len(others))
            replica.shares.swapped(partner.name)
        fills_link = at_most <= part.count < self.stack_units
        self._group.create_task(self._swap(one, other, part, fills_link=fills_link))
        return True

    async def _swap(self, one: LabReplica, other: LabReplica, part: Slice, *, fills_link: bool) -> None:
        pair, began_s = (one, other), self.now_s()
        told = [(each.mixing.progress, each.exchange.step) for each in pair]
        codings, num_bytes = self._coded(one, other, part)
        mbit_s = min(min(each.link.up_mbit_s, each.link.down_mbit_s) for each in pair)
        is_lost = self._rng.random() < self.plan.churn.lose
        moves_s = num_bytes * self.scale * 8 / 1e6 / mbit_s * (0.5 if is_lost else 1.0)
        arrives_s = moves_s + (one.link.delay_ms + other.link.delay_ms) * 2 / 1e3
        # Even on a link that could carry more, a swap follows another one only after the time of a slice.
        free_s = moves_s if fills_link else max(moves_s, min(each.slice_s() for each in pair))
        for replica in pair:
            replica.moved_s += moves_s
            replica.bytes_an_element += 0.25 * (num_bytes / len(codings[0].values) - replica.bytes_an_element)
        if not (is_waiting := self.material.spec.outer.wait):
            asyncio.get_running_loop().call_later(free_s, self._free, pair)
        await asyncio.sleep(arrives_s)
        is_lost |= any(each.is_leaving for each in pair)
        for replica, partner, coding, (_, step), (progress, _) in zip(
            pair, pair[::-1], codings, told, told[::-1], strict=True
        ):
            replica.num_failed += is_lost
            replica.sent_bytes += 0 if is_lost else num_bytes
            if is_lost:
                replica.exchange.ages.end(part, mixed_at=None)
            else:
                self._commit(replica, partner, coding, progress, step, began_s)
        if is_waiting:
            self._free(pair)

    def _free(self, pair: tuple[LabReplica, LabReplica]) -> None:
        for replica in pair:
            replica.is_swapping, replica.free_since_s = False, self.now_s()
        self.match()

    @property
    def stack_units(self) -> int:
        return self.all[0].weights.units.num_units

    def _coded(self, one: LabReplica, other: LabReplica, part: Slice) -> tuple[list[Coding], int]:
        """Code the slice of both partners, in as many passes as it needs. Also return the bytes that each sends."""
        swap_id = self._rng.randbytes(SWAP_ID_BYTES)
        bounds = one.weights.units.bounds(part)
        first, second = one.coder.propose(part), other.coder.propose(part)
        codings = [
            Coding(each.coder, part, each.weights.read(*bounds), swap_id=swap_id, proposals=proposals)
            for each, proposals in ((one, (first, second)), (other, (second, first)))
        ]
        number, num_bytes, indices = 0, 0, [*range(len(codings[0].chunks))]
        while indices:
            payloads = [coding.encode(number, indices) for coding in codings]
            num_bytes += sum(map(len, payloads[0]))
            failed = [
                coding.check(number, indices, theirs) for coding, theirs in zip(codings, payloads[::-1], strict=True)
            ]
            assert failed[0] == failed[1]
            number, indices = number + 1, failed[0]
        return codings, num_bytes

    def _commit(
        self, replica: LabReplica, partner: LabReplica, coding: Coding, progress: float, step: int, began_s: float
    ) -> None:
        coding.learn()
        halves = replica.exchange.judge(coding, partner.name)
        replica.exchange.committed(
            Committed(
                coding.swap_id, partner.name, progress, step, coding.part, coding.start, halves,
                snapshot_step=step, seconds=self.now_s() - began_s, num_live=len(self.live),
            )
        )  # fmt: skip

    def _close(self) -> None:
        """Mix all weights without training, as peers do at the end of a run. This takes no virtual time."""
        live = [*self.live.values()]
        for replica in live:
            replica.mixing.rest()
        for _ in range(max((replica.mixing.missing_mixings() for replica in live), default=0)):
            order = self._rng.sample(live, len(live))
            for one, other in zip(order[::2], order[1::2], strict=False):
                part = Slice(0, self.stack_units)
                codings, _ = self._coded(one, other, part)
                for replica, partner, coding in zip((one, other), (other, one), codings, strict=True):
                    replica.exchange.ages.begin(part)
                    self._commit(replica, partner, coding, 1.0, replica.exchange.step, self.now_s())
                    replica.mixing.apply()

    def _result(self, virtual_s: float) -> Result:
        rows = self.stack.flat[[*self.live]]
        steps = sum(replica.steps for replica in self.all)
        sent_bytes = sum(replica.sent_bytes for replica in self.all)
        return Result(
            rule="noloco",
            **self.stack.judge(rows, self.material.validation),
            sent_bytes=sent_bytes / len(self.all),
            sent_per_parameter_step=sent_bytes / max(1, steps) / self.stack.num_parameters,
            steps=steps / len(self.all),
            virtual_s=virtual_s,
            curve=tuple(point for replica in self.all for point in replica.curve),
            swaps=Swaps.mean(
                Swaps(
                    committed=len(replica.swaps),
                    failed=replica.num_failed,
                    age_steps=fmean([swap.age_steps for swap in replica.swaps] or [0.0]),
                    link_use=replica.moved_s / virtual_s,
                    clipped_pieces=replica.metrics.clipped_pieces,
                )
                for replica in self.all
            ),
        )
