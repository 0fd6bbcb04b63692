"""Fine-tune adapters on data that differ from peer to peer: how often must they swap, and when does averaging fail?

    python benchmarks/adapters.py [--folder build/adapters] [--minutes 5]

A model of 1.1M weights is trained on the built-in corpus. Then, adapters of rank 8 are trained on two kinds of data:
one peer has Python code without comments and docstrings, the other only docstrings. Every loss is the mean over
held-out documents of both kinds, in nats per byte.

`apart` trains one peer of each kind without swaps, and averages their adapters after more and more steps: the matrices
A and B of each adapter separately, as a swap does, and their products BA. `together` simulates two peers, as `noloco
simulate` does, for several intervals between two swaps of a peer. `one` trains on both kinds in one place.

Finished cells are kept in the folder, so the command goes on where it was when --minutes were over.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from claims import machine

from noloco_p2p.data.reader import Reader
from noloco_p2p.data.sources import builtin_corpus
from noloco_p2p.data.stream import Corpus, TokenStream
from noloco_p2p.outer.flat import FlatParameters
from noloco_p2p.presets import PRESETS
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Plan
from noloco_p2p.simulate.replica import SimulatedReplica
from noloco_p2p.simulate.swarm import simulate_swarm
from noloco_p2p.spec import DataSpec, LoraSpec, MixSpec, TrainerSpec
from noloco_p2p.trainer.export import export_model
from noloco_p2p.trainer.inner_step import InnerStep
from noloco_p2p.trainer.lora import merged_weights
from noloco_p2p.trainer.model import build_model, build_tokenizer

KINDS = ("code", "prose")
BASE_STEPS, STEPS, NUM_PEERS = 1500, 256, 2
POINTS = (8, 16, 32, 64, 128, STEPS)
INTERVALS = (1, 8, 32, 128)
APART, TOGETHER = (5e-4, 2e-3, 8e-3), 2e-3  # learning rates
HELD_OUT = 10  # one in so many modules
BASE = PRESETS["tiny"].with_changes({"train.total_steps": BASE_STEPS, "train.learning_rate": 4e-3, "name": "base"})
TUNED = TrainerSpec.from_dict(
    {
        "name": "adapters",
        "model": {"pretrained": "base", "lora": {"rank": 8, "alpha": 16}},
        "data": {"source": "mine", "sequence_length": 128},
        "train": {"total_steps": STEPS, "warmup_steps": 20, "batch_size": 8, "learning_rate": 1e-3},
        "evaluate": {"num_sequences": 256},
    },
    origin="benchmarks/adapters.py",
)


# data


def write_data(folder: Path) -> None:
    """Write the training documents of each kind, and the held-out documents of both kinds."""
    kinds: dict[str, list[str]] = {kind: [] for kind in (*KINDS, "held_out")}
    for number, document in enumerate(Reader(builtin_corpus()).epoch()):
        try:
            tree = ast.parse(str(document.content))
        except (SyntaxError, ValueError):
            continue
        prose = "\n\n".join(_take_docstrings(tree))
        for kind, text in zip(KINDS, (ast.unparse(tree), prose), strict=True):
            if text:
                kinds["held_out" if number % HELD_OUT == 0 else kind].append(text)
    for kind, texts in kinds.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for peer in range(NUM_PEERS):
        (folder / f"peer-{peer}.jsonl").write_text((folder / f"{KINDS[peer % 2]}.jsonl").read_text())


def _take_docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (found := ast.get_docstring(node)):
            yield found
            node.body = node.body[1:] or [ast.Pass()]


def write_base(folder: Path) -> float:
    """Train the base model, and return its loss on its own kind of text."""
    model, tokenizer = build_model(BASE.model, sequence_length=128), build_tokenizer(BASE.data)
    inner = InnerStep(model, BASE.train)
    batches = TokenStream(Corpus(BASE.data, tokenizer, {}), peer_id="base", batch_size=BASE.train.batch_size)
    losses = [float(inner(next(batches), progress=step / BASE_STEPS)) for step in range(BASE_STEPS)]
    export_model(model, tokenizer, folder / "base")
    return fmean(losses[-100:])


# measurements


def material(folder: Path, training: str, changes: Mapping[str, Any]) -> Material:
    bindings = {"mine": str(folder / f"{training}.jsonl"), "mine.validation": str(folder / "held_out.jsonl")}
    return Material.of(TUNED.with_changes({**changes}), bindings, folders={"base": str(folder / "base")})


def together(folder: Path, *, interval: int) -> dict[str, float]:
    changes = {"train.learning_rate": TOGETHER, "outer.min_inner_steps": interval, "outer.closing_mixings": 0}
    made: list[SimulatedReplica] = []
    found = simulate_swarm(
        material(folder, "peer-{replica}", changes), Plan(NUM_PEERS, evaluations=1), on_made=made.extend
    )
    return {"peer": found.loss, "merged": found.merged_loss, "spread": found.spread, "swaps": found.swaps.committed}


def one(folder: Path) -> dict[str, float]:
    """Train with the batches of both peers in one place, half of the tokens from each kind."""
    mixed = DataSpec(source="mix", mix=tuple(MixSpec(source=kind) for kind in KINDS), sequence_length=128)
    changes = {"train.learning_rate": TOGETHER, "train.batch_size": 8 * NUM_PEERS}
    same = material(folder, KINDS[0], changes)
    spec = same.spec.model_copy(update={"data": mixed})
    central = replace(same, spec=spec, bindings={kind: str(folder / f"{kind}.jsonl") for kind in KINDS})
    return {"merged": simulate_swarm(central, Plan(1, evaluations=1)).merged_loss}


def apart(folder: Path, *, lr: float) -> dict[str, dict[str, float]]:
    """Average two adapters that have trained apart for several numbers of steps. The learning rate is constant."""
    both = [material(folder, kind, {"train.learning_rate": lr, "train.min_learning_rate": 1.0}) for kind in KINDS]
    models = [each.model() for each in both]
    steps = [InnerStep(model, each.spec.train) for model, each in zip(models, both, strict=True)]
    batches = [each.batches(f"peer-{number}") for number, each in enumerate(both)]
    without = both[0].spec.model.model_copy(update={"lora": LoraSpec()})
    plain = build_model(without, sequence_length=128, folders=both[0].folders)
    scratch, found = both[0].model(), {"0": {"mean of A and B": both[0].loss(both[0].model())}}
    for number in range(1, max(POINTS) + 1):
        for step, source in zip(steps, batches, strict=True):
            step(next(source), progress=min(1.0, 0.1 + number / max(POINTS)))
        if number in POINTS:
            flat = [FlatParameters(model).read(0, FlatParameters(model).num_elements) for model in models]
            merged = [merged_weights(model) for model in models]
            plain.load_state_dict({name: (tensor + merged[1][name]) / 2 for name, tensor in merged[0].items()})
            found[str(number)] = {
                **{kind: both[0].loss(model) for kind, model in zip(KINDS, models, strict=True)},
                "mean of A and B": both[0].loss_of(torch.stack(flat).mean(0), scratch),
                "mean of BA": both[0].loss(plain),
                "apart": float((flat[0] - flat[1]).norm() / torch.stack(flat).mean(0).norm()),
            }
    return found


def cells(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return what is to be measured, in order."""
    todo: dict[str, Callable[[], Any]] = {"base": lambda: write_base(folder), "one": lambda: one(folder)}
    for lr in APART:
        todo[f"apart {lr:g}"] = partial(apart, folder, lr=lr)
    for interval in (*INTERVALS, STEPS):
        todo[f"together {interval}"] = partial(together, folder, interval=interval)
    return todo


