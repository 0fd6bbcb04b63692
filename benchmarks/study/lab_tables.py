"""Make the tables of the lab from benchmarks/results/lab.jsonl. `tables.py` writes them into docs/results.md.

Every table of losses is followed by a table that compares this project with each other rule. A verdict needs all seeds
on one side: "loses" and "ahead" are true for every seed, and anything else is "undecided". If two rules are equal,
three seeds are on one side in a quarter of all cases, which the page mentions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from statistics import fmean

from lab import (
    ABSENCES,
    BUDGET,
    CAPS,
    FAMILIES,
    OURS,
    PEERS,
    PLACES,
    REPLICAS,
    ROUND_LENGTHS,
    SEEDS,
    Lab,
    Place,
    Run,
    Setting,
    churned,
    entrants,
    finalists,
    mean_loss,
    of_results,
    schedules_of,
    target_settings,
)
from lab_clock import FLOP_PER_S, SIZES
from runs import table

from noloco_p2p.gossip.round_length import STEPS_EXPONENT

SEVERAL = 3  # seeds that a verdict needs


def losses(lab: Lab, setting: Setting, **options: object) -> list[float]:
    """Return one loss for each seed of the lab whose run exists and did not diverge."""
    runs = (Run(setting, seed, **options) for seed in SEEDS)  # pyright: ignore[reportArgumentType]
    return [lab.rows[run]["loss"] for run in runs if run in lab.rows and lab.rows[run]["loss"] is not None]


def shown(values: Sequence[float]) -> str:
    """Format the mean and the range of the losses."""
    if not values:
        return "diverged or not run"
    spread = f"{min(values):.4f}-{max(values):.4f}" if len(values) > 1 else "one seed"
    return f"{fmean(values):.4f} ({spread})"


def compared(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the verdict of a comparison seed by seed."""
    if len(ours) < SEVERAL or len(ours) != len(theirs):
        return "too few seeds for a verdict"
    percent = f"{100 * (fmean(ours) / fmean(theirs) - 1):+.1f} %"
    if all(one > other for one, other in zip(ours, theirs, strict=True)):
        return f"loses ({percent})"
    if all(one < other for one, other in zip(ours, theirs, strict=True)):
        return f"ahead ({percent})"
    return f"undecided ({percent})"


