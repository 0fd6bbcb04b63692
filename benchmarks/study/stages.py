"""Compare pipelines of stages with whole models for equal numbers of tokens, with ablations, in simulated swarms.

    python benchmarks/study/stages.py STUDY [--model toy] [--sequences 12800] [--seeds 0,1,2] [--only WORDS]
        [--json FILE]

    python benchmarks/study/stages.py compare --json FILE --whole FILE

The first form prints one line per case. With --json, the file is written after every case, and cases that it already
contains are skipped. The second form prints the difference between pipelines and the best whole-model case with as many
replicas, on paired seeds. All cases with the same seed start from the same weights, and head i of a pipeline reads the
text of whole replica i.

A slow link carries a microbatch in 0.68 s, the time that a link of 100 Mbit/s takes for 2,048 tokens of width 4096 in
int8. The delay between two peers is 50 ms. The busiest stage computes half as long as its link transfers. A fast link
is ten times as fast, with a delay of 5 ms; the stages compute at the same speed. Microbatches and the rates of links
are smaller here, so that transfers, delays and computing keep their proportions. Here, a swap has only one or a few
chunks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from study import CLOSED, MODULO, TOY, averaging, machine, muon

from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.run import simulate, simulate_stages
from noloco_p2p.simulate.stage_plan import StagedPlan
from noloco_p2p.simulate.stage_work import TaskFlops
from noloco_p2p.simulate.staged import staged
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.links import LinkProfile
from noloco_p2p.trainer.cut import link_bytes_per_token
from noloco_p2p.trainer.model import build_on_meta
from noloco_p2p.trainer.stage import measure

HOP_S = 2048 * 4160 * 8 / 100e6  # of a microbatch on a slow link: 0.68 s
BASE = {"model.parameter_seeds": True, **averaging(5), **MODULO, **CLOSED}
MODELS: dict[str, dict[str, Any]] = {
    "toy": {"name": "toy-stages", "model.num_layers": 4},  # 0.22M parameters
    "small": {  # 0.9M
        "name": "small-stages",
        "model.hidden_size": 128,
        "model.num_layers": 4,
        "model.mlp_size": 344,
        "data.sequence_length": 128,
    },
}
INT8 = {"pipeline.activations": "int8", "pipeline.gradients": "int8"}
LOST = 0.05


@dataclass(frozen=True, slots=True)
class Link:
    """A link. `hop_s` is the time in which it carries a microbatch. `delay_ms` is the one-way delay between peers."""

    hop_s: float
    delay_ms: float


SLOW, FAST = Link(HOP_S, 50.0), Link(HOP_S / 10, 5.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a study. `num_stages` is 1 for whole models. `lot` is the number of sequences per inner step.

    `steps` is the length of a run that only measures speed, or 0 for as many steps as the sequences allow.
    """

    name: str
    num_stages: int
    num_replicas: int | tuple[int, ...]
    lot: int
    learning_rate: float
    changes: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    rule: str = "noloco"
    steps: int = 0
    link: Link = SLOW

    @property
    def replicas(self) -> tuple[int, ...]:
        if isinstance(self.num_replicas, int):
            return (self.num_replicas,) * self.num_stages
        return self.num_replicas


def gate(num_stages: int, num_replicas: int, lot: int, learning_rate: float) -> Case:
    name = f"{num_stages} stages x {num_replicas}, {lot} sequences, {learning_rate:g}, int8, 5 % lost"
    return Case(name, num_stages, num_replicas, lot, learning_rate, INT8, {"lost_share": LOST})


def ablation(name: str, *, replicas: int | tuple[int, ...] = 4, rule: str = "noloco", **plan: Any) -> Case:
    return Case(name, 3, replicas, 32, 24e-3, plan.pop("changes", INT8), plan, rule)


def codecs(name: str) -> dict[str, Any]:
    return {"pipeline.activations": name, "pipeline.gradients": name}


