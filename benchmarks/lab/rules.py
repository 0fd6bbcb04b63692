"""Compare NoLoCo with rules that see all replicas at once, on the same text and model, on a virtual clock.

    python benchmarks/lab/rules.py SPEC.toml [--rules noloco,diloco:int8,mine.py:Name] [--link cable] [--plot DIR]

No peer of a swarm could run the other rules: `ddp` averages the gradients of all replicas at every step, as DDP and
FSDP do, `diloco` and `diloco-nesterov` take an outer step with the mean outer gradient, and with `local` replicas never
mix. `ddp` and both forms of DiLoCo use an all-reduce, in which each replica sends 2 (N - 1) / N encoded vectors, and
all replicas wait for the slowest link. With --absent, they average over the replicas that are present. With
`streaming`, the all-reduce of one slice after another overlaps with training, in plain averages.

Each rule has its own codec: the one after its name (fp32, bf16, int8 or int4), or else that of the spec for `noloco`,
int4 for `streaming`, bf16 for `ddp`, and int8 for the others, or fp32 for these if the spec says so. If the spec has no
outer step, both forms of DiLoCo take the published one (`OUTER_STEPS`). `mine.py:Name` is a rule of your own
(docs/researchers.md). All replicas are one batched model, so it must be a plain Llama.
"""

from __future__ import annotations

import argparse
import inspect
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from stack import Stack, StackOptimizer
from swarm import run_swarm
from torch import Tensor

from noloco_p2p.codec import CODECS, chunk_bounds, get_codec
from noloco_p2p.errors import NolocoError, SettingsError
from noloco_p2p.simulate import plot
from noloco_p2p.simulate.material import Material, shortened
from noloco_p2p.simulate.plan import Churn, Plan, parse_links, peer_name
from noloco_p2p.simulate.result import Point, Result, table
from noloco_p2p.spec import TrainerSpec

RULES = ("diloco", "diloco-nesterov", "ddp", "local", "streaming")
# (alpha, beta) of the NoLoCo paper's baseline, and of DiLoCo (arXiv 2311.08105).
OUTER_STEPS = {"diloco": (0.3, 0.7), "diloco-nesterov": (0.9, 0.7)}
INT4_BLOCK = 64
ALL_DONE = 1 - 1e-9  # of the schedule: a sum of times may lack a rounding error


class Rule(Protocol):
    """A rule of one's own. It is made with the `Lockstep` that runs it, before the first step."""

    def after_step(self, step: int) -> None:
        """Change `lab.weights` (replicas, parameters) in place, after each of them has taken inner step `step`."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce of fp32 vectors with encoded messages.

    `coded` is a function that encodes and decodes a vector; if it is None, messages are lossless. `bytes_per_element`
    is the size of an encoded message per element.

    Each replica owns a segment of the vector. The others send it their encoded segments, and it adds them in fp32, as
    in Streaming DiLoCo (arXiv 2501.18512). It encodes the mean once, and every replica, including the owner, uses the
    encoded mean, so the results of all replicas are bitwise identical. A ring would take as many bytes, but encode each
    partial sum again, so errors would accumulate with N.
    """

    coded: Callable[[Tensor], Tensor] | None = None
    bytes_per_element: float = 4.0

    @classmethod
    def of(cls, codec_name: str, *, num_elements: int) -> AllReduce:
        """Return the all-reduce with a codec. Raises SettingsError if the codec is not one for many replicas."""
        if codec_name == "fp32":
            return cls()
        if codec_name == "int4":
            return cls(int4, 0.5 + 2 / INT4_BLOCK)
        if codec_name not in CODECS:
            known = ", ".join([*CODECS, "int4"])
            raise SettingsError(f"there is no codec {codec_name!r} for many replicas; choose one of {known}")
        codec = get_codec(codec_name)

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
            arrived = [segment if sender == owner else self.coded(segment) for sender, segment in enumerate(segments)]
            means.append(self.coded(torch.stack(arrived).mean(0)))
        return torch.cat(means)

    def sent_bytes(self, num_elements: int, num_replicas: int) -> float:
        """Return the number of bytes that each of N replicas sends: 2 (N - 1) / N times the size of the vector."""
        return 2 * (num_replicas - 1) / num_replicas * self.bytes_per_element * num_elements


def codec_of(rule: str, of_spec: str) -> str:
    """Return the codec of a rule that names none. That of the spec may be one for pairs."""
    if rule == "streaming":
        return "int4"
    return "fp32" if of_spec == "fp32" else "bf16" if rule == "ddp" else "int8"


