"""Compare small swaps with DiLoCo and with all-reduces at equal time, on links of three speeds.

    python benchmarks/lab/leads.py search|timing|links|details|long|small ... [--device cuda]
    python benchmarks/lab/leads.py gpu16 --device cuda --minutes 5 [--corpus FILE]

It appends to results/leads.jsonl, and prints all tables. Without a table's name, it only prints.

A tick is the time of an inner step: 6 FLOP per parameter and token, 65,536 tokens, 125M parameters, on a card that
delivers 40 TFLOP/s (1.23 s). The models are much smaller than that, but their swaps take as many ticks as those of 125M
parameters would. A vector coded with `modulo` has 0.59 bytes per parameter, so it takes 2.4 ticks at 200 Mbit/s. An
int4 ring of eight replicas takes 1.57 times as long. All rules train for the same number of ticks. Closing swaps come
after that, and are not counted, because their number does not grow with the length of a run. The rings are flattered:
their sums are exact, and no replica is ever late or absent.

`search` tries the settings of DiLoCo and the learning rates of all rules with seed 0. `links`, `long` (four times the
time) and `small` (0.8M parameters) take the best of them for each link, and run with seeds 1, 2 and 3. `timing` and
`details` vary the design of the swaps.

`gpu16` trains 16M parameters. Its rules run one after another for the same number of ticks, which is chosen so that
they fit into `--minutes`. Its learning rate is that of the toy, 0.016, times sqrt(2 / 9), the root of the ratio of the
layers; it does not depend on the width, because Muon's steps have the same spectral norm at any width. On a GPU,
products are computed in bf16, and those of Muon in TF32.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import log2, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from stack import NUM_CHUNKS, SHAPES, Optimizer, Stack, corpus
from swaps import Links, Result, Tick, blocking, every_tick, small_swaps, streaming
from torch import Tensor

OUT = Path(__file__).parent.parent / "results" / "leads.jsonl"
LINKS = {"200 Mbit/s": 2.4, "100 Mbit/s": 4.8, "20 Mbit/s": 24.0}  # ticks of a vector coded with `modulo`
RING = 1.57  # ticks of an int4 ring of eight replicas, over those of a vector coded with `modulo`
SEEDS = (1, 2, 3)
HELD_OUT = 96  # sequences
STEP_OVER_DISTANCE = 0.75  # as in noloco_p2p.codec.modulo
MAX_ROWS = 800  # replicas in one forward pass
PROBE_TICKS = 10
TOKENS_A_PARAMETER = 20  # of all replicas, at most


@dataclass(frozen=True, slots=True)
class Case:
    """One rule on one link with its settings. `options` are those of the rule's function in swaps.py."""

    table: str
    link: str
    rule: str  # ddp, local, diloco, nesterov, streaming, swaps
    options: dict[str, Any]
    learning_rate: float = 0.016
    alpha: float = 0.0
    beta: float = 1.0
    replicas: int = 8
    ticks: int = 800
    shape: str = "toy"
    seed: int = 0
    links: Links | None = None

    @property
    def name(self) -> str:
        parts = [f"{name}={value}" for name, value in self.options.items()]
        if self.rule in ("diloco", "nesterov"):
            parts += [f"alpha={self.alpha}", f"beta={self.beta}"]
        return " ".join([self.rule, *parts, f"lr={self.learning_rate}"])

    def schedule(self) -> tuple[list[Tick], dict[str, float]]:
        """Return the ticks, and figures that do not depend on weights."""
        ticks, upload = self.ticks, LINKS.get(self.link, 0.0)
        if self.rule in ("ddp", "local"):
            return every_tick(self.replicas, ticks), {"steps": ticks}
        if self.rule == "streaming":
            return streaming(self.replicas, ticks, upload=RING * upload, **self.options), {"steps": ticks}
        if self.rule == "swaps":
            links = self.links or Links.equal(self.replicas, upload)
            found: Result = small_swaps(links, ticks, self.seed, **self.options)
            steps = fmean(sum(i in tick.training for tick in found.ticks) for i in range(self.replicas))
            return found.ticks, {"steps": steps, "use": found.use, "age": found.age, "swaps": found.num_swaps}
        taken_ticks, taken = blocking(self.replicas, ticks, steps=self.options["steps"], wait=RING * upload)
        return taken_ticks, {"steps": taken}


