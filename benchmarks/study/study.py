"""Run the ablations of docs/results.md at toy scale, on simulated swarms.

    python benchmarks/study/study.py STUDY [--steps 400] [--replicas 8] [--seeds 0,1,2] [--json FILE]

The script prints one line per case. With --json, the file is written after every case, and cases that it already
contains are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from noloco_p2p.data.documents import Document, is_held_out
from noloco_p2p.data.sources import builtin_corpus
from noloco_p2p.simulate.plan import Churn, Plan
from noloco_p2p.simulate.run import simulate
from noloco_p2p.spec import TrainerSpec

TOY = Path(__file__).with_name("toy.toml")


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a study. `changes` has changes to the toy's spec, and `plan` has changes to the plan of all cases."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    rule: str = "noloco"


def codec(slow_weights: str, outer_momentum: str, outer_gradient: str) -> dict[str, Any]:
    return {
        "codec.slow_weights": slow_weights,
        "codec.outer_momentum": outer_momentum,
        "codec.outer_gradient": outer_gradient,
    }


def outer(inner_steps: int, alpha: float, beta: float, gamma: float, **more: Any) -> dict[str, Any]:
    named = {"inner_steps": inner_steps, "alpha": alpha, "beta": beta, "gamma": gamma, **more}
    return {f"outer.{name}": value for name, value in named.items()}


PAPER_MOMENTUM = {"outer.swap_momentum": False}
MODULO = codec("modulo8", "modulo8", "int4")
MODULO4 = codec("modulo4", "modulo8", "int4")
BY_NEED = codec("modulo", "modulo8", "int4")
CLOSED = {"outer.closing_rounds": "auto"}
SMALL = {  # 0.9M parameters
    "name": "small",
    "model.hidden_size": 128,
    "model.num_layers": 4,
    "model.mlp_size": 344,
    "data.sequence_length": 128,
    "train.batch_size": 8,
}


def averaging(inner_steps: int) -> dict[str, Any]:
    return outer(inner_steps, 0.0, 1.0, 1.0)


SHORT = averaging(5)


def muon(learning_rate: float) -> dict[str, Any]:
    return {"train.inner_optimizer": "muon", "train.learning_rate": learning_rate}


def adamw(learning_rate: float) -> dict[str, Any]:
    return {"train.learning_rate": learning_rate}


EARLY_CODECS, LATE_CODECS = ("modulo8", "modulo4"), ("int4", "int2", "sign1", "none")


def late_case(size: dict[str, Any], inner_steps: int, early: str, late: str) -> Case:
    coded = codec(early, "modulo8", late)
    return Case(f"{inner_steps}: {early}, {late}", {**size, **muon(24e-3), **averaging(inner_steps), **coded, **CLOSED})


STUDIES: dict[str, list[Case]] = {
    "rules": [
        Case("ddp", rule="ddp"),
        Case("diloco", rule="diloco"),
        Case("noloco"),
        Case("noloco, momentum not swapped", PAPER_MOMENTUM),
        Case("noloco, 0 1 1", averaging(20)),
        Case("noloco, 5: 0 1 1", SHORT),
        Case("gasloc", rule="gasloc"),
        Case("pairs", rule="pairs"),
        Case("local", rule="local"),
    ],
    "best": [  # NoLoCo with Muon at 5, 8 and 20 steps, and other rules
        Case("ddp, adamw", adamw(4e-3), rule="ddp"),
        Case("ddp", muon(16e-3), rule="ddp"),
        *(Case(f"diloco 20, {rate:g}", muon(rate), rule="diloco") for rate in (16e-3, 24e-3)),
        *(Case(f"{steps}: 0 1 1", {**muon(24e-3), **averaging(steps), **MODULO, **CLOSED}) for steps in (5, 8, 20)),
        *(
            Case(f"{steps}: 0 1 1, modulo4", {**muon(24e-3), **averaging(steps), **MODULO4, **CLOSED})
            for steps in (5, 6)
        ),
    ],
    "small": [  # whether it holds for seven times the parameters and four times the tokens a step
        Case("ddp, adamw", {**SMALL, **adamw(4e-3)}, rule="ddp"),
        Case("6: 0 1 1, modulo4", {**SMALL, **muon(24e-3), **averaging(6), **MODULO4, **CLOSED}),
        Case("ddp", {**SMALL, **muon(16e-3)}, rule="ddp"),
        Case("5: 0 1 1", {**SMALL, **muon(24e-3), **averaging(5), **MODULO, **CLOSED}),
        Case("diloco 20", {**SMALL, **muon(16e-3)}, rule="diloco"),
    ],
    "inner": [  # why short rounds of Muon lag synchronous Muon; compare with "best"
        Case("5: 0 1 1, everybody mixes", {**muon(24e-3), **SHORT}, rule="diloco"),
        *(
            Case(f"{name}, {setting} {value:g}", {**changes, f"train.{setting}": value}, rule=rule)
            for setting, value in (("muon_momentum", 0.9), ("muon_momentum", 0.98), ("adam_beta2", 0.99))
            for name, changes, rule in (
                ("5: 0 1 1", {**muon(24e-3), **SHORT, **MODULO, **CLOSED}, "noloco"),
                ("ddp", muon(16e-3), "ddp"),
            )
        ),
        Case("5: 0 1 1, clip_norm 10", {**muon(24e-3), **SHORT, **MODULO, **CLOSED, "train.clip_norm": 10.0}),
    ],
    "codecs": [
        Case("fp32"),
        Case("bf16+int8", codec("bf16", "bf16", "int8")),
        Case("int8+int4", codec("int8", "int8", "int4")),
        Case("modulo8+int4", MODULO),
        Case("fp32, momentum not swapped", PAPER_MOMENTUM),
        Case("modulo8+int4, momentum not swapped", {**MODULO, **PAPER_MOMENTUM}),
        Case("5 steps, 0 1 1, fp32", SHORT),
        Case("5 steps, 0 1 1, modulo8+int4", {**SHORT, **MODULO}),
    ],
    "rounds": [
        Case("50: 0.5 0.7 0.7", outer(50, 0.5, 0.7, 0.7)),
        Case("50: 0 1 1", averaging(50)),
        Case("20: 0.5 0.7 0.7", outer(20, 0.5, 0.7, 0.7)),
        Case("20: 0.3 0.9 0.9", outer(20, 0.3, 0.9, 0.9)),
        Case("20: 0 1 1", averaging(20)),
        Case("10: 0.5 0.7 0.7", outer(10, 0.5, 0.7, 0.7)),
        Case("10: 0.2 1 0.96", outer(10, 0.2, 1.0, 0.96)),
        Case("10: 0 1 1", averaging(10)),
        Case("5: 0.5 0.7 0.7", outer(5, 0.5, 0.7, 0.7)),
        Case("5: 0.2 1 0.96", outer(5, 0.2, 1.0, 0.96)),
        Case("5: 0 1 1", SHORT),
    ],
    "momentum": [  # with --steps 1000: whether outer momentum pays off in longer runs
        Case("20: 0.5 0.7 0.7", outer(20, 0.5, 0.7, 0.7)),
        Case("20: 0 1 1", averaging(20)),
        Case("50: 0.5 0.7 0.7", outer(50, 0.5, 0.7, 0.7)),
        Case("50: 0 1 1", averaging(50)),
    ],
    "gamma": [
        Case(f"gamma {gamma:g}", outer(20, 0.5, 0.7, gamma or 1e-9, swap_momentum=False))
        for gamma in (0.0, 0.35, 0.7, 1.0, 1.4)
    ],
    "alpha": [Case(f"alpha {alpha:g}", outer(20, alpha, 0.7, 0.7)) for alpha in (0.0, 0.3, 0.5, 0.9)],
    "groups": [
        Case("n = 1: nobody to mix with", plan={"churn": Churn(absent=1.0)}),
        Case("n = 2: pairs"),
        Case("n = 4", rule="groups"),
        Case("n = all: DiLoCo", rule="diloco"),
    ],
    "adamw": [
        *(Case(f"ddp {rate:g}", adamw(rate), rule="ddp") for rate in (2e-3, 4e-3, 8e-3)),
        *(Case(f"diloco 20, {rate:g}", adamw(rate), rule="diloco") for rate in (4e-3, 8e-3)),
        *(Case(f"5: 0 1 1, {rate:g}", {**adamw(rate), **SHORT, **MODULO}) for rate in (4e-3, 8e-3)),
    ],
    "muon": [
        *(Case(f"ddp {rate:g}", muon(rate), rule="ddp") for rate in (8e-3, 16e-3, 32e-3)),
        *(Case(f"diloco 20, {rate:g}", muon(rate), rule="diloco") for rate in (8e-3, 16e-3)),
        *(Case(f"20: 0.5 0.7 0.7, {rate:g}", {**muon(rate), **MODULO}) for rate in (8e-3, 16e-3)),
        *(Case(f"5: 0 1 1, {rate:g}", {**muon(rate), **SHORT, **MODULO}) for rate in (8e-3, 16e-3, 24e-3)),
        Case("8: 0 1 1, 0.016", {**muon(16e-3), **averaging(8), **MODULO}),
    ],
    "muon_momentum": [
        *(
            Case(
                f"{steps}: {alpha:g} {beta:g} {beta:g}, {rate:g}",
                {**muon(rate), **outer(steps, alpha, beta, beta), **PAPER_MOMENTUM, **MODULO},
            )
            for steps, rate, alpha, beta in (
                (8, 24e-3, 0.5, 0.7),
                (20, 16e-3, 0.0, 1.0),
                (20, 16e-3, 0.5, 0.7),
                (50, 16e-3, 0.0, 1.0),
                (50, 16e-3, 0.5, 0.7),
            )
        ),
        Case("20: 0.5 0.7 0.7, 0.024, momentum swapped", {**muon(24e-3), **outer(20, 0.5, 0.7, 0.7), **MODULO}),
    ],
    "learning_rate": [Case(f"{rate:g}", adamw(rate)) for rate in (1e-3, 2e-3, 4e-3, 8e-3)],
    "waiting": [
        Case("waiting"),
        Case("eager, late by a quarter of a round", {"outer.max_wait_s": 0.0}, {"speeds": (1.0,), "link_s": 5.0}),
        Case("5: 0 1 1, waiting", SHORT),
        Case("5: 0 1 1, eager, late by a step", {**SHORT, "outer.max_wait_s": 0.0}),
        Case("5: 0 1 1, eager, late by a twentieth", {**SHORT, "outer.max_wait_s": 0.0}, {"link_s": 0.25}),
        Case("5: 0 1 1, eager, late by a quarter of a round", {**SHORT, "outer.max_wait_s": 0.0}, {"link_s": 1.25}),
    ],
    "churn": [
        Case("no churn"),
        Case("20 % of the rounds absent", plan={"churn": Churn(absent=0.2)}),
        Case("50 % of the rounds absent", plan={"churn": Churn(absent=0.5)}),
        Case("half of the calls break", plan={"churn": Churn(lose=0.5)}),
        Case("speeds 1, 2, 4, waiting at most a step", {"outer.max_wait_s": 1.0}, {"speeds": (1.0, 2.0, 4.0)}),
        Case("each reads everything, from files", plan={"slices": "*"}),
        Case("each reads modules of its own", plan={"slices": "{replica}"}),
        Case("each reads modules of its own, 5: 0 1 1", SHORT, {"slices": "{replica}"}),
    ],
    "modulo_churn": [  # whether modulo coding, which needs close partners, tolerates lost swaps
        Case(f"{codec_name}, {churn_name}", {**muon(24e-3), **averaging(6), **coded, **CLOSED}, plan)
        for churn_name, plan in (
            ("no churn", {}),
            ("50 % of the rounds absent", {"churn": Churn(absent=0.5)}),
            ("half of the calls break", {"churn": Churn(lose=0.5)}),
        )
        for codec_name, coded in (("modulo8", MODULO), ("modulo", BY_NEED), ("modulo4", MODULO4))
    ],
    "late": [  # the cost of a coarse late part, or of none, by round length and early codec
        Case("ddp", muon(16e-3), rule="ddp"),
        *(
            late_case({}, steps, early, late)
            for early in EARLY_CODECS
            for steps in (5, 3, 8, 20)
            for late in LATE_CODECS
        ),
    ],
    "late_small": [  # whether it holds for seven times the parameters
        Case("ddp", {**SMALL, **muon(16e-3)}, rule="ddp"),
        *(late_case(SMALL, 3, "modulo8", late) for late in LATE_CODECS),
    ],
    "closing": [Case(f"{rounds} closing rounds", {"outer.closing_rounds": rounds}) for rounds in (0, 3, 6)],
}


def run_case(case: Case, *, steps: int, replicas: int, seed: int) -> dict[str, Any]:
    spec = TrainerSpec.load(TOY).with_changes({"train.total_steps": steps, **case.changes}, origin=case.name)
    options, bindings = dict(case.plan), {}
    if link_s := options.pop("link_s", None):
        options["links"] = (link_of(spec, seconds=link_s),)
    with tempfile.TemporaryDirectory() as folder:
        if slices := options.pop("slices", None):
            write_slices(Path(folder), replicas, holdout=spec.data.holdout)
            bindings = {"slices": f"{folder}/slice-{slices}.jsonl", "slices.validation": f"{folder}/validation.jsonl"}
            spec = spec.with_changes({"data.source": "slices"}, origin=case.name)
        plan = Plan(replicas, seed=seed, **options)
        began_s = time.process_time()
        (result,) = simulate(spec, plan, rules=[case.rule], bindings=bindings)
    cpu_s = time.process_time() - began_s
    return {"case": case.name, "seed": seed, "cpu_s": round(cpu_s, 1), "rule": case.rule, **result.as_dict()}


def write_slices(folder: Path, num_slices: int, *, holdout: float) -> None:
    """Write the built-in corpus in slices by module name, so that each package goes to one replica."""
    documents = list(builtin_corpus().read())
    kept = [document for document in documents if not is_held_out(document, holdout)]
    each = sum(len(document.content) for document in kept) / num_slices
    slices: list[list[Document]] = [[] for _ in range(num_slices)]
    num_chars = 0
    for document in kept:
        slices[min(num_slices - 1, int(num_chars / each))].append(document)
        num_chars += len(document.content)
    named = {f"slice-{index}": part for index, part in enumerate(slices)}
    for name, part in {**named, "validation": [doc for doc in documents if is_held_out(doc, holdout)]}.items():
        lines = [json.dumps({"text": str(document.content)}) + "\n" for document in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def link_of(spec: TrainerSpec, *, seconds: float) -> Any:
    """Return a link that carries the outer gradient of this spec in this number of virtual seconds."""
    from noloco_p2p.codec import get_codec, section_bytes
    from noloco_p2p.testing.links import LinkProfile

    num_bytes = section_bytes(get_codec(spec.codec.outer_gradient), spec.model.num_parameters())
    rate = num_bytes * 8 / 1e6 / seconds
    return LinkProfile("study", down_mbit_s=10 * rate, up_mbit_s=rate, delay_ms=10, jitter_ms=0)


def show(row: dict[str, Any]) -> str:
    rounds = f"{row['swapped']}/{row['half']}/{row['alone']} late {row['late']}"
    chunks = f"{row['modulo_chunks']}/{row['plain_chunks']}/{row.get('extended_chunks', 0)}/{row['broken_chunks']}"
    return (
        f"{row['case']:<40} seed {row['seed']}  loss {row['loss']:.4f}  merged {row['merged_loss']:.4f}  "
        f"spread {100 * row['spread']:.2f} %  {row['sent_per_parameter_step']:.3f} B/param/step  "
        f"rounds {rounds}  chunks {chunks}  {row['virtual_s']:.0f} virtual s  {row['cpu_s']:.0f} s"
    )


def missing(cases: list[Case], seeds: list[int], rows: list[dict[str, Any]]) -> Iterator[tuple[Case, int]]:
    done = {(row["case"], row["seed"]) for row in rows}
    for seed in seeds:
        yield from ((case, seed) for case in cases if (case.name, seed) not in done)


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    when = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"{when} | {platform.machine()}, {cores} cores | Python {platform.python_version()} torch {version('torch')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {"machine": machine(), "steps": args.steps, "replicas": args.replicas, "rows": []}
    if args.json and args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
        assert (report["steps"], report["replicas"]) == (args.steps, args.replicas), "the file is of another study"
    rows = report["rows"]
    for row in rows:
        print(show(row), flush=True)
    for case, seed in missing(STUDIES[args.study], [int(seed) for seed in args.seeds.split(",")], rows):
        rows.append(run_case(case, steps=args.steps, replicas=args.replicas, seed=seed))
        print(show(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