def int4(vector: Tensor) -> Tensor:
    """Encode and decode a vector in 4 bits per element, with one bf16 scale per INT4_BLOCK elements."""
    blocks = torch.nn.functional.pad(vector, (0, -len(vector) % INT4_BLOCK)).view(-1, INT4_BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / 7).bfloat16().float().clamp_min(1e-30)
    return (blocks / scales).round().clamp(-7, 7).mul(scales).flatten()[: len(vector)]


class DiLoCo:
    """One outer optimizer for the mean outer gradient of all replicas.

    With the outer gradient g (which points downhill), the momentum m, and alpha and beta from the spec, the steps are

        heavy ball                m <- alpha m + beta g       slow weights += m
        Nesterov                  m <- alpha m + beta g       slow weights += beta g + alpha m

    `torch.optim.SGD` with lr = beta and momentum = alpha takes the same steps; `nesterov=True` selects the second one.
    DiLoCo (arXiv 2311.08105) uses Nesterov momentum with alpha = 0.9 and beta = 0.7. NoLoCo's reference code uses the
    heavy ball with alpha = 0.3 and beta = 0.7 as its baseline, which is NoLoCo with all replicas in one group.
    """

    def __init__(
        self, slow_weights: Tensor, all_reduce: AllReduce, *, alpha: float, beta: float, is_nesterov: bool
    ) -> None:
        self.slow_weights = slow_weights
        self._momentum = torch.zeros_like(slow_weights)
        self._all_reduce = all_reduce
        self._alpha = alpha
        self._beta = beta
        self._is_nesterov = is_nesterov

    def step(self, fast_weights: Tensor) -> None:
        """Take an outer step, in place, with the weights (replicas, elements) after the inner steps."""
        gradient = self._all_reduce.mean(fast_weights - self.slow_weights)
        self._momentum.mul_(self._alpha).add_(gradient, alpha=self._beta)
        self.slow_weights += (
            self._beta * gradient + self._alpha * self._momentum if self._is_nesterov else self._momentum
        )