def verdicts(groups: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Return a table with a column for each other family. `groups` maps place -> family -> losses (one per seed)."""
    others = [name for name in FAMILIES if name != OURS]
    rows = [
        (where, *(compared(found[OURS], found[name]) if found.keys() >= {OURS, name} else "-" for name in others))
        for where, found in groups.items()
    ]
    return ["", *table((f"{OURS}, against", *others), rows)]


def best_rows(lab: Lab, **options: object) -> dict[str, dict[str, list[float]]]:
    """Return 'optimizer, cap' -> family -> losses of the winner. Families without a cap are listed under every cap."""
    rows = {tuple(name.split("; ")): setting for name, setting in entrants(lab).items()}
    found: dict[str, dict[str, list[float]]] = {}
    for optimizer, cap in product(("muon", "adamw"), CAPS):
        for name, family in FAMILIES.items():
            label = f"best, {optimizer}" + (f", a {cap}" if family.is_capped else "")
            found.setdefault(f"{optimizer}, a {cap}", {})[name] = losses(lab, rows[name, label], **options)
    return found


def tokens(lab: Lab) -> list[str]:
    head = ("", "setting", *(f"{peers} replicas" for peers in PEERS), "0.9M, 8 replicas")
    chosen = finalists(lab)
    *tried, last = (f"{lab.num_tried[name]} for {name.replace(', ', ' with ')}" for name in FAMILIES)

    def cell(setting: Setting, **options: object) -> str:
        is_run = setting in chosen.values() or options == {"replicas": REPLICAS}
        return shown(losses(lab, setting, steps=lab.steps, **options)) if is_run else "-"

    rows = [
        (
            name.replace("; ", ": "),
            setting.words(),
            *(cell(setting, replicas=peers) for peers in PEERS),
            cell(setting, model="small"),
        )
        for name, setting in entrants(lab).items()
    ]
    stands = {
        f"{peers} replicas, a {cap}": {
            name: losses(lab, chosen[name, cap if family.is_capped else None], replicas=peers, steps=lab.steps)
            for name, family in FAMILIES.items()
        }
        for peers, cap in product(PEERS, CAPS)
    }
    return [
        f"The table shows the losses of the toy after {lab.steps} inner steps per replica: the mean over {len(SEEDS)} "
        "seeds, with the lowest and the highest loss in parentheses. The 0.9M model was trained with one seed, so "
        "there are no verdicts for it. A search ends when no neighbour of the best setting is better, or after "
        f"{BUDGET} runs. The searches took the following numbers of runs: {', '.join(tried)} and {last}.",
        "",
        *table(head, rows),
        *verdicts(stands),
    ]


def by_bytes(lab: Lab) -> list[str]:
    rows = []
    for name, setting in entrants(lab).items():
        done = [run for seed in SEEDS if (run := Run(setting, seed, steps=lab.steps)) in lab.rows]
        sent = fmean(lab.rows[run]["sent_per_parameter_step"] for run in done) if done else 0.0
        rows.append((sent, (name.replace("; ", ": "), f"{sent:.4f}", shown(losses(lab, setting, steps=lab.steps)))))
    caps = " or ".join(f"{cap:g} (a {name})" for name, cap in CAPS.items())
    return [
        f"For the toy with {REPLICAS} replicas, the table shows the bytes that each replica sends and the loss, in "
        f"descending order of bytes. A best setting uses the shortest rounds whose nominal bytes stay under its cap: "
        f"{caps} bytes per parameter and step. The nominal bytes include neither closing rounds nor chunks that "
        "`modulo` codecs send again, so most settings of NoLoCo exceed their cap.",
        "",
        *table(
            ("", "bytes per parameter and step", "loss"), [row for _, row in sorted(rows, key=lambda each: -each[0])]
        ),
        *verdicts(best_rows(lab, steps=lab.steps)),
    ]


def clock_line() -> str:
    sizes = "; ".join(f"{size.name}: {size.tokens:,} tokens and {size.step_s:.1f} s per step" for size in SIZES)
    return (
        f"The losses come from the toy (0.12M parameters, {REPLICAS} replicas). The clock assumes models of the stated "
        f"sizes on a card that delivers {FLOP_PER_S / 1e12:.0f} TFLOP/s ({sizes}). It also counts waiting and encoding."
    )


def places_table(lab: Lab, cell: Callable[[Place, str], str]) -> list[str]:
    rows = [(f"{place.size.name}, {place.link}", *(cell(place, name) for name in FAMILIES)) for place in PLACES]
    return table(("", *FAMILIES), rows)


def in_time(lab: Lab, place: Place, name: str) -> tuple[Setting, int, float, list[float]] | None:
    """Return the chosen setting, the steps of its schedule, the steps that fit into the time, and losses by seed.

    The losses are corrected to those steps by the exponent of the curve in gossip/round_length.py.
    """
    chosen = place.choice(lab, name)
    if chosen is None:
        return None
    setting, steps = chosen
    exact = place.steps_in_time(lab, place.clock(setting))
    return (
        setting,
        steps,
        exact,
        [loss * (steps / exact) ** STEPS_EXPONENT for loss in losses(lab, setting, steps=steps)],
    )


def at_time(lab: Lab) -> list[str]:
    found = {(place, name): in_time(lab, place, name) for place, name in product(PLACES, FAMILIES)}

    def cell(place: Place, name: str) -> str:
        if (here := found[place, name]) is None:
            return "no schedule of 10 steps fits"
        setting, steps, exact, corrected = here
        return f"{shown(corrected)}, {steps} of {exact:.0f} steps in rounds of {setting.inner_steps}"

    stands = {
        f"{place.size.name}, {place.link}": {name: here[3] for name in FAMILIES if (here := found[place, name])}
        for place in PLACES
    }
    *lengths, longest = map(str, ROUND_LENGTHS)
    return [
        clock_line(),
        f"Every rule gets the time in which a card without communication computes {lab.steps} steps. Each rule uses "
        "the round length that gave it the lowest loss with the seed of the search. The candidates are "
        f"{', '.join(lengths)} and {longest} steps. A schedule consists of whole rounds, and its number of steps is a "
        "multiple of 10, so it can end before the time is up. To correct for that, the table multiplies the loss by "
        f"(steps / steps that fit into the time)^{STEPS_EXPONENT:g}, according to the [fitted "
        "curve](#round-length-at-equal-time).",
        "",
        *places_table(lab, cell),
        *verdicts(stands),
    ]


def to_targets(lab: Lab) -> list[str]:
    lines = [
        clock_line(),
        "Each cell shows the shortest complete schedule whose mean loss over the seeds is at or below the target.",
    ]
    for name, setting in target_settings(lab).items():
        target = mean_loss(lab, setting, steps=lab.steps)
        whose = f"the loss of {name} ({setting.words()}) after {lab.steps} steps, averaged over {len(SEEDS)} seeds"
        lines += ["", f"The target is {target:.4f}, {whose}.", "", *to_target(lab, target)]
    return lines


@cache
def to_reach(lab: Lab, place: Place, name: str, target: float) -> tuple[float, int] | None:
    """Return the seconds and inner steps of the shortest schedule of `name` that ends at or below `target`, or None."""
    setting = place.setting(lab, name)
    if setting is None:
        return None
    reached = (steps for steps in schedules_of(lab, setting) if mean_loss(lab, setting, steps=steps) <= target)
    steps = next(reached, None)  # schedules come in order, the shortest first
    return None if steps is None else (place.clock(setting).seconds(steps), steps)


def to_target(lab: Lab, target: float) -> list[str]:
    def cell(place: Place, name: str) -> str:
        found = to_reach(lab, place, name, target)
        return "not reached" if found is None else f"{found[0] / 60:.1f} min, {found[1]} steps"

    return places_table(lab, cell)


def under_churn(lab: Lab) -> list[str]:
    shares = (0.0, *ABSENCES)
    rows = [
        (name, setting.words(), *(shown(losses(lab, setting, steps=lab.steps, absent=absent)) for absent in shares))
        for name, setting in churned(lab).items()
    ]
    stands = {
        f"{absent:.0%} lost": {
            name: losses(lab, setting, steps=lab.steps, absent=absent) for name, setting in churned(lab).items()
        }
        for absent in shares
    }
    return [
        "In a lost round, no other replica can reach the affected replica. ddp and DiLoCo average over the other "
        "replicas, and send their mean to the affected replica afterwards. In NoLoCo, the affected replica takes the "
        "outer step without a partner.",
        "",
        *table(("", "setting", *(f"{absent:.0%} of the rounds lost" for absent in shares)), rows),
        *verdicts(stands),
    ]


LAB_TABLES: Mapping[str, Callable[[Lab], list[str]]] = {
    "lab_tokens": tokens,
    "lab_bytes": by_bytes,
    "lab_time": at_time,
    "lab_target": to_targets,
    "lab_churn": under_churn,
}


def from_results(make: Callable[[Lab], list[str]]) -> list[str]:
    """Return the table, or a line in its place if a run is missing that the choice of settings needs."""
    try:
        return make(of_results())
    except RuntimeError:
        return ["These runs are not done yet: no verdict."]


PAGE_TABLES: Mapping[str, Callable[[], list[str]]] = {
    name: partial(from_results, make) for name, make in LAB_TABLES.items()
}
