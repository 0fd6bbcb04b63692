"""Write the tables of docs/results.md, each between its two marks, from benchmarks/results/study_*.json.

    python benchmarks/study/tables.py [--check]

A loss is the mean over the seeds of a case. --check only reports whether the page agrees with the results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import fmean

from lab_tables import PAGE_TABLES
from round_lengths import codec_table
from runs import DOCS, Runs, early_bytes, late_costs, rows_of, study, table, waits_like

from noloco_p2p.optim.allreduce import ring_bytes

PAGE = DOCS / "results.md"
SIZES = (4, 8, 16)


def percent(runs: Runs, against: Runs) -> str:
    """Return the difference between the means over common seeds, in per cent."""
    seeds = runs.by_seed.keys() & against.by_seed.keys()
    ratio = fmean(runs.by_seed[seed] for seed in seeds) / fmean(against.by_seed[seed] for seed in seeds)
    return f"{100 * (ratio - 1):+.1f} %"


def distances(name: str, against: Mapping[str, str]) -> list[str]:
    """Compare every case of a study with the cases in `against` (case -> name of the column), and add its bytes."""
    cases = study(name)
    against = {case: label for case, label in against.items() if case in cases}
    head = ("", "loss", "lowest to highest", *(f"against {label}" for label in against.values()), "spread")
    rows = [
        (
            case,
            f"{runs.loss:.4f}",
            runs.range,
            *("" if case == other else percent(runs, cases[other]) for other in against),
            f"{100 * runs.spread:.2f} %",
            f"{runs.num_bytes:.3f}",
            f"{100 * runs.num_bytes / ring_bytes(4.0, runs.num_replicas):.1f} %",  # ddp sends fp32
        )
        for case, runs in cases.items()
    ]
    return table((*head, "bytes per parameter and step", "share of ddp's"), rows)


def sizes(name: str) -> list[str]:
    """Return the losses of every case with 4, 8 and 16 replicas."""
    found = {size: study(f"{name}_{size}") for size in SIZES}
    cases = list(dict.fromkeys(case for cases in found.values() for case in cases))
    rows = [(case, *(_with_range(found[size].get(case)) for size in SIZES)) for case in cases]
    return table(("", *(f"{size} replicas" for size in SIZES)), rows)


def modulo_churn() -> list[str]:
    """Compare every case with modulo8 under the same churn, and add the bytes of its early part."""
    cases, rows = study("modulo_churn"), rows_of("modulo_churn")
    early = {case: fmean(early_bytes(row) for row in rows if row["case"] == case) for case in cases}
    head = ("", "loss", "lowest to highest", "against modulo8", "spread", "early part, bytes per parameter and swap")
    lines = []
    for case, runs in cases.items():
        codec, churn = case.split(", ", 1)
        against = "" if codec == "modulo8" else percent(runs, cases[f"modulo8, {churn}"])
        lines.append(
            (case, f"{runs.loss:.4f}", runs.range, against, f"{100 * runs.spread:.2f} %", f"{early[case]:.3f}")
        )
    return table(
        (*head, "bytes per parameter and step"), [(*line, f"{cases[line[0]].num_bytes:.3f}") for line in lines]
    )


def late(name: str) -> list[str]:
    """Compare each late codec with int4 at the same round length and early codec, seed by seed."""
    cases, lines = study(name), []
    for case, runs in cases.items():
        start, _, codec = case.rpartition(", ")
        other = cases.get(f"{start}, int4") if codec not in ("", "int4") else None
        lines.append((case, *_by_seed(runs, other), f"{runs.num_bytes:.3f}"))
    head = ("", "loss", "lowest to highest", "against int4", "seed by seed", "spread", "bytes per parameter and step")
    return table(head, lines)


def momentum_swap() -> list[str]:
    """Compare each case with averaged momentum with the same case without averaged momentum, seed by seed."""
    averaged, cases, lines = ", momentum averaged", study("momentum_swap"), []
    for case, runs in cases.items():
        home = cases.get(case.removesuffix(averaged)) if case.endswith(averaged) else None
        lines.append((case, *_by_seed(runs, home), f"{runs.num_bytes:.3f}"))
    head = (
        "",
        "loss",
        "lowest to highest",
        "against no averaging",
        "seed by seed",
        "spread",
        "bytes per parameter and step",
    )
    return table(head, lines)


def lateness() -> list[str]:
    """Compare every case with the waiting case of the same optimizer and rate, seed by seed.

    Distances and gradient norms during the run are means over the seeds.
    """
    rows, lines = rows_of("lateness"), []
    for case in dict.fromkeys(row["case"] for row in rows):
        runs = [row for row in rows if row["case"] == case]
        costs = [] if case == waits_like(case) else [*late_costs(case).values()]
        lines.append(
            (
                case,
                f"{fmean(row['loss'] for row in runs):.4f}",
                f"{fmean(costs):+.1f} %" if costs else "",
                ", ".join(f"{cost:+.1f}" for cost in costs),
                *(
                    " / ".join(f"{scale * fmean(row[f'{what}_{at}'] for row in runs):.2f}" for at in ("first", "last"))
                    for what, scale in (("apart", 100), ("gradient_norm", 1))
                ),
            )
        )
    head = ("", "loss", "against waiting", "seed by seed", "apart, %", "gradient norm")
    return table(head, lines)


def lateness_curvature() -> list[str]:
    """Return the curvature during the runs as means over the seeds, with their range."""
    rows = rows_of("lateness_curvature")
    names = [name for name in rows[0] if name.startswith("curvature_")] if rows else []
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        each = [[row[name] for row in rows if row["case"] == case] for name in names]
        lines.append((case, *(f"{fmean(values):.2f} ({min(values):.2f}-{max(values):.2f})" for values in each)))
    return table(("", *(f"step {200 * float(name.removeprefix('curvature_')):.0f}" for name in names)), lines)


def lateness_quadratic() -> list[str]:
    """Return, by curvature, the mean square distances from the mean, relative to those of waiting."""
    rows = rows_of("lateness_quadratic")
    names = [name for name in rows[0] if name not in ("curvature", "rest", "predicted", "waiting")] if rows else []
    lines = [(name, *(f"{row[name]:.3g}" for row in rows)) for name in names]
    return table(("curvature times rate", *(f"{row['curvature']:g}" for row in rows)), lines)


def leads() -> list[str]:
    """Compare every lead with today's swap for the same number of replicas, seed by seed."""
    cases, lines = study("leads"), []
    for case, runs in cases.items():
        today = f"{case.rpartition(': ')[0]}: today".removeprefix(": ")
        alone = fmean(row["alone"] for row in rows_of("leads") if row["case"] == case)
        by_seed = _by_seed(runs, None if case == today else cases[today])
        lines.append((case, *by_seed, f"{alone:.0f}", f"{runs.num_bytes:.3f}"))
    head = ("", "loss", "lowest to highest", "against today", "seed by seed", "spread", "solo rounds")
    return table((*head, "bytes per parameter and step"), lines)


