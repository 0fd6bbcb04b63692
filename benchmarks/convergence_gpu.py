"""Compare NoLoCo, DiLoCo and synchronous training for equal numbers of tokens, with N replicas on one accelerator.

    python benchmarks/convergence_gpu.py --json FILE [--size 113m|toy] [--replicas 8] [--steps 500] [--budget-s 3000]
        [--device auto] [--data c4=GLOB] [--seeds 0,1,2]

All replicas run in one process. An accelerator computes in bf16; weights, moments and outer state are fp32. `113m` is
the small model of the paper with bytes as its vocabulary. The file is written after every case, and cases that it
already contains are skipped, so repeat the command until no case is left. The speed is measured first, and a case that
would exceed the time budget at this speed is not started.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from claims import machine

from noloco_p2p.presets import PRESETS
from noloco_p2p.settings import parse_bindings
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.result import Result, table
from noloco_p2p.simulate.run import simulate
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.compute import choose_device
from noloco_p2p.trainer.inner_step import InnerStep

PUBLISHED = {"train.inner_optimizer": "adamw", "outer.alpha": 0.5, "outer.beta": 0.7, "outer.gamma": 0.7}
PLAIN = {"outer.alpha": 0.0, "outer.beta": 1.0, "outer.gamma": 1.0}
MODULO = {"codec.slow_weights": "modulo8", "codec.outer_momentum": "modulo8", "codec.outer_gradient": "int4"}
MUON = {"train.inner_optimizer": "muon"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "synchronous": ("ddp", {}),
    "DiLoCo, 50 steps": ("diloco", {"outer.inner_steps": 50}),
    "NoLoCo, 50 steps": ("noloco", {"outer.inner_steps": 50, **MODULO}),
    "NoLoCo, 5 steps": ("noloco", {"outer.inner_steps": 5, **PLAIN, **MODULO}),
    "synchronous, Muon": ("ddp", MUON),
    "DiLoCo, 50 steps, Muon": ("diloco", {"outer.inner_steps": 50, **MUON}),
    "NoLoCo, 5 steps, Muon": ("noloco", {"outer.inner_steps": 5, **PLAIN, **MODULO, **MUON}),
    "NoLoCo, 5 steps, modulo4, Muon": (
        "noloco",
        {"outer.inner_steps": 5, **PLAIN, **MODULO, "codec.slow_weights": "modulo4", **MUON},
    ),
}
JUDGING = 1.5  # times the steps alone: a run also needs rounds, evaluation and building the models


def spec_of(size: str, *, steps: int, source: str) -> TrainerSpec:
    preset = PRESETS["small" if size == "113m" else "tiny"]
    changes: dict[str, Any] = {
        "name": f"convergence-{size}",
        "data.source": source,
        "data.tokenizer": "bytes",
        "train.total_steps": steps,
        "train.warmup_steps": max(1, steps // 10),
        "outer.max_wait_s": 1000.0,
        **PUBLISHED,
    }
    if size == "113m":
        changes |= {"model.vocab_size": 384, "train.batch_size": 16, "evaluate.num_sequences": 64}
    return preset.with_changes(changes)


def step_s(spec: TrainerSpec, device: torch.device, bindings: dict[str, str]) -> float:
    """Measure how many seconds an inner step of one replica takes."""
    material = Material.of(spec, bindings, device=device)
    inner, batch = InnerStep(material.model(), spec.train), material.validation[0]
    durations_s = []
    for _ in range(4):
        began_s = time.monotonic()
        float(inner(batch, progress=0.0))
        durations_s.append(time.monotonic() - began_s)
    return min(durations_s)


def show(rows: list[dict[str, Any]]) -> None:
    names = [f"{row['case']} (seed {row['seed']})" for row in rows]
    results = [Result(**{key: row[key] for key in Result.__dataclass_fields__}) for row in rows]
    for name, line in zip(["", *names], table(results), strict=True):
        print(f"{name:<34}{line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--size", choices=("113m", "toy"), default="113m")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--budget-s", type=float, default=3000.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", action="append", default=[])
    parser.add_argument("--seeds", default="0")
    args = parser.parse_args()
    until_s = time.monotonic() + args.budget_s
    device, bindings = choose_device(args.device), parse_bindings(args.data)
    spec = spec_of(args.size, steps=args.steps, source=next(iter(bindings), "stdlib"))
    setting = {"size": args.size, "replicas": args.replicas, "steps": args.steps, "source": spec.data.source}
    report: dict[str, Any] = {"machine": machine(), "device": str(device), **setting, "rows": []}
    if args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
        if any(report[key] != value for key, value in setting.items()):
            parser.error(f"{args.json} is of other settings; give another file")
    case_s = JUDGING * args.replicas * args.steps * step_s(spec, device, bindings)
    done = {(row["case"], row["seed"]) for row in report["rows"]}
    todo = [(name, int(seed)) for seed in args.seeds.split(",") for name in CASES if (name, int(seed)) not in done]
    for left, (name, seed) in zip(range(len(todo), 0, -1), todo, strict=True):
        if time.monotonic() + case_s > until_s:
            print(f"{left} cases are left, of about {case_s:.0f} s each: call again with the same --json")
            break
        rule, changes = CASES[name]
        began_s = time.monotonic()
        plan = Plan(args.replicas, seed=seed)
        (result,) = simulate(spec.with_changes(changes), plan, rules=[rule], bindings=bindings, device=device)
        case_s = max(case_s, time.monotonic() - began_s)
        report["rows"].append({"case": name, "seed": seed, **result.as_dict()})
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: done in {time.monotonic() - began_s:.0f} s", flush=True)
    show(report["rows"])


if __name__ == "__main__":
    main()
