"""Write the tables and plots of docs/results.md from the rows of ladder.py, slices.py and stages.py.

    python benchmarks/lab/page.py [--check]

Each table stands between two markers, `<!-- lab: NAME -->` and `<!-- end -->`, and is replaced. The text around it is
not touched. --check fails if the page is out of date. A value is the mean of the seeds, with their number if there is
more than one. The tables of all rows of ladder.py, slices.py and stages.py, in results/*.txt, are replaced as well,
from the line `---` on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import ladder
import slices
import stages
from ladder import AT_ALL_LINKS, FREE, OUT, RULES, SIZES, score
from rows import read

from noloco_p2p.telemetry.console import count

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARKED = re.compile(r"(<!-- lab: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Scaling laws for DiLoCo (arXiv 2503.09799): loss above data parallelism with 8 replicas, H = 30, by parameters.
DEEPMIND = {35e6: 3.9, 180e6: 2.3, 1.3e9: 1.3}
NAMES = {
    "ddp": "synchronous training",
    "diloco-30": "DiLoCo, H = 30",
    "diloco-100": "DiLoCo, H = 100",
    "streaming": "Streaming DiLoCo, plain averages",
    "streaming-30": "Streaming DiLoCo, H = 30",
    "local": "no communication, one merge",
    "noloco-50": "the paper's NoLoCo, H = 50",
    "ours": "**swaps of slices**",
    "ours-outer": "swaps of slices, outer step",
}
LINKS = ("20", "100", "200", "1000")
HEIGHT = (1.65, 2.6)  # of the plot by link; synchronous training is in it on the fastest link only
Rows = list[dict[str, Any]]
Series = dict[str, dict[Any, tuple[float, int]]]  # of each rule: the mean and the number of seeds, by column


def series(rows: Rows, column: Callable[[dict[str, Any]], Any], keep: Callable[[dict[str, Any]], bool]) -> Series:
    """Return the mean loss of each rule and column over the seeds of the ladder, or over seed 0 of a size without."""
    found: Series = {}
    for rule in RULES:
        groups: dict[Any, list[float]] = {}
        for row in rows:
            has_seed = row["seed"] or not SIZES[row["size"]].seeds
            if has_seed and row["rule"] == rule and keep(row):
                groups.setdefault(column(row), []).append(score(row))
        if groups:
            found[rule] = {key: (fmean(losses), len(losses)) for key, losses in groups.items()}
    return found


def is_plain(row: dict[str, Any]) -> bool:
    return row["replicas"] == 8 and not row["slow"] and not row["absent"]


def is_asked(row: dict[str, Any]) -> bool:
    """Return whether a row belongs to the comparison of rules. Swaps with an outer step are among the settings."""
    is_first = row["seed"] == 1 and row["optimizer"] == "muon" and row["size"] == AT_ALL_LINKS
    return is_first and row["rule"] != "ours-outer"


def gaps(rows: Rows) -> Series:
    """Return how far each rule that ran at several sizes ends above synchronous training with equal tokens, in per
    cent, by size.

    Swaps of slices need a link, and have that of 100 Mbit/s. Each seed is compared with the same seed.
    """
    bases = {
        (row["size"], row["seed"]): score(row)
        for row in rows
        if row["rule"] == "ddp" and row["link"] == FREE and row["optimizer"] == "muon"
    }
    relative = [
        {**row, **dict.fromkeys(("loss", "merged_loss"), 100 * (score(row) / bases[row["size"], row["seed"]] - 1))}
        for row in rows
        if (row["size"], row["seed"]) in bases
    ]
    found = series(
        relative,
        lambda row: row["size"],
        lambda row: (
            row["optimizer"] == "muon"
            and is_plain(row)
            and row["rule"] != "ddp"
            and row["link"] == ("100" if row["rule"].startswith("ours") else FREE)
        ),
    )
    return {rule: cells for rule, cells in found.items() if len(cells) > 1}


def links(rows: Rows) -> Series:
    return series(rows, lambda row: row["link"], lambda row: is_asked(row) and is_plain(row) and row["link"] != FREE)


def trouble(rows: Rows) -> Series:
    def column(row: dict[str, Any]) -> str:
        if row["slow"] or row["absent"]:
            return "one at half speed" if row["slow"] else "10 % of the time absent"
        return f"{row['replicas']} replicas"

    return series(rows, column, lambda row: is_asked(row) and row["link"] == "100")


def table(found: Series, columns: Iterable[Any], form: str, head: Callable[[Any], str] = str) -> str:
    """Return a Markdown table with a line for each rule, the lowest of the last column first."""
    present = [column for column in columns if any(column in cells for cells in found.values())]
    if not present:
        return "(no cell has been computed yet)\n"
    lines = ["| | " + " | ".join(head(column) for column in present) + " |", "|---" * (1 + len(present)) + "|"]
    for rule, cells in sorted(found.items(), key=lambda item: [item[1].get(each, (9e9, 0))[0] for each in present]):
        values = [f"{cells[each][0]:{form}}" + seeds(cells[each][1]) if each in cells else "" for each in present]
        lines.append(f"| {NAMES[rule]} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def seeds(num: int) -> str:
    return f" ({num})" if num > 1 else ""


def settings(rows: Rows) -> str:
    """Return the losses of swaps of slices at 100 Mbit/s with other settings, each with its own best rate."""
    found = {told(cell): each for cell, each in slices.by_setting(read(slices.OUT)).items()}
    others = {
        "an outer step after 30 steps, alpha 0.3, beta 0.7": {"rule": "ours-outer", "optimizer": "muon"},
        "AdamW": {"rule": "ours", "optimizer": "adamw"},
    }
    for name, wanted in others.items():
        of_setting = {"size": AT_ALL_LINKS, "link": "100"} | wanted
        found[name] = [row for row in rows if row["seed"] and is_plain(row) and of_setting.items() <= row.items()]
    lines = ["| | seed 1 | mean |", "|---|---|---|"]
    first = {name: next(row["loss"] for row in each if row["seed"] == 1) for name, each in found.items() if each}
    for name in sorted(first, key=first.__getitem__):
        losses = [row["loss"] for row in found[name]]
        mean = f"{fmean(losses):.4f}{seeds(len(losses))}"
        lines.append(f"| {name} | {first[name]:.4f} | {mean} |")
    return "\n".join(lines) + "\n"


def told(cell: slices.Cell) -> str:
    if cell == slices.Cell():
        return f"**slices of {cell.slice_steps:g} steps, a swap whenever the link is free, Muon**"
    if cell.min_inner_steps:
        return f"a swap after {cell.min_inner_steps} steps"
    return f"slices of {cell.slice_steps:g} steps"


def pipelines(found: Rows) -> str:
    """Return how far pipelines end above whole models with the same links, and how fast they are."""
    whole = {row["link"]: row["loss"] for row in found if row["kind"] == "whole"}
    lines = ["| links | loss | late gradients | lost microbatches | of the predicted speed |", "|---" * 5 + "|"]
    for row in found:
        if row["kind"] == "pipeline" and row["link"] in whole:
            name = row["link"] + ", 1 % of messages lost" * bool(row["lost"])
            above, lost = 100 * (row["loss"] / whole[row["link"]] - 1), 100 * row["lost_microbatches"]
            late, speed = 100 * max(row["late"]), 100 * row["of_predicted"]
            lines.append(f"| {name} | {above:+.1f} % | up to {late:.0f} % | {lost:.1f} % | {speed:.0f} % |")
    return "\n".join(lines) + "\n"


def draw(
    path: Path,
    found: Series,
    x_of: Callable[[Any], float],
    x_label: str,
    y_label: str,
    *,
    published: dict[float, float] | None = None,
    height: tuple[float, float] | None = None,
) -> None:
    from matplotlib import rcParams
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "noloco"  # the same file for the same rows
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for rule, cells in found.items():
        points = sorted((x_of(column), loss) for column, (loss, _) in cells.items())
        is_ours = rule == "ours"
        axes.plot(*zip(*points, strict=True), "o-", lw=3 if is_ours else 1.3, ms=4, label=NAMES[rule].strip("*"))
    if published:
        axes.plot(*zip(*published.items(), strict=True), "k^:", label="DiLoCo, published (arXiv 2503.09799)")
    if height:
        axes.set_ylim(*height)
    axes.set_xscale("log")
    ticks = sorted({x_of(column) for cells in found.values() for column in cells} | {*(published or {})})
    axes.set_xticks(ticks, [count(tick) if tick > 1e4 else f"{tick:,g}" for tick in ticks])
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def made(rows: Rows) -> dict[str, str]:
    """Return the tables by name."""
    return {
        "gap": table(gaps(rows), SIZES, "+.1f"),
        "links": table(links(rows), LINKS, ".4f", lambda link: f"{link} Mbit/s"),
        "trouble": table(
            trouble(rows),
            ("8 replicas", "one at half speed", "10 % of the time absent", "4 replicas", "16 replicas"),
            ".4f",
        ),
        "settings": settings(rows),
        "stages": pipelines(read(stages.OUT)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    rows, page = read(OUT), DOCS / "results.md"
    tables, text = made(rows), page.read_text()
    new = MARKED.sub(lambda match: match[1] + tables[match[2]] + match[3], text)
    if arguments.check:
        raise SystemExit("docs/results.md is out of date; run python benchmarks/lab/page.py" if new != text else 0)
    page.write_text(new)
    for script in (ladder, slices, stages):
        if found := read(script.OUT):
            path = script.OUT.with_suffix(".txt")
            head = path.read_text().partition("---\n")[0] if path.exists() else ""
            path.write_text(f"{head}---\n{script.table(found)}\n")
    draw(
        DOCS / "lab-gap.svg",
        gaps([row for row in rows if SIZES[row["size"]].seeds]),
        lambda size: SIZES[size].num_parameters,
        "parameters",
        "loss above synchronous training, %",
        published=DEEPMIND,
    )
    y_label = "loss after equal time, nats per byte"
    draw(DOCS / "lab-links.svg", links(rows), float, "Mbit/s", y_label, height=HEIGHT)


if __name__ == "__main__":
    main()