def _by_seed(runs: Runs, other: Runs | None) -> tuple[str, ...]:
    changes = () if other is None else [100 * (loss / other.by_seed[seed] - 1) for seed, loss in runs.by_seed.items()]
    found = "" if other is None else percent(runs, other)
    by_seed = ", ".join(f"{change:+.1f}" for change in changes)
    return f"{runs.loss:.4f}", runs.range, found, by_seed, f"{100 * runs.spread:.2f} %"


def _with_range(runs: Runs | None) -> str:
    return "" if runs is None else f"{runs.loss:.4f} ({runs.range})"


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "best": partial(distances, "best_8", {"ddp, adamw": "ddp, AdamW", "ddp": "ddp, Muon"}),
    "best_sizes": partial(sizes, "best"),
    "small": partial(distances, "small", {"ddp, adamw": "ddp, AdamW", "ddp": "ddp, Muon"}),
    "rules": partial(sizes, "rules"),
    "inner": partial(distances, "inner", {}),
    "rounds": partial(distances, "rounds", {}),
    "codecs": partial(distances, "codecs", {"fp32": "fp32"}),
    "churn": partial(distances, "churn", {"no churn": "no churn"}),
    "modulo_churn": modulo_churn,
    "late": partial(late, "late"),
    "late_small": partial(late, "late_small"),
    "momentum_swap": momentum_swap,
    "lateness": lateness,
    "lateness_curvature": lateness_curvature,
    "lateness_quadratic": lateness_quadratic,
    "leads": leads,
    "waiting": partial(distances, "waiting", {}),
    "gamma": partial(distances, "gamma", {"gamma 0.7": "gamma 0.7"}),
    "alpha": partial(distances, "alpha", {"alpha 0.5": "alpha 0.5"}),
    "groups": partial(distances, "groups", {"n = 2: pairs": "pairs"}),
    "learning_rate": partial(distances, "learning_rate", {"0.004": "0.004"}),
    "closing": partial(distances, "closing", {}),
    "equal_time_codecs": codec_table,
    **PAGE_TABLES,
}


def filled(page: str) -> str:
    """Return the page with all tables rewritten. Raises KeyError for a mark without a table."""

    def written(found: re.Match[str]) -> str:
        lines = "\n".join(TABLES[found[1]]())
        return f"<!-- {found[1]} -->\n\n{lines}\n\n<!-- /{found[1]} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", written, page, flags=re.DOTALL)


def main() -> int:
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(after, encoding="utf-8")
    elif before != after:
        print(f"not what the results say: {PAGE}; run python benchmarks/study/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
