"""Compare NoLoCo with rules that see all replicas at once, on the same text and model, on a virtual clock.

    python benchmarks/rules.py SPEC.toml [--rules noloco,diloco,ddp] [--replicas N] [--link cable] [--absent 0.2]

No peer of a swarm could run the other rules: `ddp` averages the gradients of all replicas at every step, as DDP and
FSDP do, `diloco` and `diloco-nesterov` take an outer step with the mean outer gradient, and with `local` replicas never
mix. `ddp` and both forms of DiLoCo use a ring all-reduce, in which each replica sends 2 (N - 1) / N encoded vectors,
and all replicas wait for the slowest link. With --absent, they average over the replicas that are present.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from noloco_p2p.codec import chunk_bounds, get_codec
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Churn, Plan, parse_links, peer_name
from noloco_p2p.simulate.result import Point, Result, judge, table
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.inner_step import InnerStep

RULES = ("diloco", "diloco-nesterov", "ddp", "local")


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring all-reduce of fp32 vectors with encoded messages.

    `coded` is a function that encodes and decodes a vector; if it is None, messages are lossless. `bytes_per_element`
    is the size of an encoded message per element.

    Each replica owns a segment of the vector. Each of the N - 1 hops of the reduce-scatter re-encodes a partial sum,
    and its receiver adds its own segment in fp32. The owner encodes the mean once, and every replica, including the
    owner, uses the encoded mean. Errors therefore accumulate with N, but the results of all replicas are bitwise
    identical. PRIME works in the same way (see `ring_allreduce` in PrimeIntellect-ai/prime at 5cc57a0).
    """

    coded: Callable[[Tensor], Tensor] | None = None
    bytes_per_element: float = 4.0

    @classmethod
    def of(cls, rule: str, codec_name: str, *, num_elements: int) -> Ring:
        """Return the all-reduce of a rule in a run with the codec `codec_name`.

        int8 stands for `modulo`, which only two peers can use. The rule `ddp` sends fp32 gradients if the codec is
        fp32, and bf16 gradients otherwise, as DDP's hook does.
        """
        name = "bf16" if rule == "ddp" and codec_name != "fp32" else codec_name
        if name == "fp32":
            return cls()
        codec = get_codec("int8" if name == "modulo" else name)

        def coded(vector: Tensor) -> Tensor:
            if not vector.isfinite().all():
                return vector  # codecs refuse such values, and a run that has diverged must stay diverged
            parts = [vector[start:stop] for start, stop in chunk_bounds(vector.numel())]
            return torch.cat([codec.decode(codec.encode(part), shape=part.shape) for part in parts])

        return cls(
            coded, sum(codec.num_bytes((stop - start,)) for start, stop in chunk_bounds(num_elements)) / num_elements
        )

    def mean(self, vectors: Tensor) -> Tensor:
        """Return the mean of `vectors` (replicas, elements), with shape (elements,)."""
        num_replicas = len(vectors)
        if self.coded is None or num_replicas == 1:
            return vectors.mean(0)
        means = []
        for owner, segments in enumerate(vectors.tensor_split(num_replicas, dim=1)):
            total = segments[(owner + 1) % num_replicas]
            for hop in range(2, num_replicas + 1):
                total = self.coded(total) + segments[(owner + hop) % num_replicas]
            means.append(self.coded(total / num_replicas))
        return torch.cat(means)

    def sent_bytes(self, num_elements: int, num_replicas: int) -> float:
        """Return the number of bytes that each of N replicas sends: 2 (N - 1) / N times the size of the vector."""
        return 2 * (num_replicas - 1) / num_replicas * self.bytes_per_element * num_elements


class DiLoCo:
    """One outer optimizer for the mean outer gradient of all replicas.

    With the outer gradient g (which points downhill), the momentum m, and alpha and beta from the spec, the steps are

        heavy ball                m <- alpha m + beta g       slow weights += m
        Nesterov                  m <- alpha m + beta g       slow weights += beta g + alpha m

    `torch.optim.SGD` with lr = beta and momentum = alpha takes the same steps; `nesterov=True` selects the second one.
    DiLoCo (arXiv 2311.08105) uses Nesterov momentum with alpha = 0.9 and beta = 0.7. NoLoCo's reference code uses the
    heavy ball with alpha = 0.3 and beta = 0.7 as its baseline, which is NoLoCo with all replicas in one group.
    """

    def __init__(self, slow_weights: Tensor, ring: Ring, *, alpha: float, beta: float, is_nesterov: bool) -> None:
        self.slow_weights = slow_weights
        self._momentum = torch.zeros_like(slow_weights)
        self._ring = ring
        self._alpha = alpha
        self._beta = beta
        self._is_nesterov = is_nesterov

    def step(self, fast_weights: Tensor) -> None:
        """Take an outer step, in place, with the weights (replicas, elements) after the inner steps."""
        gradient = self._ring.mean(fast_weights - self.slow_weights)
        self._momentum.mul_(self._alpha).add_(gradient, alpha=self._beta)
        self.slow_weights += (
            self._beta * gradient + self._alpha * self._momentum if self._is_nesterov else self._momentum
        )


