"""Run the ladder: rules, each at its best, on models of growing size. It goes on where the last run stopped.

    python benchmarks/lab/ladder.py list [--sizes 0.1M,0.3M]                    cells, what is done, and the CPU hours
    python benchmarks/lab/ladder.py run [--sizes 0.1M] [--only ours] [--minutes 5] [--device cuda]
    python benchmarks/lab/ladder.py table                                       what is done, as in results/ladder.txt
    python benchmarks/lab/page.py                                               tables and plots of docs/results.md

A cell is one run: a size, an optimizer, a rule with its settings, a link and a seed. `run` runs the cells that
results/ladder.jsonl lacks, and appends each when it is done. It begins none that would not end within --minutes. Two
processes can share the work, and so can two machines if their files are put together.

**Text.** The bytes of corpus.py, 20 tokens per parameter. **Batch.** A fifth to a third of the critical batch for this
many tokens, 22.9 D ** 0.47 (arXiv 2410.21676), so that a smaller one would not learn more from them. **Rates.** At 0.1M
(seed 0, on 100 Mbit/s), each rule tries all learning rates and outer settings of its grid (`tuning`). The best of each
rule and optimizer is transferred: the learning rate is inverse to the width, as the published ones of the NoLoCo paper
are (6e-4, 2e-4 and 1.2e-4 for widths of 768, 2,048 and 4,096), and outer settings stay. Muon's steps have the size of
AdamW's, so the same rule holds. At 0.3M, seed 0 tries other rates than the transferred ones and four times the tokens.
**Time.** An inner step takes as long as 6 FLOP per parameter and token take at 40 TFLOP/s, with 65,536 tokens, and a
transfer as long as that of a model of 125M parameters. Every rule gets the time that 20 tokens per parameter take
without a network; a rule that waits for its link gets fewer. Since both times grow with the size, those of 1.3B
parameters have the same ratio. `free` is a link that takes no time, so every rule takes all steps: it shows the gap at
equal tokens.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import stack
import torch
from corpus import CACHE, make
from rows import add_missing, cell_of, key_of, read
from rules import AllReduce, Lockstep, codec_of
from swarm import run_swarm

from noloco_p2p.outer import update_filter
from noloco_p2p.simulate.material import Material
from noloco_p2p.simulate.plan import Churn, Plan
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.links import IDEAL

OUT = Path(__file__).resolve().parents[1] / "results" / "ladder.jsonl"
CLAIMED, STEP_S = 125_000_000, 6 * 125e6 * 65_536 / 40e12
FREE, DELAY_MS = "free", 5
HELD_OUT = 128
BASE_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    layers: int
    heads: int
    inner: int
    tokens: int  # length of a sequence
    batch: int  # sequences of all replicas in a step
    seeds: int
    of_adamw: int  # seeds
    tokens_a_parameter: int = 20

    @property
    def num_parameters(self) -> int:
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden) + 385 * self.hidden

    @property
    def steps(self) -> int:
        return self.tokens_a_parameter * self.num_parameters // (self.batch * self.tokens)

    @property
    def flops(self) -> float:
        """Return the floating-point operations of a cell in which no replica waits."""
        attention = 6 * self.layers * self.hidden * self.tokens
        return (6 * self.num_parameters + attention) * self.steps * self.batch * self.tokens


SIZES = {
    "0.1M": Size(64, 2, 4, 172, 64, 64, 3, 3),
    "0.3M": Size(96, 2, 4, 320, 128, 64, 3, 1),
    # With four times the tokens, which only seed 0 tries.
    "0.3M-4x-batch": Size(96, 2, 4, 320, 128, 256, 0, 0, 80),
    "0.3M-4x-steps": Size(96, 2, 4, 320, 128, 64, 0, 0, 80),
    "1M": Size(160, 3, 5, 432, 256, 64, 3, 1),
    "3M": Size(224, 5, 7, 592, 256, 128, 1, 0),  # from here on a GPU; a cell of 3M takes 3 to 10 hours of one core
    "16M": Size(384, 9, 6, 1024, 512, 128, 1, 0),
    "113M": Size(768, 16, 12, 2048, 1024, 192, 1, 0),
}
AT_ALL_LINKS = "0.1M"  # the size at which all questions are asked
OF_ADAMW = ("ddp", "diloco-30", "streaming-30", "ours")  # the rules that AdamW is tried with
# Factors of the transferred rates that are tried with seed 0, and the rules they are tried with.
FACTORS = {"0.3M": (0.5, 0.7, 1.0, 1.4), "0.3M-4x-batch": (1.0,), "0.3M-4x-steps": (1.0,)}
OF_FACTORS = ("ddp", "diloco-30", "streaming", "ours")
FLOPS_PER_S = 5e10  # of one thread of the CPUs in results/ladder.txt, beside other work; for `--minutes`
RATES = {"muon": (0.004, 0.008, 0.016, 0.032), "adamw": (0.004, 0.008, 0.016)}  # of the tuning
# Further rates where the best one was the lowest of the others.
LOWER = {("muon", "noloco-50"): (0.001, 0.002), ("adamw", "ours"): (0.001, 0.002)}
# The settings that the tuning tries for each rule: (rule of rules.py, or "swarm"; inner steps; outer alpha and beta).
NESTEROV = ((0.9, 0.7), (0.6, 0.9), (0.3, 1.0), (0.0, 1.0))
RULES: dict[str, tuple[str, int, tuple[tuple[float, float], ...]]] = {
    "ddp": ("ddp", 1, ((0.0, 1.0),)),
    "diloco-30": ("diloco-nesterov", 30, NESTEROV),
    "diloco-100": ("diloco-nesterov", 100, NESTEROV),
    "streaming": ("streaming", 0, ((0.0, 1.0),)),  # a slice after each step, as large as the link can carry until then
    "streaming-30": ("streaming", 30, NESTEROV),
    "local": ("local", 1, ((0.0, 1.0),)),  # with one merge at the end
    "noloco-50": ("swarm", 50, ((0.5, 0.7),)),  # the paper's algorithm
    "ours": ("swarm", 0, ((0.0, 1.0),)),
    "ours-outer": ("swarm", 30, ((0.3, 0.7), (0.5, 0.7))),  # with an outer step, and without waiting
}
HEADER = f"{'':13}{'lr':>8} {'outer':>9} {'loss':>7} {'merged':>7}  {'seeds':32}  steps  age  use bytes"


@dataclass(frozen=True, slots=True)
class Cell:
    size: str
    optimizer: str
    rule: str
    link: str  # Mbit/s in each direction, or `free`
    seed: int
    learning_rate: float = 0.0
    alpha: float = 0.0
    beta: float = 1.0
    replicas: int = 8
    slow: float = 0.0  # share of the replicas whose steps take twice as long
    absent: float = 0.0  # share of the time in which a replica does not swap

    @property
    def minutes(self) -> float:
        return SIZES[self.size].flops / FLOPS_PER_S / 60 + 0.3


def tuning() -> Iterator[Cell]:
    for optimizer in ("muon", "adamw"):
        for rule in RULES if optimizer == "muon" else OF_ADAMW:
            for rate in (*LOWER.get((optimizer, rule), ()), *RATES[optimizer]):
                for alpha, beta in RULES[rule][2]:
                    yield Cell("0.1M", optimizer, rule, _tuned_on(rule), 0, rate, alpha, beta)


def _tuned_on(rule: str) -> str:
    return FREE if rule in ("ddp", "local") else "100"


def ladder(found: list[dict[str, Any]], *, is_estimate: bool = False) -> Iterator[Cell]:
    """Yield the cells whose settings the tuning has chosen, the smallest first.

    If `is_estimate`, settings that are not known yet are arbitrary.
    """
    scores = {cell_of(Cell, row): score(row) for row in found}
    grids: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in tuning():
        grids[cell.optimizer, cell.rule].append(cell)
    # What is missing of a grid could still change what is best.
    known = [cells for cells in grids.values() if is_estimate or all(cell in scores for cell in cells)]
    best = [min(cells, key=lambda cell: scores.get(cell, math.inf)) for cells in known]
    for size, shape in SIZES.items():
        for seed, tuned in product(range(1, 1 + shape.seeds), best):
            cell = replace(tuned, size=size, seed=seed, learning_rate=_transferred(tuned, shape))
            if cell.optimizer == "muon" or seed <= shape.of_adamw:
                yield from _questions(cell)
    for size, factors in FACTORS.items():
        for tuned in best:
            if tuned.optimizer == "muon" and tuned.rule in OF_FACTORS:
                rates = [_transferred(tuned, SIZES[size], factor) for factor in factors]
                of_size = replace(tuned, size=size, link="100" if tuned.rule == "ours" else FREE)
                yield from (replace(of_size, learning_rate=rate) for rate in rates)


def _transferred(tuned: Cell, size: Size, factor: float = 1.0) -> float:
    return round(factor * tuned.learning_rate * BASE_WIDTH / size.hidden, 6)


def _questions(cell: Cell) -> Iterator[Cell]:
    rule, asks_all = cell.rule, cell.size == AT_ALL_LINKS and cell.seed == 1 and cell.optimizer == "muon"
    if not rule.startswith("ours"):  # whose slices would be the whole model on a link that takes no time
        yield replace(cell, link=FREE)
    if rule == "local":
        return
    links = ("100", "20", "200", "1000") if asks_all else ("100",)
    yield from (replace(cell, link=link) for link in links if rule != "ddp" or asks_all)
    if asks_all and rule not in ("ddp", "ours-outer"):
        yield from (replace(cell, link="100", replicas=num) for num in (4, 16))
        yield replace(cell, link="100", slow=0.1)
        yield replace(cell, link="100", absent=0.1)


def score(row: dict[str, Any]) -> float:
    """Return the loss that a run ends with: of a replica, or of the mean of all where they differ and it is lower."""
    return (
        min(row["loss"], row["merged_loss"]) if row["rule"] in ("local", "streaming", "streaming-30") else row["loss"]
    )


def run(cell: Cell, device: torch.device, *, min_inner_steps: int = 0) -> dict[str, Any]:
    """Run one cell, with at least `min_inner_steps` from one swap to the next, and return its row."""
    size, (kind, inner_steps, _) = SIZES[cell.size], RULES[cell.rule]
    began_s, cpu_s, limit_s = time.monotonic(), time.process_time(), size.steps * STEP_S
    num_slices = 8
    if cell.rule == "streaming":
        num_slices = inner_steps = slices_of(cell)
    spec = ladder_spec(cell, inner_steps)
    if min_inner_steps:
        spec = spec.with_changes({"outer.min_inner_steps": min_inner_steps})
    material = Material.of(spec, {"text": make(CACHE)}, device=device, seed=cell.seed)
    mbit_s = float("inf") if cell.link == FREE else float(cell.link)
    delay_ms = 0 if cell.link == FREE else DELAY_MS
    link = replace(IDEAL, name=cell.link, up_mbit_s=mbit_s, down_mbit_s=mbit_s, delay_ms=delay_ms)
    num_slow = round(cell.slow * cell.replicas + 0.49)
    speeds = (0.5,) * num_slow + (1.0,) * (cell.replicas - num_slow)
    plan = Plan(cell.replicas, cell.seed, STEP_S, speeds, (link,), Churn(absent=cell.absent), evaluations=1)
    if kind == "swarm":
        with patch.object(update_filter, "SCALE_WAITING", 1e9):  # the paper has no update filter
            result = run_swarm(material, plan, limit_s=limit_s, claimed=CLAIMED)
    else:
        lockstep = Lockstep(
            material, plan, kind, limit_s=limit_s, claimed=CLAIMED, num_slices=num_slices, is_nesterov=cell.alpha > 0
        )
        result = lockstep.run()
    told = {name: value for name, value in result.as_dict().items() if name not in ("rule", "curve")}
    seconds = {"wall_s": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_s}
    machine = {
        "device": _name_of(device),
        "products": stack.products_of(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return {**asdict(cell), **told, **seconds, **machine}


def slices_of(cell: Cell) -> int:
    """Return the least number of slices each of which the link can all-reduce in one step.

    With `free`, it is that of 100 Mbit/s.
    """
    num_bytes = AllReduce.of(codec_of("streaming", ""), num_elements=CLAIMED).sent_bytes(CLAIMED, cell.replicas)
    whole_s = 8 * num_bytes / 1e6 / (100 if cell.link == FREE else float(cell.link))
    return math.ceil(whole_s / (STEP_S * (2 if cell.slow else 1) - 4 * DELAY_MS / 1e3))


def ladder_spec(cell: Cell, inner_steps: int) -> TrainerSpec:
    size = SIZES[cell.size]
    values = {
        "name": "ladder",
        "model": {
            "hidden_size": size.hidden, "num_layers": size.layers, "num_heads": size.heads, "mlp_size": size.inner,
        },
        "data": {"source": "text", "sequence_length": size.tokens},
        "train": {
            "total_steps": size.steps,
            "warmup_steps": min(100, size.steps // 10),
            "batch_size": size.batch // 8,  # a replica's batch does not depend on the number of replicas
            "learning_rate": cell.learning_rate,
            "inner_optimizer": cell.optimizer,
        },
        "outer": {"wait": cell.rule == "noloco-50", "max_wait_s": 1e6 if cell.rule == "noloco-50" else 60.0},
        "evaluate": {"num_sequences": HELD_OUT},
    }  # fmt: skip
    spec = TrainerSpec.from_dict(values, origin="the ladder")
    # The spec refuses the momentum of DiLoCo, which pairs of peers would not survive.
    steps = {"inner_steps": inner_steps} if inner_steps else {}
    outer = spec.outer.model_copy(update={"alpha": cell.alpha, "beta": cell.beta, **steps})
    return spec.model_copy(update={"outer": outer})


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def table(found: list[dict[str, Any]]) -> str:
    """Return a line for each cell but for its seed, by size, link and optimizer, the best rule first."""
    groups: dict[tuple[Any, ...], dict[Cell, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in found:
        cell = cell_of(Cell, row)
        others = f"{cell.replicas} replicas, {100 * cell.slow:.0f} % slow, {100 * cell.absent:.0f} % absent"
        stage = "tuning" if row["seed"] == 0 else "ladder"
        groups[stage, cell.size, cell.optimizer, cell.link, others][replace(cell, seed=0)].append(row)
    lines = []
    for (stage, size, optimizer, link, others), cells in groups.items():
        shape = SIZES[size]
        of_size = f"{shape.num_parameters:,} parameters, {shape.steps} steps"
        lines += ["", f"{stage}: {size} ({of_size}), {optimizer}, link {link}, {others}", HEADER]
        for cell, rows in sorted(cells.items(), key=lambda item: fmean(map(score, item[1]))):
            means = {name: fmean(row[name] for row in rows) for name in ("loss", "merged_loss", "steps")}
            swaps = {name: fmean(row["swaps"][name] for row in rows) for name in ("age_steps", "link_use")}
            each = " ".join(f"{row['seed']}: {score(row):.4f}" for row in sorted(rows, key=lambda row: row["seed"]))
            sent = fmean(row["sent_per_parameter_step"] for row in rows)
            lines.append(
                f"{cell.rule:13}{cell.learning_rate:8.5f} {cell.alpha:4.1f} {cell.beta:4.1f} {means['loss']:7.4f} "
                f"{means['merged_loss']:7.4f}  {each:32} {means['steps']:6.0f} {swaps['age_steps']:4.1f} "
                f"{swaps['link_use']:4.2f} {sent:5.3f}"
            )
    return "\n".join(lines)


def missing(path: Path, sizes: list[str], only: str, *, is_estimate: bool = False) -> list[Cell]:
    found = read(path)
    done = {cell_of(Cell, row) for row in found}
    cells = [cell for cell in (*tuning(), *ladder(found, is_estimate=is_estimate)) if cell not in done]
    return [cell for cell in cells if cell.size in sizes and re.search(only, key_of(cell))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "table"))
    parser.add_argument("--sizes", default="0.1M,0.3M,1M")
    parser.add_argument(
        "--only", default="", help="a regular expression for the keys of cells, such as 'ours' or '\"muon\"'"
    )
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--products", choices=("fp32", "bf16"), help="of matrices; by default, what is faster here")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    until_s, sizes = time.monotonic() + 60 * arguments.minutes, arguments.sizes.split(",")
    torch.set_num_threads(arguments.threads)
    if arguments.what == "table":
        print(table(read(arguments.out)))
    elif arguments.what == "list":
        cells = missing(arguments.out, sizes, arguments.only, is_estimate=True)
        for size in sizes:
            own = [cell.minutes for cell in cells if cell.size == size]
            print(f"{size}: {len(own)} cells are missing, {sum(own) / 60:.1f} hours of one thread")
    else:
        device = torch.device(arguments.device)
        products, cells = arguments.products or stack.products_of(device), missing(arguments.out, sizes, arguments.only)
        with patch.object(stack, "products_of", lambda device: products):
            add_missing(
                cells,
                partial(run, device=device),
                arguments.out,
                can_end=lambda cell: time.monotonic() + 60 * cell.minutes <= until_s,
            )


if __name__ == "__main__":
    main()