class Lockstep:
    """Replicas that take every step together. Events, broken calls (`churn.lose`) and closing swaps do not apply.

    A replica that is absent from an all-reduce contributes nothing to the mean. It then receives the mean as one more
    encoded vector, so all replicas stay equal. In a real system, the absence would cost at least as much. With
    `streaming`, it receives nothing.

    Without `limit_s`, replicas take the steps of the spec. Otherwise, they train for this virtual time, which is then
    the whole schedule. Transfers take as long as those of a model with `claimed` parameters, or of this one if it is 0.
    `streaming` averages one of `num_slices` slices after another while training goes on.

    `rule` is the name of a rule, or the class of one's own, which uses `weights`, `mean`, `send` and `present`.
    """

    def __init__(
        self,
        material: Material,
        plan: Plan,
        rule: str | Callable[[Lockstep], Rule],
        *,
        codec: str = "",
        limit_s: float | None = None,
        claimed: int = 0,
        num_slices: int = 8,
        is_nesterov: bool = False,
    ) -> None:
        self.material = material
        self.plan = plan
        self.rule = rule if isinstance(rule, str) else ""
        self.outer, self.train = material.spec.outer, material.spec.train
        self.replicas = range(plan.num_replicas)
        self.stack = Stack(material, plan.num_replicas)
        self.weights, self.num_elements = self.stack.flat, self.stack.num_parameters
        self.optimizer = StackOptimizer(self.stack, self.train)
        self.batches = [material.batches(peer_name(number), replica=number) for number in self.replicas]
        codec = codec or codec_of(self.rule, material.spec.codec.weights)
        self.all_reduce = AllReduce.of(codec, num_elements=self.num_elements)
        self.limit_s, self.scale = limit_s, claimed / self.num_elements if claimed else 1.0
        num_slices = num_slices if self.rule == "streaming" else 1
        bounds = [self.num_elements * index // num_slices for index in range(num_slices + 1)]
        self.slices = [slice(start, stop) for start, stop in pairwise(bounds)]
        alpha, beta, is_nesterov = self.outer.alpha, self.outer.beta, is_nesterov or self.rule == "diloco-nesterov"
        self.outers = [
            DiLoCo(self.weights[0, place].clone(), self.all_reduce, alpha=alpha, beta=beta, is_nesterov=is_nesterov)
            for place in (self.slices if self.rule.startswith(("diloco", "streaming")) else [])
        ]
        self.step_s = max(plan.seconds_per_step(number) for number in self.replicas)
        self.sent_bytes = 0.0  # mean over replicas
        self.virtual_s = 0.0
        self.curve: list[Point] = []
        self._num_slices_sent = 0
        self._arrives_s, self._correction = 0.0, None
        self._own = None if isinstance(rule, str) else rule(self)

    def run(self) -> Result:
        total, step = self.train.total_steps, 0
        while (progress := self._progress(step)) < ALL_DONE:
            gradients = self.stack.gradients(self.weights, torch.stack([next(batches) for batches in self.batches]))
            if self.rule == "ddp":
                self._step_alike(gradients, progress, step)
            else:
                self.optimizer.step(self.weights, self.replicas, gradients, [progress] * len(self.replicas))
            self.virtual_s += self.step_s
            step += 1
            if self.rule == "streaming":
                self._stream(step)
            elif self.outers and (step % self.outer.inner_steps == 0 or self._progress(step) >= ALL_DONE):
                self._outer_step(self.outers[0], step - 1)
            elif self._own:
                self._own.after_step(step)
            if self.limit_s is None and step * self.plan.evaluations >= (len(self.curve) + 1) * total:
                [loss] = self.stack.evaluate(self.weights[:1], self.material.validation)
                self.curve.append(Point(0, step, self.virtual_s, loss, self.sent_bytes))
        return Result(
            rule=self.rule,
            **self.stack.judge(self.weights, self.material.validation),
            sent_bytes=self.sent_bytes,
            sent_per_parameter_step=self.sent_bytes / step / self.num_elements,
            steps=step,
            virtual_s=self.virtual_s,
            curve=tuple(self.curve),
        )

    def mean(self, vectors: Tensor) -> Tensor:
        """Return the mean of `vectors` (replicas, elements), all-reduced while all replicas wait."""
        self._count_exchange(len(vectors), share=vectors.shape[1] / self.num_elements)
        return self.all_reduce.mean(vectors)

    def send(self, vectors: Tensor) -> Tensor:
        """Return `vectors` (replicas, elements) as they arrive, each at one other replica, while all replicas wait."""
        coded, num_bytes = self.all_reduce.coded, self.all_reduce.bytes_per_element * vectors.shape[1]
        self.sent_bytes += num_bytes * len(vectors) / len(self.replicas)
        self._wait(num_bytes, num_messages=1)
        return torch.stack([coded(vector) for vector in vectors]) if coded else vectors.clone()

    def present(self, step: int) -> list[int]:
        """Return the replicas that are not absent in inner step `step`."""
        churn, seed = self.plan.churn, self.plan.seed
        return [number for number in self.replicas if not churn.is_absent(peer_name(number), step, seed=seed)]

    def _progress(self, step: int) -> float:
        """Return the share of the schedule that is done after `step` inner steps."""
        return self.virtual_s / self.limit_s if self.limit_s else step / self.train.total_steps

    def _step_alike(self, gradients: Tensor, progress: float, step: int) -> None:
        """Let all replicas take a step with the mean gradient of those that are present, or 0 if there are none."""
        present = self.present(step)
        mean = self.all_reduce.mean(gradients[present]) if present else torch.zeros_like(gradients[0])
        self.optimizer.step(self.weights[:1], [0], mean[None], [progress])
        self.weights[1:] = self.weights[0]
        self._count_exchange(len(present))

    def _outer_step(self, diloco: DiLoCo, step: int) -> None:
        present = self.present(step)
        if present:
            diloco.step(self.weights[present])
        self.weights[:] = diloco.slow_weights
        self._count_exchange(len(present))

    def _stream(self, step: int) -> None:
        """Add what the last all-reduce has changed, and begin that of the next slice, each between two steps.

        As in Streaming DiLoCo (arXiv 2501.18512), each slice has its own outer optimizer, which works while training
        goes on. Its update of the slice is added to what the replicas have trained meanwhile. All slices are averaged
        once in `outer.inner_steps`, or as often as the link allows.
        """
        if self._correction is not None and self.virtual_s >= self._arrives_s - 1e-9:
            present, place, correction = self._correction
            self.weights[present, place] += correction
            self._correction = None
        due = self._num_slices_sent * self.outer.inner_steps / len(self.slices)
        present = self.present(step)
        if self._correction is not None or step < due or not present:
            return
        index = self._num_slices_sent % len(self.slices)
        self._num_slices_sent += 1
        place, diloco = self.slices[index], self.outers[index]
        before = self.weights[present, place]
        diloco.step(before)
        self._correction = present, place, diloco.slow_weights - before
        train_s, self.virtual_s = self.virtual_s, 0.0
        self._count_exchange(len(present), share=1 / len(self.slices))
        self.virtual_s, self._arrives_s = train_s, train_s + self.virtual_s

    def _count_exchange(self, num_present: int, *, share: float = 1.0) -> None:
        """Count the bytes of an all-reduce, and the time for which all replicas wait for the slowest link.

        Each replica sends its segments to their owners at once, and then its mean to all others.
        """
        num_replicas = self.plan.num_replicas
        if num_present:
            num_late = 0 if self.rule == "streaming" else num_replicas - num_present
            of_absent = num_late * self.all_reduce.bytes_per_element * self.num_elements
            sent_bytes = num_present * self.all_reduce.sent_bytes(self.num_elements, num_present) + of_absent
            self.sent_bytes += share * sent_bytes / num_replicas
        self._wait(share * self.all_reduce.sent_bytes(self.num_elements, num_replicas), num_messages=2)

    def _wait(self, num_bytes: float, *, num_messages: int) -> None:
        """Let the time pass in which each replica sends `num_bytes` in messages that depend on each other."""
        links = [self.plan.link(number) for number in self.replicas]
        bytes_per_s = min(min(link.up_mbit_s, link.down_mbit_s) for link in links) * 1e6 / 8
        self.virtual_s += self.scale * num_bytes / bytes_per_s
        self.virtual_s += num_messages * 2 * max(link.delay_ms for link in links) / 1e3


def find_rule(named: str, spec: TrainerSpec) -> tuple[TrainerSpec, str | Callable[[Lockstep], Rule], str]:
    """Return the spec, the rule and the codec of a rule that is named as in --rules.

    Raises SettingsError if there is no such rule, or if it cannot be used.
    """
    name, _, codec = named.partition(":")
    rule: str | Callable[[Lockstep], Rule] = name
    if name.endswith(".py"):
        rule_name, _, codec = codec.partition(":")
        rule = own_rule(Path(name), rule_name)
    elif name not in ("noloco", *RULES):
        raise SettingsError(f"there is no rule {name!r}; choose from noloco, {', '.join(RULES)} and FILE.py:NAME")
    elif name in OUTER_STEPS and not spec.outer.has_outer_step:
        alpha, beta = OUTER_STEPS[name]
        spec = spec.model_copy(update={"outer": spec.outer.model_copy(update={"alpha": alpha, "beta": beta})})
    elif name == "noloco" and codec:
        spec = spec.with_changes({"codec.weights": codec}, origin="--rules")
    if name != "noloco" and codec:
        AllReduce.of(codec, num_elements=1)
    return spec, rule, codec


def own_rule(file: Path, name: str) -> Callable[[Lockstep], Rule]:
    """Return the class of a rule in a file. Raises SettingsError if it is missing or not a rule."""
    if not file.is_file():
        raise SettingsError(f"--rules {file}:{name}: there is no file {file}")
    rule = runpy.run_path(str(file)).get(name)
    if rule is None:
        raise SettingsError(
            f"--rules {file}:{name}: there is no rule {name!r} in {file}; name its class, as in {file}:NAME"
        )
    try:
        inspect.signature(rule).bind(None)
        is_rule = hasattr(rule, "after_step")
    except (TypeError, ValueError):
        is_rule = False
    if not is_rule:
        raise SettingsError(
            f"--rules {file}:{name}: {name} is not a rule, which is a class that takes a Lockstep and has the method "
            "after_step(step)"
        )
    return rule


def run_named(named: str, material: Material, plan: Plan) -> Result:
    """Run a rule that is named as in --rules. Raises SettingsError as `find_rule` does."""
    spec, rule, codec = find_rule(named, material.spec)
    material = replace(material, spec=spec)
    result = run_swarm(material, plan) if rule == "noloco" else Lockstep(material, plan, rule, codec=codec).run()
    return replace(result, rule=named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, metavar="SPEC.toml")
    parser.add_argument(
        "--rules", default="noloco,diloco,ddp", help=f"of noloco, {', '.join(RULES)} and FILE.py:NAME, each with :CODEC"
    )
    parser.add_argument("--steps", type=int, help="as in `noloco simulate`")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--link", default="ideal", help="as in `noloco simulate`")
    parser.add_argument("--absent", type=float, default=0.0, help="share of the steps in which a replica is absent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the loss against time and against bytes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        if args.plot:
            plot.check(args.plot)
        if args.replicas < 1:
            raise SettingsError(f"--replicas must be at least 1, but it is {args.replicas}")
        links, churn = parse_links(args.link.split(",")), Churn(absent=args.absent)
        plan = Plan(args.replicas, args.seed, links=links, churn=churn, evaluations=plot.POINTS if args.plot else 4)
        spec, rules, results = TrainerSpec.load(args.spec), args.rules.split(","), list[Result]()
        spec = shortened(spec, args.steps) if args.steps else spec
        for rule in rules:  # a wrong name must not be found after hours
            find_rule(rule, spec)
        material = Material.of(spec, {}, seed=args.seed)
        for rule in rules:
            results.append(run_named(rule, material, plan))
            print(results[-1], file=sys.stderr, flush=True)
    except NolocoError as error:
        parser.error(str(error))
    print("\n".join(table(results)))
    if args.plot:
        print(f"wrote {plot.draw(results, args.plot)}")


if __name__ == "__main__":
    main()