def report(found: Mapping[str, Any]) -> None:
    print(machine())
    print(f"base model: {found['base']:.3f} nats per byte on its own training text")
    for lr in APART:
        print(f"\nadapters that trained apart, and their means; learning rate {lr:g}")
        print(f"{'steps':>6} {'code':>8} {'prose':>8} {'mean A, B':>10} {'mean BA':>8} {'apart':>7}")
        for number, row in found[f"apart {lr:g}"].items():
            losses = [f"{row.get(name, math.nan):.4f}" for name in (*KINDS, "mean of A and B", "mean of BA")]
            print("{:>6} {:>8} {:>8} {:>10} {:>8} {:>6.0%}".format(number, *losses, row.get("apart", 0.0)))
    print(f"\n{NUM_PEERS} peers, {STEPS} steps each, learning rate {TOGETHER:g}")
    print(f"all data in one place, with batches {NUM_PEERS} times as large: {found['one']['merged']:.4f}")
    print(f"{'steps between swaps':>20} {'one peer':>9} {'mean of all':>12} {'spread':>7} {'swaps':>6}")
    for interval in (*INTERVALS, STEPS):
        row = found[f"together {interval}"]
        print(f"{interval:>20} {row['peer']:9.4f} {row['merged']:12.4f} {row['spread']:7.1%} {row['swaps']:6.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/adapters"))
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell after this time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    kept, began_s = args.folder / "found.json", time.monotonic()
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if not found:
        write_data(args.folder)
    for name, measure in cells(args.folder).items():
        if name not in found and time.monotonic() - began_s < 60 * args.minutes:
            cell_s = time.monotonic()
            found[name] = measure()
            kept.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: {time.monotonic() - cell_s:.0f} s", flush=True)
    if len(found) == len(cells(args.folder)):
        report(found)


if __name__ == "__main__":
    main()
