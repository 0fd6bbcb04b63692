"""Simulates the baselines, which are rules that see all replicas (`optim/rules.py`), on the same text and model."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from noloco_p2p.codec import chunk_bounds, get_codec, section_bytes
from noloco_p2p.optim.allreduce import Ring, ring_bytes, ring_s
from noloco_p2p.optim.rules import RULES, Rule
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.result import Point, Result, judge
from noloco_p2p.simulate.swarm import peer_name
from noloco_p2p.trainer.inner_step import InnerStep


def simulate_lockstep(material: Material, plan: Plan, *, rule: str) -> Result:
    """Simulate replicas that take every step together. Broken calls (`churn.lose`) and closing rounds do not apply.

    A replica that is absent from a round of a collective rule contributes nothing to the mean. It then receives the
    mean as one more encoded vector, so it continues with the weights of the others. In a real system, the absence would
    cost at least as much.
    """
    return _Lockstep(material, plan, rule).run()


def ring_of(rule: str, codec_name: str, *, num_elements: int) -> Ring:
    """Return the ring all-reduce of a collective rule.

    DiLoCo uses the codec `codec_name`. The rule `ddp` sends fp32 gradients if the codec is fp32, and bf16 gradients
    otherwise, as DDP's hook does.
    """
    name = "bf16" if rule == "ddp" and codec_name != "fp32" else codec_name
    if name == "fp32":
        return Ring()
    codec = get_codec(name)

    def coded(vector: Tensor) -> Tensor:
        if not vector.isfinite().all():
            return vector  # codecs refuse such values, and a run that has diverged must stay diverged
        parts = [vector[start:stop] for start, stop in chunk_bounds(vector.numel())]
        return torch.cat([codec.decode(codec.encode(part), num_elements=part.numel()) for part in parts])

    return Ring(coded, section_bytes(codec, num_elements) / num_elements)


class _Lockstep:
    def __init__(self, material: Material, plan: Plan, name: str) -> None:
        self.material = material
        self.plan = plan
        self.name = name
        self.outer = material.spec.outer
        self.train = material.spec.train
        self.models = [material.model() for _ in range(plan.num_replicas)]
        self.inner = [InnerStep(model, self.train) for model in self.models]
        self.flat = [FlatParameters(inner.model) for inner in self.inner]
        self.batches = [material.batches(peer_name(number), replica=number) for number in range(plan.num_replicas)]
        self.num_elements = self.flat[0].num_elements
        self.slow = self._fast()
        self.ring = ring_of(name, material.spec.codec.outer_gradient, num_elements=self.num_elements)
        self.rule: Rule = RULES[name](self.outer, self.ring)
        self.step_bytes, self.round_bytes = self.rule.sent_bytes(self.num_elements, plan.num_replicas)
        self.absences = [
            random.Random(f"absent/{plan.seed}/{peer_name(number)}") for number in range(plan.num_replicas)
        ]
        self.present = list(range(plan.num_replicas))  # replicas that are present in this round
        self.sent_bytes = 0.0  # mean over replicas
        self.virtual_s = 0.0
        self.curve: list[Point] = []

    def run(self) -> Result:
        inner_steps = self.outer.first_inner_steps
        num_rounds = -(-self.train.total_steps // inner_steps)
        for round_index in range(num_rounds):
            self._open_round()
            for step in range(inner_steps):
                self._inner_step((round_index * inner_steps + step) / self.train.total_steps)
            self._outer_step()
            if (round_index + 1) * self.plan.evaluations / num_rounds >= len(self.curve) + 1:
                loss = self.material.loss(self.models[0])
                self.curve.append(Point(0, (round_index + 1) * inner_steps, self.virtual_s, loss))
        steps = num_rounds * inner_steps
        judged = judge(self.material, list(self.slow))
        return Result(
            rule=self.name,
            **judged,
            sent_bytes=self.sent_bytes,
            sent_per_parameter_step=self.sent_bytes / steps / self.num_elements,
            steps=steps,
            **dict.fromkeys(("swapped", "half", "alone", "refused", "clipped", "cut_share", "late"), 0),
            **dict.fromkeys(("modulo_chunks", "plain_chunks", "extended_chunks", "broken_chunks"), 0),
            virtual_s=self.virtual_s,
            curve=tuple(self.curve),
        )

    def _open_round(self) -> None:
        absent = self.plan.churn.absent if self.rule.is_collective else 0.0
        self.present = [number for number, rng in enumerate(self.absences) if rng.random() >= absent]

    def _inner_step(self, progress: float) -> None:
        for inner, batches in zip(self.inner, self.batches, strict=True):
            inner.backward(next(batches))
        if self.step_bytes:
            self._mix_gradients()
        for inner in self.inner:
            inner.update(progress=progress)
        slowest_s = max(self.plan.seconds_per_step(number) for number in range(self.plan.num_replicas))
        self.virtual_s += slowest_s + self._exchange_s(self.step_bytes)

    def _mix_gradients(self) -> None:
        own = [inner.gradients() for inner in self.inner]
        stacked = torch.stack([torch.cat([gradient.flatten() for gradient in gradients]) for gradients in own])
        if not self.present:
            stacked.zero_()  # no replica gets gradients in this round
        else:
            mixed = stacked[self.present]
            self.rule.mix_gradients(mixed)
            self._give_to_all(stacked, mixed)
        self._count_bytes(self.step_bytes)
        for gradients, row in zip(own, stacked, strict=True):
            parts = row.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def _outer_step(self) -> None:
        if self.present:
            slow = self.slow[self.present]
            self.rule.outer_step(slow, self._fast()[self.present])
            self._give_to_all(self.slow, slow)
        for flat, row in zip(self.flat, self.slow, strict=True):
            flat.write(0, row)
        self._count_bytes(self.round_bytes)
        self.virtual_s += self._exchange_s(self.round_bytes)

    def _give_to_all(self, rows: Tensor, mixed: Tensor) -> None:
        """Give each present replica its row of `mixed`, and each absent one the first row."""
        rows[self.present] = mixed
        absent = [number for number in range(len(rows)) if number not in self.present]
        rows[absent] = mixed[:1].expand(len(absent), -1)

    def _count_bytes(self, num_bytes: float) -> None:
        """Count the bytes of an exchange in which each replica would send `num_bytes` if all were present."""
        num_replicas, num_present = self.plan.num_replicas, len(self.present)
        if num_bytes and num_present < num_replicas:
            vector = self.ring.bytes_per_element * self.num_elements
            of_absent = (num_replicas - num_present) * vector if num_present else 0.0
            num_bytes = (num_present * ring_bytes(vector, max(1, num_present)) + of_absent) / num_replicas
        self.sent_bytes += num_bytes

    def _fast(self) -> Tensor:
        return torch.stack([flat.read(0, self.num_elements) for flat in self.flat])

    def _exchange_s(self, num_bytes: float) -> float:
        """Return how many seconds all replicas wait for an exchange over the slowest link."""
        if not num_bytes:
            return 0.0
        links = [self.plan.link(number) for number in range(self.plan.num_replicas)]
        bytes_per_s = min(min(link.up_mbit_s, link.down_mbit_s) for link in links) * 1e6 / 8
        delay_s = 2 * max(link.delay_ms for link in links) / 1e3
        return ring_s(num_bytes, self.plan.num_replicas, bytes_per_s=bytes_per_s, delay_s=delay_s)