STUDIES: dict[str, list[Case]] = {
    "speed": [  # to find the lot that fills the links to 70 %
        Case(f"{stages} stages x 4, {lot} sequences", stages, 4, lot, 24e-3, INT8, steps=20)
        for stages in (3, 4)
        for lot in (16, 24, 32, 48)
    ],
    "whole": [  # to find the best batch size and learning rate of whole models
        Case(f"whole x {replicas}, {lot} sequences, {rate:g}", 1, replicas, lot, rate)
        for replicas in (4, 8)
        for lot in (4, 8, 16, 32)
        for rate in (8e-3, 16e-3, 24e-3, 32e-3)
    ],
    "gate": [
        gate(stages, replicas, lot, rate)
        for replicas in (4, 8)
        for stages, lot in ((3, 32), (4, 32))
        for rate in (16e-3, 24e-3, 32e-3)
    ],
    "lateness": [  # a larger batch against a larger share of it in flight
        Case(
            f"{lot} sequences, {window} in flight, {rate:g}",
            *(3, 4, lot, rate, INT8),
            {"lost_share": LOST, "window": window},
        )
        for lot, window, rate in (
            *((16, window, 16e-3) for window in (4, 8, 16)),
            *((8, window, 16e-3) for window in (2, 8)),
            *((64, window, 32e-3) for window in (8, 16)),
        )
    ],
    "fast": [  # at 1 Gbit/s and 5 ms, few microbatches in flight keep the stages busy
        Case(
            f"fast links, {lot} sequences, {window} in flight, {rate:g}",
            *(3, 4, lot, rate, INT8),
            {"lost_share": LOST, "window": window},
            link=FAST,
        )
        for lot, window, rate in ((4, 1, 8e-3), (4, 4, 8e-3), (8, 2, 16e-3), (8, 4, 16e-3), (16, 4, 16e-3))
    ],
    "ablations": [
        ablation("3 stages x 4"),
        *(ablation(f"{paths} paths, {rule}", paths=paths, rule=rule) for paths, rule in (("fixed", "noloco"),)),
        *(ablation(f"{paths} paths, no gossip", paths=paths, rule="local") for paths in ("fixed", "random")),
        *(ablation(f"{name} both ways", changes=codecs(name)) for name in ("fp32", "bf16", "int4")),
        ablation("int8, gradients int4", changes={**INT8, "pipeline.gradients": "int4"}),
        *(ablation(f"{steps} steps late", late_steps=steps) for steps in (1, 2)),
        *(ablation(f"{100 * share:g} % lost", lost_share=share) for share in (0.05, 0.1, 0.2)),
        *(
            ablation(f"{'-'.join(map(str, each))} replicas", replicas=each)
            for each in ((4, 2, 4), (4, 8, 4), (4, 4, 2))
        ),
    ],
}