class Lockstep:
    """Replicas that take every step together. Events, broken calls (`churn.lose`) and closing swaps do not apply.

    A replica that is absent from an all-reduce contributes nothing to the mean. It then receives the mean as one more
    encoded vector, so all replicas stay equal. In a real system, the absence would cost at least as much.
    """

    def __init__(self, material: Material, plan: Plan, rule: str) -> None:
        self.material = material
        self.plan = plan
        self.rule = rule
        self.outer, self.train = material.spec.outer, material.spec.train
        self.replicas = range(plan.num_replicas)
        self.models = [material.model() for _ in self.replicas]
        self.inner = [InnerStep(model, self.train) for model in self.models]
        self.flat = [FlatParameters(inner.model) for inner in self.inner]
        self.batches = [material.batches(peer_name(number), replica=number) for number in self.replicas]
        self.num_elements = self.flat[0].num_elements
        self.ring = Ring.of(rule, material.spec.codec.weights, num_elements=self.num_elements)
        self.diloco: DiLoCo | None = None
        if rule.startswith("diloco"):
            alpha, beta, is_nesterov = self.outer.alpha, self.outer.beta, rule == "diloco-nesterov"
            self.diloco = DiLoCo(self._weights()[0], self.ring, alpha=alpha, beta=beta, is_nesterov=is_nesterov)
        self.step_s = max(plan.seconds_per_step(number) for number in self.replicas)
        self.sent_bytes = 0.0  # mean over replicas
        self.virtual_s = 0.0
        self.curve: list[Point] = []

    def run(self) -> Result:
        total = self.train.total_steps
        for step in range(total):
            for inner, batches in zip(self.inner, self.batches, strict=True):
                inner.backward(next(batches))
            if self.rule == "ddp":
                self._average_gradients(step)
            for inner in self.inner:
                inner.update(progress=step / total)
            self.virtual_s += self.step_s
            if self.diloco and ((step + 1) % self.outer.inner_steps == 0 or step + 1 == total):
                self._outer_step(self.diloco, step)
            if (step + 1) * self.plan.evaluations >= (len(self.curve) + 1) * total:
                self.curve.append(Point(0, step + 1, self.virtual_s, self.material.loss(self.models[0])))
        return Result(
            rule=self.rule,
            **judge(self.material, list(self._weights())),
            sent_bytes=self.sent_bytes,
            sent_per_parameter_step=self.sent_bytes / total / self.num_elements,
            steps=total,
            virtual_s=self.virtual_s,
            curve=tuple(self.curve),
        )

    def _average_gradients(self, step: int) -> None:
        """Replace the gradients of all replicas by the mean over those that are present, or by 0 if there are none."""
        gradients = [inner.gradients() for inner in self.inner]
        stacked = torch.stack([torch.cat([part.flatten() for part in own]) for own in gradients])
        present = self._present(step)
        mean = self.ring.mean(stacked[present]) if present else torch.zeros_like(stacked[0])
        for own in gradients:
            for gradient, part in zip(own, mean.split([part.numel() for part in own]), strict=True):
                gradient.copy_(part.view_as(gradient))
        self._count_exchange(len(present))

    @torch.no_grad()
    def _outer_step(self, diloco: DiLoCo, step: int) -> None:
        present = self._present(step)
        if present:
            diloco.step(self._weights()[present])
        for flat in self.flat:
            flat.write(0, diloco.slow_weights)
        self._count_exchange(len(present))

    def _present(self, step: int) -> list[int]:
        churn, seed = self.plan.churn, self.plan.seed
        return [number for number in self.replicas if not churn.is_absent(peer_name(number), step, seed=seed)]

    def _weights(self) -> Tensor:
        return torch.stack([flat.read(0, self.num_elements) for flat in self.flat])

    def _count_exchange(self, num_present: int) -> None:
        """Count the bytes of an all-reduce, and the time for which all replicas wait for the slowest link.

        Each replica sends 2 (N - 1) messages, each of which depends on the previous one.
        """
        num_replicas = self.plan.num_replicas
        if num_present:
            of_absent = (num_replicas - num_present) * self.ring.bytes_per_element * self.num_elements
            sent_bytes = num_present * self.ring.sent_bytes(self.num_elements, num_present) + of_absent
            self.sent_bytes += sent_bytes / num_replicas
        links = [self.plan.link(number) for number in self.replicas]
        bytes_per_s = min(min(link.up_mbit_s, link.down_mbit_s) for link in links) * 1e6 / 8
        delay_s = 2 * max(link.delay_ms for link in links) / 1e3
        self.virtual_s += self.ring.sent_bytes(self.num_elements, num_replicas) / bytes_per_s
        self.virtual_s += 2 * (num_replicas - 1) * delay_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, metavar="SPEC.toml")
    parser.add_argument("--rules", default="noloco,diloco,ddp", help=f"of noloco, {', '.join(RULES)}")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--link", default="ideal", help="as in `noloco simulate`")
    parser.add_argument("--absent", type=float, default=0.0, help="share of the steps in which a replica is absent")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    material = Material.of(TrainerSpec.load(args.spec), {}, seed=args.seed)
    plan = Plan(args.replicas, seed=args.seed, links=parse_links(args.link.split(",")), churn=Churn(absent=args.absent))
    rules = args.rules.split(",")
    results = [
        simulate_swarm(material, plan) if rule == "noloco" else Lockstep(material, plan, rule).run() for rule in rules
    ]
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