class Lab:
    """Train all cases at once. They have the same shape and number of ticks."""

    def __init__(self, cases: list[Case], device: torch.device, corpus_file: Path | None = None) -> None:
        self.cases, self.device = cases, device
        self.shape, self.tick_s = SHAPES[cases[0].shape], 0.0
        self.starts, seeds = [], []
        for case in cases:
            self.starts.append(len(seeds))
            seeds += [case.seed] * case.replicas
        self.stack = Stack(self.shape, seeds, device)
        self.optimizer = Optimizer(self.stack, muon=True)
        self.flat = self.stack.flat
        self.chunks = self.flat.view(len(seeds), NUM_CHUNKS, -1)
        rounds = any(case.rule in ("diloco", "nesterov") for case in cases)
        self.slow = self.flat.clone() if rounds else None
        self.momentum = torch.zeros_like(self.flat) if rounds else None
        self.distances = torch.zeros(len(seeds), NUM_CHUNKS, device=device)  # root mean squares of the last swap
        self.bits: list[Tensor] = []  # per number, of each group of swaps
        self.due: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)  # (rows, chunks, halves) by tick
        self.text, self.held_out = corpus(device, corpus_file)
        self.batches = {seed: torch.Generator().manual_seed(1000 + seed) for seed in sorted({c.seed for c in cases})}
        self.generator = torch.Generator(device).manual_seed(7)

    def run(self) -> list[dict[str, Any]]:
        schedules = [case.schedule() for case in self.cases]
        num_ticks, began_s = self.cases[0].ticks, time.monotonic()
        for now in range(num_ticks):
            ticks = [ticks[now] for ticks, _ in schedules]
            self._train(ticks, self._learning_rates(now, num_ticks), now)
            self._add(self.due.pop(now, []))
            for start, case, tick in zip(self.starts, self.cases, ticks, strict=True):
                if tick.reduce:
                    self._reduce(start, case, *tick.reduce, now)
            self._begin_swaps(ticks, now)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        took_s = time.monotonic() - began_s
        self.tick_s, rows = took_s / num_ticks, []
        for start, case, (_, figures) in zip(self.starts, self.cases, schedules, strict=True):
            place = slice(start, start + case.replicas)
            before, merged = self._evaluate(self.flat[place])
            if case.rule == "swaps":
                self._close(place, case)
            after, _ = self._evaluate(self.flat[place])
            weights = self.flat[place]
            spread = ((weights - weights.mean(0)).norm() / weights.mean(0).norm() / case.replicas**0.5).item()
            rows.append(
                {
                    "table": case.table, "link": case.link, "case": case.name, "seed": case.seed,
                    "replicas": case.replicas, "ticks": case.ticks, "shape": case.shape,
                    "loss": round(after, 4), "before_closing": round(before, 4), "merged": round(merged, 4),
                    "spread": round(spread, 5), **{k: round(v, 3) for k, v in figures.items()},
                }
            )  # fmt: skip
        bits = torch.stack(self.bits).nanmean().item() if self.bits else 0.0
        print(
            f"{len(self.flat)} replicas, {num_ticks} ticks: {took_s:.0f} s"
            + (f"; {bits:.2f} bits per number" if bits else ""),
            flush=True,
        )
        return rows

    def _learning_rates(self, now: int, num_ticks: int) -> float:
        """Return the factor of the learning rate. The progress is the share of the time that has passed."""
        warm_up = max(1, min(100, num_ticks // 10))
        cosine = 0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi * now / num_ticks)).item()) / 2
        return min(1.0, (now + 1) / warm_up) * cosine

    def _train(self, ticks: list[Tick], factor: float, now: int) -> None:
        shape, most = self.shape, max(case.replicas for case in self.cases)
        texts = {}
        for seed, generator in self.batches.items():
            places = torch.randint(len(self.text) - shape.tokens - 1, (16, shape.batch), generator=generator)[:most]
            offsets = torch.arange(shape.tokens + 1, device=self.device)
            texts[seed] = self.text[places.to(self.device)[..., None] + offsets].long()
        by_rate: dict[float, list[tuple[int, Case, Tick]]] = defaultdict(list)
        for start, case, tick in zip(self.starts, self.cases, ticks, strict=True):
            if tick.training:
                by_rate[case.learning_rate].append((start, case, tick))
        for rate, group in by_rate.items():
            rows = torch.tensor([start + i for start, _, tick in group for i in tick.training], device=self.device)
            text = torch.cat([texts[case.seed][tick.training] for _, case, tick in group])
            for some, part in zip(rows.split(MAX_ROWS), text.split(MAX_ROWS), strict=True):
                weights = self.flat[some].requires_grad_()
                with self._autocast():
                    losses = self.stack.losses(weights, part)
                (gradients,) = torch.autograd.grad(losses.sum(), weights)
                self._average_gradients(group, some, gradients)
                self.optimizer.step(some, gradients, rate * factor)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _average_gradients(self, group: list[tuple[int, Case, Tick]], rows: Tensor, gradients: Tensor) -> None:
        for start, case, _ in group:
            if case.rule == "ddp":
                place = (rows >= start) & (rows < start + case.replicas)
                gradients[place] = gradients[place].mean(0, keepdim=True)

    def _add(self, arrived: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
        for rows, chunks, halves in arrived:
            self.chunks.index_put_((rows[:, None], chunks), halves, accumulate=True)

    def _reduce(self, start: int, case: Case, first: int, last: int, due: int, now: int) -> None:
        """Average over all replicas of a case: DiLoCo's outer step at once, or a slice of the weights at `due`."""
        place = slice(start, start + case.replicas)
        if case.rule == "streaming":
            part = self.chunks[place, first:last]
            rows = torch.arange(start, start + case.replicas, device=self.device)
            chunks = torch.arange(first, last, device=self.device).expand(case.replicas, -1)
            self.due[due].append((rows, chunks, part.mean(0, keepdim=True) - part))
            return
        assert self.slow is not None
        assert self.momentum is not None
        gradient = self.flat[place].mean(0, keepdim=True) - self.slow[place]
        self.momentum[place] = case.alpha * self.momentum[place] + gradient
        nesterov = case.rule == "nesterov"
        update = case.alpha * self.momentum[place] + gradient if nesterov else self.momentum[place]
        self.slow[place] += case.beta * update
        self.flat[place] = self.slow[place]

    def _begin_swaps(self, ticks: list[Tick], now: int) -> None:
        by_width: dict[int, list[tuple[int, int, int, int, int]]] = defaultdict(list)
        for start, tick in zip(self.starts, ticks, strict=True):
            for swap in tick.swaps:
                if swap.due:
                    pair = (start + swap.one, start + swap.other, swap.first, *swap.due)
                    by_width[swap.last - swap.first].append(pair)
        for width, pairs in by_width.items():
            one, other, first, *due = torch.tensor(pairs, device=self.device).T
            chunks = first[:, None] + torch.arange(width, device=self.device)
            places = (one[:, None], chunks), (other[:, None], chunks)
            halves = self._half(self.chunks[places[0]], self.chunks[places[1]], *places)
            for rows, when, sign in ((one, due[0], 1), (other, due[1], -1)):
                for tick in when.unique().tolist():
                    some = when == tick
                    self.due[tick].append((rows[some], chunks[some], sign * halves[some]))

    def _half(self, own: Tensor, partner: Tensor, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
        """Return (Q(partner) - Q(own)) / 2 with modulo coding: a shared dither, and a grid from the last distances.

        `own` and `partner` have shape (pairs, chunks, elements). A chunk without a recorded distance is exact.
        """
        known = [self.distances[place] for place in (one, other)]
        exponents = [torch.frexp(found * STEP_OVER_DISTANCE).exponent.masked_fill(found == 0, 127) for found in known]
        exponent = torch.minimum(*exponents)
        step = torch.exp2(exponent.clamp_max(100).float())[..., None]
        dither = torch.rand(own.shape, generator=self.generator, device=self.device) - 0.5
        difference = torch.round(partner / step + dither) - torch.round(own / step + dither)
        largest = difference.abs().amax(-1)
        bits = torch.where(largest < 8, 4.0, torch.where(largest < 32, 6.0, torch.where(largest < 128, 8.0, 16.0)))
        self.bits.append(bits.masked_fill(exponent == 127, torch.nan).nanmean())
        half = torch.where((exponent == 127)[..., None], partner - own, difference * step) / 2
        distance = 2 * half.square().mean(-1).sqrt()
        self.distances[one], self.distances[other] = distance, distance
        return half

    def _close(self, place: slice, case: Case) -> None:
        rng = random.Random(case.seed)
        for _ in range(round(log2(case.replicas)) + 3):
            order = rng.sample(range(place.start, place.stop), case.replicas)
            one, other = torch.tensor(order, device=self.device).view(2, -1)
            self.flat[one] = self.flat[other] = (self.flat[one] + self.flat[other]) / 2

    @torch.no_grad()
    def _evaluate(self, flat: Tensor) -> tuple[float, float]:
        """Return the mean held-out loss of the replicas, and the loss of the mean of their weights."""
        tokens = self.shape.tokens
        places = torch.arange(HELD_OUT, device=self.device)[:, None] * 3001 % (len(self.held_out) - tokens - 1)
        text = self.held_out[places + torch.arange(tokens + 1, device=self.device)].long()
        replicas, merged = [], []
        with self._autocast(), torch.compiler.set_stance("force_eager"):
            for part in text.split(16):
                replicas.append(self.stack.losses(flat, part.expand(len(flat), -1, -1)).mean().item())
                merged.append(self.stack.losses(flat.mean(0, keepdim=True), part[None]).item())
        return fmean(replicas), fmean(merged)


RATES = (0.012, 0.016, 0.024)
OUTER = (("diloco", 0.0, 1.0), ("diloco", 0.3, 0.7), ("diloco", 0.3, 1.0), ("diloco", 0.5, 0.7), ("nesterov", 0.5, 0.7))
ROUNDS = {"200 Mbit/s": (5, 10, 20), "100 Mbit/s": (10, 20, 40), "20 Mbit/s": (30, 60, 120)}
SLICE_TICKS = 0.8  # the best of `timing`: a slice that arrives before the next inner step ends


def search() -> list[Case]:
    cases = [Case("search", "", rule, {}, rate) for rule in ("ddp", "local") for rate in RATES]
    for link in LINKS:
        for rate in RATES:
            cases += [
                Case("search", link, rule, {"steps": steps}, rate, alpha, beta)
                for rule, alpha, beta in OUTER
                for steps in ROUNDS[link]
            ]
            cases += [Case("search", link, "streaming", {"slices": slices}, rate) for slices in (3, 8, 20)]
            cases += [Case("search", link, "swaps", {"slice_ticks": ticks}, rate) for ticks in (1.0, LINKS[link])]
    return cases


def finalists(found: list[dict[str, Any]]) -> list[Case]:
    """Return the best case of each rule and link in the search. DiLoCo with and without Nesterov are one rule.

    The search tunes the learning rate of swaps with slices of one tick; these slices get their length from `timing`.
    """
    chosen: dict[tuple[str, str], tuple[float, Case]] = {}
    losses = {(row["link"], row["case"]): row["loss"] for row in found if row["table"] == "search"}
    for case in search():
        rule = "diloco" if case.rule == "nesterov" else case.rule
        if rule == "swaps":
            rule += f" {case.options['slice_ticks'] == LINKS[case.link]}"
        loss = losses[case.link, case.name]
        if (case.link, rule) not in chosen or loss < chosen[case.link, rule][0]:
            chosen[case.link, rule] = loss, case
    cases = [case for _, case in chosen.values()]
    return [
        replace(case, options={"slice_ticks": SLICE_TICKS}) if case.options.get("slice_ticks") == 1.0 else case
        for case in cases
    ]


def details() -> list[Case]:
    """Return the cases that decide the details of the design, each with one change."""
    cases = []
    for link in ("100 Mbit/s", "20 Mbit/s"):
        base = {"slice_ticks": SLICE_TICKS}
        changes: list[dict[str, Any]] = [
            {},
            {"pick": "oldest for one"},
            {"pick": "random"},
            {"repeats": True},
            {"broken": 0.2},
            {"pairing_ticks": 0.5},
        ]
        cases += [Case("details", link, "swaps", base | change, 0.024) for change in changes]
        cases += [
            Case("replicas", link, "swaps", base | {"repeats": repeats}, 0.024, replicas=replicas)
            for replicas in (4, 8, 16)
            for repeats in (False, True)
        ]
    unequal = {
        "four at 200, four at 20 Mbit/s": Links((2.4,) * 4 + (24.0,) * 4, (1.0,) * 8),
        "steps of 1, 1, 1, 1, 2, 2, 3, 3 ticks, 100 Mbit/s": Links((4.8,) * 8, (1.0,) * 4 + (2.0, 2.0, 3.0, 3.0)),
    }
    cases += [
        Case("unequal", name, "swaps", {"slice_ticks": ticks}, 0.024, links=links)
        for name, links in unequal.items()
        for ticks in (SLICE_TICKS, 4.0)
    ]
    return cases


def timing() -> list[Case]:
    """Return the cases that decide when snapshots are taken, and how large slices are."""
    options = [
        *(
            {"slice_ticks": ticks, "ahead": ahead}
            for ticks in (0.5, 0.8, 1.0, 1.5, 2.0, 4.0)
            for ahead in (False, True)
        ),
        {"slice_ticks": 0.8, "ahead": False, "pairing_ticks": 0.0, "in_phase": True},
    ]
    return [
        Case("timing", link, "swaps", option, learning_rate=0.024)
        for link in LINKS
        for option in options
        if option["slice_ticks"] < LINKS[link]
    ]


def gpu16() -> list[Case]:
    """Return the cases with 16M parameters, the most important ones first. 30 steps is the H of DiLoCo's authors."""
    link, swaps = "100 Mbit/s", {"slice_ticks": SLICE_TICKS}
    cases = [
        Case("gpu16", link, "swaps", swaps),
        Case("gpu16", "", "ddp", {}),
        Case("gpu16", link, "streaming", {"slices": 8}),
        Case("gpu16", link, "nesterov", {"steps": 30}, alpha=0.5, beta=0.7),
        Case("gpu16", "20 Mbit/s", "swaps", swaps),
        Case("gpu16", "", "local", {}),
    ]
    return [replace(case, shape="16M", learning_rate=round(0.016 * sqrt(2 / 9), 4), seed=1) for case in cases]


def in_time(
    cases: list[Case], minutes: float, device: torch.device, corpus_file: Path | None
) -> Iterator[dict[str, Any]]:
    """Train the cases one after another, for the same number of ticks, and yield the row of each."""
    until_s = time.monotonic() + 60 * minutes
    probe = [replace(cases[0], ticks=PROBE_TICKS)]
    Lab(probe, device, corpus_file).run()  # compiles
    began_s, lab = time.monotonic(), Lab(probe, device, corpus_file)
    lab.run()
    tick_s, shape = lab.tick_s, lab.shape
    beside_s = time.monotonic() - began_s - tick_s * PROBE_TICKS
    most = TOKENS_A_PARAMETER * shape.num_parameters // (cases[0].replicas * shape.batch * shape.tokens)
    fitting = ((until_s - time.monotonic()) / len(cases) - beside_s) / tick_s
    ticks = max(1, min(most, int(0.95 * fitting)))
    for case in cases:
        if time.monotonic() + ticks * tick_s + beside_s > until_s:
            return
        yield from Lab([replace(case, ticks=ticks)], device, corpus_file).run()


def planned(tables: list[str], found: list[dict[str, Any]]) -> list[Case]:
    if "search" in tables:
        return search()
    cases: list[Case] = []
    if "links" in tables:
        cases += [replace(case, table="links") for case in finalists(found)]
    if "details" in tables:
        cases += details()
    if "timing" in tables:
        cases += timing()
    if "long" in tables:
        cases += [
            replace(case, table="long", ticks=3200) for case in finalists(found) if case.link in ("", "100 Mbit/s")
        ]
    if "small" in tables:
        cases += [
            replace(case, table="small", shape="small", learning_rate=0.016)
            for case in finalists(found)
            if case.link in ("", "20 Mbit/s", "100 Mbit/s") and case.rule != "local"
        ]
    return [replace(case, seed=seed) for case in cases for seed in SEEDS]


def tables(found: list[dict[str, Any]]) -> str:
    """Return one line per case, by table and link, without the search."""
    groups: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in found:
        if row["table"] != "search":
            case = row["case"] if row["replicas"] == 8 else f"{row['case']} N={row['replicas']}"
            groups[row["table"], row["link"] or "no link"][case].append(row)
    lines = []
    for (table, link), cases in sorted(groups.items()):
        lines += ["", f"{table}, {link}", f"{'':72} loss    seeds  {' ':18}merged  use  age  steps"]
        for case, rows in sorted(cases.items(), key=lambda item: fmean(row["loss"] for row in item[1])):
            losses = [row["loss"] for row in rows]
            means = {name: fmean(row.get(name, 0.0) for row in rows) for name in ("merged", "use", "age", "steps")}
            lines.append(
                f"{case:72} {fmean(losses):.4f}  {' '.join(f'{loss:.4f}' for loss in losses):24} {means['merged']:.4f} "
                f"{means['use']:5.2f}{means['age']:5.1f} {means['steps']:6.0f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="*", help="search, then timing, details, links, long or small; or only gpu16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--ticks", type=int, default=0, help="override the length, for a quick try")
    parser.add_argument("--minutes", type=float, default=5.0, help="of gpu16")
    parser.add_argument("--rows", type=int, default=6, help="of gpu16, the first ones")
    parser.add_argument("--shape", choices=SHAPES, default="16M", help="of gpu16")
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="that corpus.py has written")
    arguments = parser.parse_args()
    device, found = torch.device(arguments.device), list[dict[str, Any]]()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    if arguments.out.exists():
        found = [json.loads(line) for line in arguments.out.open()]
    if "gpu16" in arguments.tables:
        cases = [replace(case, shape=arguments.shape) for case in gpu16()[: arguments.rows]]
        for row in in_time(cases, arguments.minutes, device, arguments.corpus):
            found += _kept([row], arguments.out)
        print(tables(found))
        return
    done = {(row["table"], row["link"], row["case"], row["seed"], row["replicas"]) for row in found}
    cases = planned(arguments.tables, found)
    if arguments.ticks:
        cases = [replace(case, ticks=arguments.ticks) for case in cases]
    by_size: dict[tuple[str, int], list[Case]] = defaultdict(list)
    for case in cases:
        if (case.table, case.link, case.name, case.seed, case.replicas) not in done:
            by_size[case.shape, case.ticks].append(case)
    for group in by_size.values():
        found += _kept(Lab(group, device, arguments.corpus).run(), arguments.out)
    print(tables(found))


def _kept(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


if __name__ == "__main__":
    main()