def spec_of(case: Case, model: str, sequences: int) -> TrainerSpec:
    steps = case.steps or sequences // case.lot
    changes = {
        **MODELS[model],
        **BASE,
        **muon(case.learning_rate),
        "train.batch_size": case.lot,
        "train.total_steps": steps,
        "train.warmup_steps": max(1, steps // 15),
    }
    spec = TrainerSpec.load(TOY).with_changes({**changes, **case.changes}, origin=case.name)
    return staged(spec, case.num_stages) if case.num_stages > 1 else spec


def plan_of(case: Case, spec: TrainerSpec, seed: int) -> StagedPlan:
    """Return a plan whose links and speeds keep the proportions."""
    microbatch = spec.pipeline.microbatch * spec.data.sequence_length
    # The links have the rate that int8 needs, so that all codecs meet the same links.
    int8 = spec.with_changes(INT8).pipeline
    hop_bytes = microbatch * link_bytes_per_token(int8, spec.model.hidden_size) / 2
    rate = hop_bytes * 8 / 1e6 / case.link.hop_s
    link = LinkProfile("study", down_mbit_s=rate, up_mbit_s=rate, delay_ms=case.link.delay_ms / 2, jitter_ms=0)
    sizes = measure(
        build_on_meta(spec.model, sequence_length=spec.data.sequence_length), sequence_length=spec.data.sequence_length
    )
    assert spec.pipeline.cut != "auto"
    busiest = max(TaskFlops.of(sizes, spec.pipeline.cut, stage).total for stage in range(case.num_stages))
    whole = 0.75 * sizes.num_blocks * sizes.block.flops + sizes.vocabulary.flops
    step_s = whole * case.lot / spec.pipeline.microbatch / busiest * HOP_S  # two hops each way per microbatch
    return StagedPlan(case.replicas, seed=seed, links=((link,),), step_s=step_s, **case.plan)


def run_case(case: Case, model: str, sequences: int, seed: int) -> dict[str, Any]:
    spec = spec_of(case, model, sequences)
    began_s = time.process_time()
    if case.num_stages == 1:
        (result,) = simulate(spec, Plan(case.replicas[0], seed=seed), rules=[case.rule])
    else:
        (result,) = simulate_stages(spec, plan_of(case, spec, seed), rules=[case.rule])
    cpu_s = round(time.process_time() - began_s, 1)
    return {"case": case.name, "seed": seed, "cpu_s": cpu_s, **result.as_dict()}


def show(row: dict[str, Any]) -> str:
    line = f"{row['case']:<50} seed {row['seed']}  loss {row['loss']:.4f}  merged {row['merged_loss']:.4f}"
    if "stages" in row:
        lateness = " ".join(f"{stage['lateness']:.2f}" for stage in row["stages"])
        share = 100 * row["tokens_per_s"] / row["predicted_tokens_per_s"]
        lost = 100 * row["num_lost"] / max(1, row["num_lost"] + row["num_done"])
        line += f"  {share:.0f} % of the arithmetic  late by {lateness} steps  lost {lost:.1f} %"
        line += f"  {row['trained_tokens']:,} tokens"
    return f"{line}  {row['cpu_s']:.0f} s"


def by_seed(rows: list[dict[str, Any]], num_replicas: int) -> dict[str, dict[int, float]]:
    """Return the losses of each case with this number of replicas, or heads, by seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        heads = row["stages"][0]["num_replicas"] if "stages" in row else row["num_replicas"]
        if heads == num_replicas:
            found.setdefault(row["case"], {})[row["seed"]] = row["loss"]
    return found


def compare(staged_rows: list[dict[str, Any]], whole_rows: list[dict[str, Any]]) -> Iterator[str]:
    for num_replicas in sorted({row["num_replicas"] for row in whole_rows}):
        whole = by_seed(whole_rows, num_replicas)
        best = min(whole, key=lambda case: fmean(whole[case].values()))
        yield f"best whole-model case: {best}, loss {fmean(whole[best].values()):.4f}"
        for case, losses in by_seed(staged_rows, num_replicas).items():
            if seeds := sorted(losses.keys() & whole[best].keys()):
                ours, theirs = (fmean(each[seed] for seed in seeds) for each in (losses, whole[best]))
                yield f"  {case:<60} {ours:.4f}  {100 * (ours / theirs - 1):+.2f} %  {len(seeds)} paired seeds"


def missing(cases: list[Case], seeds: list[int], rows: list[dict[str, Any]]) -> Iterator[tuple[Case, int]]:
    done = {(row["case"], row["seed"]) for row in rows}
    for seed in seeds:
        yield from ((case, seed) for case in cases if (case.name, seed) not in done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, "compare"])
    parser.add_argument("--model", choices=MODELS, default="toy")
    parser.add_argument("--sequences", type=int, default=12_800, help="of each head, and of each whole replica")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default="", help="run the cases whose name has these words")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--whole", type=Path, help="the file of the study of whole models, to compare with")
    args = parser.parse_args()
    if args.study == "compare":
        staged_report, whole_report = (json.loads(path.read_text(encoding="utf-8")) for path in (args.json, args.whole))
        same = all(staged_report[key] == whole_report[key] for key in ("model", "sequences"))
        assert same, "the files are of different studies"
        print("\n".join(compare(staged_report["rows"], whole_report["rows"])))
        return
    torch.set_num_threads(1)
    report = {"machine": machine(), "model": args.model, "sequences": args.sequences, "rows": []}
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
        same = (report["model"], report["sequences"]) == (args.model, args.sequences)
        assert same, "the file is of another study"
    rows = report["rows"]
    for row in rows:
        print(show(row), flush=True)
    cases = [case for case in STUDIES[args.study] if args.only in case.name]
    for case, seed in missing(cases, [int(seed) for seed in args.seeds.split(",")], rows):
        rows.append(run_case(case, args.model, args.sequences, seed))
        print(show(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
