"""Replicas under a rule that sees all of them at once (`optim/rules.py`): the baselines, on the same text and model."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from noloco_p2p.optim.allreduce import ring_s
from noloco_p2p.optim.rules import RULES, Rule
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.result import Point, Result, judge
from noloco_p2p.simulate.swarm import peer_name
from noloco_p2p.trainer.inner_step import InnerStep


def simulate_lockstep(material: Material, plan: Plan, *, rule: str) -> Result:
    """Everybody takes every step together. Of the plan, churn and closing rounds do not apply to these rules."""
    return _Lockstep(material, plan, rule).run()


class _Lockstep:
    def __init__(self, material: Material, plan: Plan, name: str) -> None:
        self.material = material
        self.plan = plan
        self.name = name
        self.outer = material.spec.outer
        self.train = material.spec.train
        self.rule: Rule = RULES[name](self.outer, random.Random(f"rule/{plan.seed}"))
        self.models = [material.model() for _ in range(plan.num_replicas)]
        self.inner = [InnerStep(model, self.train) for model in self.models]
        self.flat = [FlatParameters(inner.model) for inner in self.inner]
        self.batches = [material.batches(peer_name(number), replica=number) for number in range(plan.num_replicas)]
        self.num_elements = self.flat[0].num_elements
        self.slow = self._fast()
        self.step_bytes, self.round_bytes = self.rule.sent_bytes(self.num_elements, plan.num_replicas)
        self.virtual_s = 0.0
        self.curve: list[Point] = []

    def run(self) -> Result:
        inner_steps = self.outer.first_inner_steps
        num_rounds = -(-self.train.total_steps // inner_steps)
        for round_index in range(num_rounds):
            for step in range(inner_steps):
                self._inner_step((round_index * inner_steps + step) / self.train.total_steps)
            self._outer_step()
            if (round_index + 1) * self.plan.evaluations / num_rounds >= len(self.curve) + 1:
                loss = self.material.loss(self.models[0])
                self.curve.append(Point(0, (round_index + 1) * inner_steps, self.virtual_s, loss))
        steps = num_rounds * inner_steps
        sent_bytes = steps * self.step_bytes + num_rounds * self.round_bytes
        judged = judge(self.material, list(self.slow))
        return Result(
            rule=self.name,
            **judged,
            sent_bytes=sent_bytes,
            sent_per_parameter_step=sent_bytes / steps / self.num_elements,
            steps=steps,
            **dict.fromkeys(("swapped", "half", "alone", "refused", "clipped", "cut_share", "late"), 0),
            **dict.fromkeys(("modulo_chunks", "plain_chunks", "extended_chunks", "broken_chunks"), 0),
            virtual_s=self.virtual_s,
            curve=tuple(self.curve),
        )

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
        self.rule.mix_gradients(stacked)
        for gradients, mixed in zip(own, stacked, strict=True):
            parts = mixed.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def _outer_step(self) -> None:
        self.rule.outer_step(self.slow, self._fast())
        for flat, slow in zip(self.flat, self.slow, strict=True):
            flat.write(0, slow)
        self.virtual_s += self._exchange_s(self.round_bytes)

    def _fast(self) -> Tensor:
        return torch.stack([flat.read(0, self.num_elements) for flat in self.flat])

    def _exchange_s(self, num_bytes: float) -> float:
        """Over the slowest link; everybody waits for it."""
        if not num_bytes:
            return 0.0
        links = [self.plan.link(number) for number in range(self.plan.num_replicas)]
        bytes_per_s = min(min(link.up_mbit_s, link.down_mbit_s) for link in links) * 1e6 / 8
        delay_s = 2 * max(link.delay_ms for link in links) / 1e3
        if self.rule.is_collective:
            return ring_s(num_bytes, self.plan.num_replicas, bytes_per_s=bytes_per_s, delay_s=delay_s)
        return num_bytes / bytes_per_s + delay_s
