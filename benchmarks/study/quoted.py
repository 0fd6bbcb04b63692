"""List the phrases in which pages quote results.

    python benchmarks/study/quoted.py [--check]

figures.py explains phrases, and what the command does with and without --check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf
from statistics import fmean, stdev

from figures import RESULTS, Phrase, above, claim, line, loss, phrase, result, row, run
from lab import (
    CAPS,
    FAMILIES,
    OURS,
    PEERS,
    PLACES,
    REPLICAS,
    finalists,
    mean_loss,
    of_results,
    seeds_of,
    target_settings,
    winners,
)
from lab_tables import to_reach
from round_lengths import CODEC, LINKS, SIZE, STEPS, Rows, codec_losses, fit
from runs import early_bytes, late_costs, rows_of, study

from noloco_p2p.optim.allreduce import ring_bytes

SEEDS = (0, 1, 2)
PAPER = "NoLoCo, the paper's momentum"


def by_seed(name: str, case: str, other: str) -> list[float]:
    """Return by how many per cent `case` exceeds `other`, seed by seed."""
    return [above(loss(name, case, seed), loss(name, other, seed)) for seed in SEEDS]


def between(name: str, case: str, other: str) -> float:
    """Return by how many per cent the mean of `case` exceeds that of `other`."""
    return above(loss(name, case), loss(name, other))


def rounds_alone(name: str, case: str) -> float:
    return fmean(row(name, case, seed)["alone"] for seed in SEEDS)


def share_alone(name: str, case: str) -> float:
    found = row(name, case)
    return 100 * found["alone"] / (found["alone"] + found["half"] + found["swapped"])


# docs/results.md


def results() -> list[Phrase]:
    return [
        *_settings(),
        *_best(),
        *_rules(),
        *_round_lengths(),
        *_codecs_and_churn(),
        *_coarser(),
        *_momentum(),
        *_late(),
        *_late_causes(),
        *_leads(),
        *_allreduce(),
        *_missed(),
        *_search(),
    ]


def _settings() -> list[Phrase]:
    """Return phrases with settings of the studies and with bounds, which are not measured."""
    return [
        phrase("**0.12M parameters, 8 replicas"),
        phrase("0.9M parameters, 8 replicas"),
        phrase("a difference below 3 % is not meaningful"),
        phrase("alpha 0.5, beta 0.7 and gamma 0.7"),
        phrase("with 0.5 0.7 0.7"),
        phrase("a loss within 2 % of synchronous training"),
        phrase("(Momentum 0.9 is better"),
        phrase("the 0.3 % that a codec may cost"),
        phrase("int2 raises the loss by more than 0.3 %"),
        phrase("In these runs, alpha is 0.5 and beta is 0.7"),
        phrase("1 - alpha^2, which is 0.75 here. A spec is valid only if gamma is below its bound, which is 1.5 here"),
        phrase("rounds of 6 steps, Muon with a learning rate of 0.024"),
        phrase("In these runs, beta and gamma are 0.7"),
        phrase("an alpha of 0 with a beta of 0.7 is ahead of 0 1 1 at this learning rate"),
    ]


def share_of_ddp(case: str) -> float:
    """Return the bytes of a case as a percentage of those of ddp in fp32."""
    found = study("best_8")[case]
    return 100 * found.num_bytes / ring_bytes(4.0, found.num_replicas)


def _best() -> list[Phrase]:
    everybody = loss("inner", "5: 0 1 1, everybody mixes", 0)
    ddp, pairs = loss("best_8", "ddp", 0), loss("best_8", "5: 0 1 1", 0)
    distances = [
        between("inner", f"5: 0 1 1, {what}", f"ddp, {what}")
        for what in ("muon_momentum 0.9", "muon_momentum 0.98", "adam_beta2 0.99")
    ]
    return [
        phrase(
            "the loss of NoLoCo differs from that of synchronous AdamW by {:+.1f}, {:+.1f} and {:+.1f} %",
            *by_seed("best_8", "8: 0 1 1", "ddp, adamw"),
        ),
        phrase(
            "the loss was {:.1f} % lower when the same setup read its data from files",
            -above(loss("churn", "each reads everything, from files"), loss("churn", "no churn", 0)),
        ),
        phrase(
            "above that of synchronous Muon, by {:.1f} % with 8 replicas and {:.1f} % with 16",
            *(between(name, "5: 0 1 1", "ddp") for name in ("best_8", "best_16")),
        ),
        phrase(
            "and `modulo8` is {:.1f} % below that of synchronous AdamW, at {:.1f} % of the bytes of fp32 gradients."
            " With rounds of 8 steps, the two losses are level ({:+.1f} %), at {:.1f} % of the bytes.",
            -between("best_8", "5: 0 1 1", "ddp, adamw"),
            share_of_ddp("5: 0 1 1"),
            between("best_8", "8: 0 1 1", "ddp, adamw"),
            share_of_ddp("8: 0 1 1"),
        ),
        phrase(
            "is {:.1f} % below that of synchronous AdamW ({:+.1f}, {:+.1f} and {:+.1f} % seed by seed), at {:.1f} % of"
            " the bytes",
            -between("best_8", "6: 0 1 1, modulo4", "ddp, adamw"),
            *by_seed("best_8", "6: 0 1 1, modulo4", "ddp, adamw"),
            share_of_ddp("6: 0 1 1, modulo4"),
        ),
        phrase(
            "rounds of 8 steps, the loss is {:.1f} % above that of synchronous AdamW (one seed)",
            between("best_16", "8: 0 1 1", "ddp, adamw"),
        ),
        phrase(
            "With rounds of 20 steps, the loss of NoLoCo is {:.1f} % higher than DiLoCo's, at {:.0f} % of DiLoCo's"
            " bytes",
            between("best_8", "20: 0 1 1", "diloco 20, 0.016"),
            100 * share_of_ddp("20: 0 1 1") / share_of_ddp("diloco 20, 0.016"),
        ),
        phrase("one seed) is {:.1f} % lower than NoLoCo's", -above(everybody, pairs)),
        phrase(
            "lower than with torch's fp32 version, by {:.2f} % in synchronous training and by {:.2f} % in rounds",
            *(
                -line("study_orthogonalization.txt", rf"^{case} +mean .* ([-+][\d.]+) %")
                for case in ("ddp", "5: 0 1 1")
            ),
        ),
        phrase(
            "the loss with rounds of 5 steps is {:.1f} % above that of synchronous Muon and {:.1f} % below that of"
            " synchronous AdamW. With 16 replicas, it is {:.1f} % above that of synchronous Muon and {:.1f} % below"
            " that of synchronous AdamW",
            between("best_4", "5: 0 1 1", "ddp"),
            -between("best_4", "5: 0 1 1", "ddp, adamw"),
            between("best_16", "5: 0 1 1", "ddp"),
            -between("best_16", "5: 0 1 1", "ddp, adamw"),
        ),
        phrase(
            "With 4 replicas and rounds of 20 steps, the loss of NoLoCo is {:.1f} % higher than DiLoCo's",
            between("best_4", "20: 0 1 1", "diloco 20, 0.016"),
        ),
        phrase(
            "the loss of NoLoCo is {:.1f} % above that of synchronous Muon with this model, and {:.1f} % above it with"
            " the toy",
            between("small", "5: 0 1 1", "ddp"),
            between("best_8", "5: 0 1 1", "ddp"),
        ),
        phrase(
            "the loss of the toy is {:.4f}. With this seed, it is {:.1f} % above that of synchronous Muon"
            " ({:.4f}), and {:.1f} % below the loss if replicas mix in pairs ({:.4f})",
            *(everybody, above(everybody, ddp), ddp, -above(everybody, pairs), pairs),
        ),
        phrase("leave the loss of NoLoCo {:.0f} to {:.0f} % above", min(distances), max(distances)),
    ]


def _rules() -> list[Phrase]:
    studies = ("rules_4", "rules_8", "rules_16")
    to_ddp = [between(name, "noloco", "ddp") for name in studies]
    diloco = by_seed("rules_4", "noloco", "diloco")
    others = [abs(between(name, "noloco", other)) for name, other in product(studies, ("pairs", "gasloc"))]
    momentum = [(steps, alpha) for steps in (20, 50) for alpha in ("0.5 0.7 0.7", "0 1 1")]
    muon = [row("muon_momentum", case) for case in _MUON_MOMENTUM]
    return [
        phrase(
            "the mean loss of NoLoCo differs from DiLoCo's by {:+.1f} %, {:+.1f} % and {:+.1f} %",
            *(between(name, "noloco", "diloco") for name in studies),
        ),
        phrase("differs from DiLoCo's by {:+.1f} to {:+.1f} % for individual seeds", min(diloco), max(diloco)),
        phrase(
            "are within {:.1f} % of NoLoCo's. The loss of NoLoCo is {:.0f} to {:.0f} %",
            *(max(others), min(to_ddp), max(to_ddp)),
        ),
        phrase(
            "20 steps reached a loss of {:.4f} with 0.5 0.7 0.7 and {:.4f} with 0 1 1. Rounds of 50 steps reached"
            " {:.4f} and {:.4f}",
            *(loss("momentum", f"{steps}: {alpha}") for steps, alpha in momentum),
        ),
        phrase(
            "its mean loss is {:.4f}, against {:.4f} without momentum. It wins with two of three seeds. With 8"
            " replicas, the seeds disagree: momentum changes the loss by {:+.1f}, {:+.1f} and {:+.1f} %",
            loss("rules_4", "noloco"),
            loss("rules_4", "noloco, 0 1 1"),
            *by_seed("rules_8", "noloco", "noloco, 0 1 1"),
        ),
        phrase(
            "the loss of the merged model is {:.4f} with 0.5 0.7 0.7 and {:.4f} with 0 1 1. With rounds of 50 steps, it"
            " is {:.4f} and {:.4f}, respectively. If momentum is swapped and the learning rate is 0.024 instead of"
            " 0.016, the loss with rounds of 20 steps is {:.4f}, at {:.1f} times the bytes.",
            *(each["merged_loss"] for each in muon),
            muon[-1]["sent_per_parameter_step"] / muon[0]["sent_per_parameter_step"],
        ),
    ]


_MUON_MOMENTUM = (
    "20: 0.5 0.7 0.7, 0.016",
    "20: 0 1 1, 0.016",
    "50: 0.5 0.7 0.7, 0.016",
    "50: 0 1 1, 0.016",
    "20: 0.5 0.7 0.7, 0.024, momentum swapped",
)

_CODED = ("bf16+int8", "int8+int4", "modulo8+int4")


def swept(link: str, length: str) -> list[float]:
    """Return the figures of a round length, or of "auto", in the sweep of a link.

    The figures are the length, seconds per step, share of solo rounds, steps, loss by the curve, and the losses of
    seeds 0, 1 and 2 if these were trained.
    """
    text = (RESULTS / "round_lengths.txt").read_text(encoding="utf-8")
    (section,) = (part for part in text.split("\n\n") if part.startswith(f"{link}:"))
    (found,) = (row for row in section.splitlines() if row.split()[0] == length)
    return [float(each) for each in re.findall(r"[\d.]+", re.sub(r"\(\d\)", "", found))]


def gained(link: str, codec: str) -> float:
    """Return by how many per cent a codec's loss at equal time exceeds that of CODEC."""
    found = codec_losses(Rows(), link)
    return above(fmean(found[codec][1].values()), fmean(found[CODEC][1].values()))


def gained_by_seed(link: str, codec: str) -> list[float]:
    found = codec_losses(Rows(), link)
    return [above(found[codec][1][seed], found[CODEC][1][seed]) for seed in SEEDS]


def largest_correction() -> float:
    """Return the largest correction of a trained run's loss to equal time, in per cent."""
    rows = Rows()
    steps, time_s = fit(rows).steps, STEPS * SIZE.step_s
    trained = [run for link in LINKS for runs in rows.lost(link).values() for run in runs.values()]
    return max(abs(above((run["virtual_s"] / time_s) ** steps, 1.0)) for run in trained)


def _round_lengths() -> list[Phrase]:
    file, fibre, fast = "round_lengths.txt", "home-fibre", "100 Mbit/s, 50 ms"
    links = {fibre: "12", "cable": "50", fast: "20", "data centre": "2"}
    twelve = swept(fast, "12")
    trained = [
        *((fibre, length, words) for length, words in (("8", "8"), ("auto", '11, "auto"'), ("12", "12"))),
        *((fast, length, words) for length, words in (("20", "20"), ("auto", '22, "auto"'))),
        *(("data centre", length, words) for length, words in (("2", '2, "auto"'), ("3", "3"))),
    ]
    return [
        phrase("that we fitted to 16 runs (root mean square error {:.1f} %)", line(file, r"error ([\d.]+) %")),
        *(
            phrase(
                f"| {link} | {{:.0f}} | {{:.2f}} | {{:.3f}} | {best} | {{:.2f}} | {{:.3f}} |",
                *(swept(link, "auto")[column] for column in (0, 1, 4)),
                *(swept(link, best)[column] for column in (1, 4)),
            )
            for link, best in links.items()
        ),
        *(
            phrase(
                f"| {link} | {words} | {{:.3f}} | {{:.3f}}-{{:.3f}} |",
                *(figure(swept(link, length)[5:]) for figure in (fmean, min, max)),
            )
            for link, length, words in trained
        ),
        phrase(
            "{:.1f} % above the loss with rounds of 12 steps on home-fibre, and {:.1f} % below the loss with rounds of"
            " 20 steps",
            *(
                abs(above(fmean(swept(link, "auto")[5:]), fmean(swept(link, links[link])[5:])))
                for link in (fibre, fast)
            ),
        ),
        phrase("The curve corrects their losses to equal time, by up to {:.1f} %", largest_correction()),
        phrase(
            "`modulo` and int2 lower the loss by {:.1f} % on home-fibre (seed by seed {:+.1f}, {:+.1f} and {:+.1f} %)"
            " and by {:.1f} % at 100 Mbit/s ({:+.1f}, {:+.1f} and {:+.1f} %)",
            *(
                each
                for link in (fibre, fast)
                for each in (-gained(link, "modulo+int2"), *gained_by_seed(link, "modulo+int2"))
            ),
        ),
        phrase(
            "takes {:.1f} times as long as with int4 if `modulo` uses 4 bits, and {:.0f} to {:.0f} times as long",
            *(
                claim("codec_speed", "int4 encode, one core") / claim("modulo_codecs", f"modulo, {bits} bits: encode")
                for bits in (4, 6, 8)
            ),
        ),
        phrase("the losses with rounds of 12 and 30 steps are {:.3f} and {:.3f}", twelve[5], swept(fast, "30")[5]),
        phrase("With a minimum of 5 steps, the loss is {:.3f}", swept("data centre", "5")[4]),
        phrase("can hide an early part that takes up to {:g} of a round", line(file, r"fill ([\d.]+)")),
        phrase("for example, a step takes {:.2f} s, and {:.0f} % of the rounds", twelve[1], 100 * twelve[2]),
    ]


def _codecs_and_churn() -> list[Phrase]:
    coded = [abs(percent) for case in _CODED for percent in by_seed("codecs", case, "fp32")]
    lost, broken = "50 % of the rounds absent", "half of the calls break"
    early = {
        churn: fmean(early_bytes(row("modulo_churn", f"modulo, {churn}", seed)) for seed in SEEDS)
        for churn in ("no churn", lost)
    }
    return [
        phrase(
            "modulo8 + int4 differs from the loss with fp32 by {:+.2f} % over the seeds",
            above(loss("codecs", "5 steps, 0 1 1, modulo8+int4", 0, 1), loss("codecs", "5 steps, 0 1 1, fp32", 0, 1)),
        ),
        phrase("the loss with a codec is up to {:.0f} % above or below", max(coded)),
        phrase(
            "half of the rounds, the loss is {:.1f} % higher than without churn",
            above(loss("churn", lost), loss("churn", "no churn", 0)),
        ),
        phrase(
            "With modulo8, they raise the loss by {:.0f} % if each replica is absent in half of the rounds",
            between("modulo_churn", f"modulo8, {lost}", "modulo8, no churn"),
        ),
        phrase(
            "the loss with `modulo4` is {:.0f} % higher than with modulo8",
            between("modulo_churn", f"modulo4, {lost}", f"modulo8, {lost}"),
        ),
        phrase(
            "replicas stay {:.0f} % apart",
            100 * fmean(row("modulo_churn", f"modulo4, {lost}", seed)["spread"] for seed in SEEDS),
        ),
        phrase(
            "early part of {:.2f} bytes per parameter, or {:.2f} if peers are absent. If half of the calls break, its"
            " loss is {:.1f} % higher",
            *early.values(),
            between("modulo_churn", f"modulo, {broken}", f"modulo8, {broken}"),
        ),
        phrase(
            "the loss with `modulo` is {:.1f} % higher than with modulo8 if half of the calls break ([churn]",
            between("modulo_churn", f"modulo, {broken}", f"modulo8, {broken}"),
        ),
        phrase(
            "the loss with `modulo` is {:.1f} % higher than with modulo8. There are {:.0f} solo rounds with `modulo`,"
            " {:.0f} with modulo8 and {:.0f} with modulo4",
            between("modulo_churn", f"modulo, {broken}", f"modulo8, {broken}"),
            *(rounds_alone("modulo_churn", f"{codec}, {broken}") for codec in ("modulo", "modulo8", "modulo4")),
        ),
    ]


def _coarser() -> list[Phrase]:
    def cost(codec: str, steps: int, early: str = "modulo8") -> float:
        return between("late", f"{steps}: {early}, {codec}", f"{steps}: {early}, int4")

    ranges = {codec: [cost(codec, steps) for steps in (3, 5, 8, 20)] for codec in ("int2", "sign1", "none")}
    return [
        phrase("seven times the parameters (0.9M, one seed"),
        phrase(
            "and raises the loss by {:.1f} to {:.1f} % at equal round length", min(ranges["int2"]), max(ranges["int2"])
        ),
        phrase("`sign1` raises the loss by {:.1f} to {:.1f} %", min(ranges["sign1"]), max(ranges["sign1"])),
        phrase("the loss is {:.1f} to {:.1f} % higher than with `int4`", min(ranges["none"]), max(ranges["none"])),
        phrase(
            "`int2` raises the loss by {:.1f} and {:.1f} %.", cost("int2", 8, "modulo4"), cost("int2", 20, "modulo4")
        ),
        phrase(
            "of 3 steps and `int2`, the loss is {:.1f} % below",
            -between("late", "3: modulo8, int2", "5: modulo8, int4"),
        ),
        phrase(
            "level with that of rounds of 5 steps and `int4` ({:+.1f} %)",
            between("late", "3: modulo8, none", "5: modulo8, int4"),
        ),
    ]


def _momentum() -> list[Phrase]:
    pairs = {name: f"{name}: modulo4, int2" for name in ("2", "3", "AdamW, 3")}
    changes = [
        above(
            loss("momentum_swap", f"{pairs[steps]}, momentum averaged", seed), loss("momentum_swap", pairs[steps], seed)
        )
        for steps in ("2", "3")
        for seed in SEEDS
    ]
    adamw = between("momentum_swap", f"{pairs['AdamW, 3']}, momentum averaged", pairs["AdamW, 3"])
    return [
        phrase("the loss of individual seeds by {:+.1f} to {:+.1f} %", min(changes), max(changes)),
        phrase("it raises the loss by {:.1f} % (one seed)", adamw),
    ]


def _late() -> list[Phrase]:
    late, waiting = loss("waiting_200", "5: 0 1 1, eager, late by a step"), loss("waiting_200", "5: 0 1 1, waiting")
    return [
        phrase(
            "In rounds of 20 steps, {:.0f} % of the eager rounds were solo",
            share_alone("waiting", "eager, late by a quarter of a round"),
        ),
        phrase(
            "In rounds of 5 steps, {:.0f} % of the eager rounds were solo",
            share_alone("waiting", "5: 0 1 1, eager, late by a quarter of a round"),
        ),
        phrase("increases the loss, from {:.4f} to {:.4f} ({:+.1f} %; 200 steps", waiting, late, above(late, waiting)),
        phrase(
            "At a spread of {:.1f} %, the loss with two donors differs from the loss with one by {:+.1f} % at once and"
            " by {:+.2f} % after 20 steps",
            claim("mixed_donors", "spread of the donors"),
            claim("mixed_donors", "half and half against one donor, at once"),
            claim("mixed_donors", "half and half against one donor, after 20"),
        ),
        phrase(
            "after {:.0f} inner steps per peer, the merged model had a validation loss of {:.3f}, and the spread of"
            " the peers was {:.2f} %",
            *of_demo("demo.txt"),
            line("demo.txt", r"spread of the weights: ([\d.]+) %"),
        ),
    ]


def _late_causes() -> list[Phrase]:
    def cost(case: str) -> float:
        return fmean(late_costs(case).values())

    peak = {(row["case"], row["seed"]): row["curvature_0.2"] for row in rows_of("lateness_curvature")}
    steeper = [peak[case, seed] - peak["waiting", seed] for case in ("late by 1", "late by 2") for seed in SEEDS]
    late = [row[f"late by {steps}"] for row in rows_of("lateness_quadratic")[:-2] for steps in (1, 2, 4)]

    def measured(case: str, what: str) -> float:
        """Return the mean over the seeds as a percentage."""
        return 100 * fmean(row[what] for row in rows_of("lateness") if row["case"] == case)

    return [
        phrase("has no partner in 14 % of its rounds"),
        phrase(
            "After 2 steps, the distance between the partners along the correction has shrunk by only {:.0f} %. After 4"
            " steps, this distance has grown by {:.0f} %",
            measured("late by 2", "undone_all"),
            -measured("late by 4", "undone_all"),
        ),
        phrase(
            "costs nearly as much as adding the whole correction ({:+.1f} % against {:+.1f} %)",
            *(cost("what is left"), cost("late by 2")),
        ),
        phrase(
            "the loss is {:.1f} % higher than with waiting. If it is late only for the other nine tenths, the loss is"
            " {:.1f} % higher",
            *(cost("curved late"), cost("flat late")),
        ),
        phrase("They raise the loss by only {:.1f} %, although the replicas", cost("solo")),
        phrase("A late mean of all replicas raises the loss by {:.1f} %", cost("late mean of all")),
        phrase(
            "the replicas are {:.2f} % apart if corrections are late by 2 steps, and {:.2f} % if all replicas wait",
            *(measured("late by 2", "apart_last"), measured("waiting", "apart_last")),
        ),
        phrase("That alone raises the loss by {:.1f} %", cost("waiting, mixes stale weights")),
        phrase(
            "one such step raises the loss by {:.1f} %, and two steps raise it by {:.1f} %",
            *(cost("late by 1, mixes corrected weights"), cost("mixes corrected weights")),
        ),
        phrase(
            "late by one step raise the loss by {:.1f} %, and corrections that are late by two steps raise it by"
            " {:.1f} %",
            *(cost("late by 1"), cost("late by 2")),
        ),
        phrase(
            "raise the loss by {:.1f} % if they are late only in the first quarter of the run, by {:.1f} % if they are"
            " late only after that quarter, and by {:.1f} % if they are late only in the last quarter. Waiting only in"
            " the last quarter recovers almost nothing ({:+.1f} % instead of {:+.1f} %)",
            *(
                cost(f"late by 2{when}")
                for when in (" at the start", ", waiting at the start", " at the end", ", waiting at the end", "")
            ),
        ),
        phrase("leave replicas {:.1f} to {:.1f} times as far apart", *(found(late) for found in (min, max))),
        phrase("In a very steep direction (curvature times rate of 1.8)"),
        phrase(
            "in all three seeds, by {:.2f} to {:.2f} of the bound",
            *(found(steeper) for found in (min, max)),
        ),
        phrase("At 1e-3, late corrections raise the loss by only {:.1f} %", cost("late, rate 0.001")),
        phrase("*Dropping late corrections* ({:+.1f} %)", cost("dropped")),
        phrase(
            "if corrections are late by one step ({:+.1f} %), and more if they are late by two steps ({:+.1f} %,",
            *(cost(f"late by {steps}, counted from what travelled") for steps in (1, 2)),
        ),
        phrase("late by 2 steps raise the loss by only {:.1f} %", cost("Muon, late by 2")),
    ]


def _leads() -> list[Phrase]:
    def changes(lead: str) -> list[float]:
        return [above(loss("leads", lead, seed), today) for seed, today in losses.items() if seed in runs[lead].by_seed]

    runs = study("leads")
    losses = runs["today"].by_seed
    quasi = [change for lead in ("quasi-global 0.3", "quasi-global 0.6") for change in changes(lead)]
    return [
        phrase(
            "standard deviation of the losses of today's swap ({:.1f} %)",
            100 * stdev(losses.values()) / fmean(losses.values()),
        ),
        phrase(
            "the loss is {:.1f} % lower than with today's swap ({:+.1f}, {:+.1f} and {:+.1f} %)",
            -between("leads", "rounds by the rate", "today"),
            *changes("rounds by the rate"),
        ),
        phrase("for the longest time, the loss changes by {:+.1f}, {:+.1f} and {:+.1f} %", *changes("draw")),
        phrase("*Aligned steps* change the loss by {:+.1f}, {:+.1f} and {:+.1f} %", *changes("align 0.1")),
        phrase("*Quasi-global momentum* raises the loss by {:.1f} to {:.1f} %", min(quasi), max(quasi)),
        phrase(
            "about the same as with today's swap ({:+.1f}, {:+.1f} and {:+.1f} %)",
            *changes("rounds by the square of the rate"),
        ),
        phrase("in reverse order, and raise the loss by {:.1f} and {:.1f} % with two seeds", *changes("late swaps")),
    ]


def of_demo(name: str) -> tuple[float, float]:
    """Return the planned inner steps of a demo, and the validation loss of its merged model."""
    steps, merged = r"^an inner step takes .* takes ([\d,]+) inner steps", r"^merged model .*: validation loss ([\d.]+)"
    return line(name, steps), line(name, merged)


def versus(kind: str, what: str) -> float:
    return claim("versus_allreduce", f"N = 8, 32M, {kind}: {what}")


def _allreduce() -> list[Phrase]:
    def busy_s(kind: str) -> float:
        return versus(kind, "blocked") + versus(kind, "early part, hidden")

    rows = [
        *(
            phrase(
                f"| {name} | {{:.1f}} s | {{:.1f}} s | {{:.1f}} |",
                *(versus(kind, "blocked"), versus(kind, "blocked"), versus(kind, "sent by a peer")),
            )
            for name, kind in (
                *((f"gloo, {codec}", f"gloo {codec}") for codec in ("fp32", "bf16", "int8")),
                ("hivemind, fp16", "hivemind fp16"),
            )
        ),
        phrase(
            "| a waiting swap, modulo8 + int4 | {:.1f} s | {:.1f} s | {:.1f} |",
            *(versus("waiting", "blocked"), busy_s("waiting"), versus("waiting", "sent by a peer")),
        ),
        *(
            phrase(
                f"| gloo, {codec}, overlapped with inner steps | {{:.2f}} s | {{:.1f}} s | {{:.1f}} |",
                *(
                    versus(f"gloo {codec}, overlapped", what)
                    for what in ("blocked", "late mean here", "sent by a peer")
                ),
            )
            for codec in ("bf16", "int8")
        ),
        phrase(
            "| an eager swap, all pairs at once | {:.2f} s | {:.1f} s | {:.1f} |",
            versus("eager, all at once", "blocked"),
            versus("eager, all at once", "early part, hidden") + versus("eager, all at once", "late half here"),
            versus("eager, all at once", "sent by a peer"),
        ),
    ]
    return [
        *rows,
        phrase(
            "blocks training for {:.1f} times as long as a swap that waits",
            claim("versus_allreduce", _RATIO + "gloo int8 / waiting"),
        ),
        phrase(
            "busy for {:.2f} times as long as a waiting swap",
            claim("versus_allreduce", "N = 8, 32M: the line of a round, gloo int8"),
        ),
    ]


_RATIO = "N = 8, 32M: blocked time, "


def _missed() -> list[Phrase]:
    flat = "blocked time, N = 8 / N = 2: "
    return [
        phrase(
            "| during a swap at 100 Mbit/s, training keeps 0.98 of its speed (the target was 0.99 until 24 November) |"
        ),
        phrase("| during a swap at nearly 1 Gbit/s, training keeps 0.88 of its speed |"),
        phrase(
            "| the goodput of a swap is 0.6 of the goodput of a bare stream (the target was 0.8 until 24 November) |"
        ),
        phrase(
            "on the same machine gave {:.2f} and {:.2f} when it was idle. A run on a busy machine gave {:.2f}",
            *(claim(f"goodput_{run}", "swap / bare gRPC stream") for run in ("third", "second", "busy")),
        ),
        phrase("| an eager boundary blocks training for less than 1 % of a round |"),
        phrase("| the blocked time with 8 peers is at most 1.2 times the blocked time with 2 |"),
        phrase("| a loss within 2 % of synchronous training"),
        phrase("| {:.2f} ([overhead]", claim("overhead", "a swap at 100 Mbit/s: training")),
        phrase(
            "With a bare gRPC stream, training also keeps only {:.2f} of",
            claim("overhead", "a bare stream at 100 Mbit/s: training"),
        ),
        phrase("| {:.2f} (overhead)", claim("overhead", "a swap at 1000 Mbit/s: training")),
        phrase(
            "With a bare stream, training keeps {:.2f} of", claim("overhead", "a bare stream at 1000 Mbit/s: training")
        ),
        phrase(
            "| {:.2f} with bf16 and int4, {:.2f} with modulo and int2 ([goodput]",
            claim("goodput", "swap / bare gRPC stream"),
            claim("goodput", "swap as init writes it, both ways") / claim("goodput", "bare gRPC stream, both ways"),
        ),
        phrase("| {:.1f} % ([blocked_time]", claim("blocked_time", "eager: blocked, share")),
        phrase(
            "coding the gradient ({:.2f} s) and adding the late half ({:.2f} s)",
            claim("blocked_time", "eager: coding the gradient"),
            claim("blocked_time", "eager: correction"),
        ),
        phrase(
            "After later improvements, these steps take {:.2f} and {:.2f} s",
            claim("boundary", "boundary: coding"),
            claim("boundary", "eager: adding what came late"),
        ),
        phrase(
            "| waiting {:.2f}, eager {:.2f} (",
            claim("versus_allreduce", flat + "waiting"),
            claim("versus_allreduce", flat + "eager"),
        ),
        phrase(
            "| {:.0f} (versus_allreduce) | The reason is the same as in the row above. With one pair at a"
            " time, the ratio is {:.0f}. |",
            claim("versus_allreduce", _RATIO + "gloo fp32 / eager, all at once"),
            claim("versus_allreduce", _RATIO + "gloo fp32 / eager"),
        ),
        phrase("at most 5.6 % of their reads repeat those of another peer"),
        phrase("| {:.1f} % ([data_feed]", claim("data_feed", "repeats, 16 peers, 4 files here, 0.1")),
        phrase("| {:.1f} % | [The section above]", between("best_8", "5: 0 1 1", "ddp")),
        *_missed_times(),
    ]


def _missed_times() -> list[Phrase]:
    lab = of_results()
    here = {place.link: place for place in PLACES if place.size.name == "125M"}
    target = mean_loss(lab, target_settings(lab)["ddp"], steps=lab.steps)

    def seconds(link: str, name: str) -> float:
        found = to_reach(lab, here[link], name, target)
        return found[0] if found else inf

    def ours(link: str) -> float:
        return min(seconds(link, name) for name in (OURS, PAPER))

    assert {ours(link) for link in here if link != "data centre"} == {inf}, "the page says: not reached"
    assert {seconds("cable", name) for name in FAMILIES if name != "ddp"} == {inf}, "the page says: only ddp"
    return [
        phrase("in at most 1.15 times the time that synchronous Muon takes in a data centre | not reached"),
        phrase(
            "in the data centre, in at most {:.2f} times that time |",
            ours("data centre") / seconds("data centre", "ddp"),
        ),
        phrase("in at most half the time that the best DiLoCo takes on the same link | not reached"),
        phrase("where DiLoCo takes {:.1f} and", seconds("home-fibre", "DiLoCo") / 60),
        phrase(
            "On cable, only synchronous training reached this loss, in {:,.0f} minutes", seconds("cable", "ddp") / 60
        ),
        phrase("and {:.1f} minutes;", seconds("100 Mbit/s, 50 ms", "DiLoCo") / 60),
        phrase(
            "in the data centre, in at most {:.2f} times DiLoCo's time |",
            ours("data centre") / seconds("data centre", "DiLoCo"),
        ),
    ]


def behind_by(other: str, cap: str, replicas: int = REPLICAS) -> float:
    """Return by how many per cent NoLoCo's best loss without outer momentum exceeds another rule's at equal tokens."""
    lab = of_results()
    won = finalists(lab)
    ours, theirs = (mean_loss(lab, won[name, cap], replicas=replicas) for name in (OURS, other))
    return above(ours, theirs)


def _search() -> list[Phrase]:
    """Return phrases about the winners of the search, at equal tokens."""
    lab = of_results()

    def sent(name: str) -> float:
        setting = winners(lab, name)["adamw", "hundredth"]
        return fmean(lab.rows[run]["sent_per_parameter_step"] for run in seeds_of(setting))

    diloco = [behind_by("DiLoCo", cap, peers) for cap, peers in product(CAPS, PEERS)]
    return [
        phrase(
            "than with the paper's momentum, by {:.1f} % with 8 replicas and {:.1f} % with 16",
            *(behind_by(PAPER, "tenth", n) for n in (8, 16)),
        ),
        phrase("the loss of NoLoCo without outer momentum is {:.1f} to {:.1f} % higher", min(diloco), max(diloco)),
        phrase("NoLoCo also sends {:.1f} times as many bytes as DiLoCo", sent(OURS) / sent("DiLoCo")),
    ]


# SECURITY.md


def harms(name: str, attack: str) -> list[float]:
    """Return, by seed, the cost of one liar among eight peers with all gates, in per cent of the loss.

    A greedy liar is a ninth peer.
    """
    rows = [each for each in result(name)["rows"] if each.get("num_peers", 8) in (8, 9)]
    gates = "on" if name == "attacks_greedy" else "open"
    base = {each["seed"]: each["loss"] for each in rows if (each["attack"], each["gates"]) == ("honest", gates)}
    return [
        above(each["loss"], base[each["seed"]]) for each in rows if (each["attack"], each["gates"]) == (attack, "on")
    ]


_NAIVE = ("scaled", "scaled-state", "sign-flipped", "flipped-gradient-x9", "noise", "stale", "nan")


def security() -> list[Phrase]:
    return [*_gates(), *_faults(), *_unsolved()]


def _gates() -> list[Phrase]:
    return [
        phrase("its cosine with the own gradient is below -0.1"),
        phrase(
            "the loss is {:.2f} % lower with gates than without (mean of 3 seeds; the noise from seed to seed is"
            " {:.2f} %), and {:.1f} % of the norm of the offsets is cut off. Without gates, one liar of eight that"
            " flips signs raises the loss by {:.0f} %, one that sends noise raises it by {:.0f} %",
            -line("attacks.txt", r"mean of 3 seeds: ([-+\d.]+) %"),
            line("attacks.txt", r"noise from seed to seed: ([\d.]+) %"),
            line("attacks.txt", r"cut off honest offsets: ([\d.]+) %"),
            line("attacks.txt", r"^sign-flipped +open .*\+([\d.]+) %"),
            line("attacks.txt", r"^noise +open .*\+([\d.]+) %"),
        ),
        phrase(
            "costs at most {:.2f} %, or {:.1f} % if it is also greedy",
            line("attacks.txt", r"worst attack: .*, \+([\d.]+) %"),
            max(harm for attack in _NAIVE for harm in harms("attacks_greedy", attack)),
        ),
    ]


def _faults() -> list[Phrase]:
    soak = result("soak_60min")

    def one(attack: str) -> float:
        return harms("attacks", attack)[0]

    def of_greedy(attack: str) -> float:
        return max(harms("attacks_greedy", attack))

    def without_distance(attack: str) -> float:
        text = rf"(?s)before the gate by distance.*?1 of 9 +{attack} +0 .*?\+([\d.]+) %"
        return line("attacks_greedy.txt", text)

    return [
        phrase("After {:.0f} of 600 kills", claim("kills_and_flips", "kills")),
        phrase("{:,.0f} of 10,000 flips", claim("kills_and_flips", "wrong bits")),
        phrase(
            "If this happens in {:.1f} % of the swaps, the spread of the replicas grows by {:.0f} % and the loss by"
            " {:.1f} %",
            100 * claim("half_commits", "swaps committed by one side"),
            above(
                claim("half_commits", "spread of the replicas, with"),
                claim("half_commits", "spread of the replicas, whole"),
            ),
            claim("half_commits", "loss, here all noise"),
        ),
        phrase(
            "loss {:+.2f}, {:+.2f} and {:+.2f} % (one liar of 8) |",
            *(one(name) for name in ("scaled", "scaled-state", "noise")),
        ),
        phrase(
            "{:+.1f} and {:+.1f} %, with a greedy liar {:+.1f} and {:+.1f} % |",
            *(one("sign-flipped"), one("flipped-gradient-x9")),
            *(of_greedy("sign-flipped"), of_greedy("flipped-gradient-x9")),
        ),
        phrase(
            "{:+.1f} and {:+.1f} % (without that gate {:+.0f} and {:+.0f} %)",
            *(of_greedy("stale"), of_greedy("noise"), without_distance("stale"), without_distance("noise")),
        ),
        phrase(
            "false claims about the schedule raise the loss by {:.1f} % at most",
            line("attacks_claims.txt", r"^auto +far-ahead +0 .*\+([\d.]+) %"),
        ),
        phrase("then 1.5 / (live - 1) of its rounds"),
        phrase(
            "{:.1f}, {:.1f}, {:.1f} and {:.1f} / live after 20, 40, 100 and 300 rounds",
            *(claim("greedy", f"a live record: {which}") for which in ("43", "75", "165", "468")),
        ),
        phrase("hold less than 0.1 MB after 10,000 refusals"),  # the bound of the test
        phrase(
            "At {:.1f} MB/s, swaps keep {:.2f} of their rate, the longest turn of the event loop takes {:.0f} ms of"
            " CPU time, and memory grows by {:.0f} MiB",
            claim("dht_flood", "flood"),
            claim("dht_flood", "share of the rate"),
            claim("dht_flood", "longest turn while flooded"),
            claim("dht_flood", "memory grows by"),
        ),
        phrase("by a factor of 1.75"),
        phrase(
            "over 75 % of the norm from the median (honest ones: at most {:.0f} %), and no state of eight moves it by"
            " more than 1 % of its norm",
            100 * line("honest_states.txt", r"1 of 8 apart(?:.*\n)*? +40 +\S+ +(\S+)"),
        ),
        phrase(
            "{:.0f} ms, which is {:.2f} % of the time with one checkpoint every ten rounds",
            claim("step_cpu", "a checkpoint holds"),
            claim("step_cpu", "which is, one in ten"),
        ),
        phrase(
            "{:.0f} kills, {:.0f} freezes, {:.0f} times SIGTERM and {:.0f} kills of p2pd",
            *(soak["faults"][name] for name in ("kill", "freeze", "terminate", "kill p2pd")),
        ),
        phrase(
            "{:.0f} of 12 checkpoints were readable, and peers left within {:.1f} s",
            soak["checkpoints_read_after_kill"],
            soak["slowest_farewell_s"],
        ),
        phrase(
            "{:.0f} of {:,.0f} honest payloads",
            sum(each["value"] for each in result("rms_gate") if each["claim"].endswith("dropped by the gate")),
            sum(each["value"] for each in result("rms_gate") if each["claim"].endswith("honest frames")),
        ),
        phrase("over 90 % of the tokens/s with equal links"),  # the bound of the test
    ]


def _unsolved() -> list[Phrase]:
    return [
        phrase(
            "towards the initial weights raises the loss by {:.0f} and {:.0f} % (two seeds",
            *harms("attacks_greedy", "adaptive-back"),
        ),
        phrase(
            "against the last gradient, that is {:.1f} and {:.1f} %; in one fixed direction, {:.1f} %.",
            *harms("attacks_greedy", "adaptive-uphill"),
            max(harms("attacks_greedy", "adaptive-drift")),
        ),
        phrase(
            "the first of these liars costs {:.0f} %, and any liar that does not adapt costs {:.1f} % at most. The"
            " target was 3 %.",
            harms("attacks_none", "adaptive-back")[0],
            max(harms("attacks_none", attack)[0] for attack in _NAIVE),
        ),
        phrase("Go 1.20.11, which gets no fixes any more, go-libp2p 0.32.1 and quic-go 0.40.0"),
    ]


# docs/scale.md


def scale() -> list[Phrase]:
    def of(num_peers: int, what: str) -> float:
        return claim("directory", f"{num_peers} peers: {what}")

    def pairing(name: str, what: str) -> float:
        return claim("pairing", f"{name}: {what}")

    sizes = [
        phrase(
            f"| {num_peers:,} | {{:.0f}} | {{:.0f}} | {{:.0f}} | {{:.2f}} MB | {{:.0f}} s | {{:.2f}}-{{:.2f}} |"
            " {:.0f} s |",
            of(num_peers, "depth"),
            of(num_peers, "peers to draw from"),
            of(num_peers, "reads a peer"),
            of(num_peers, "received a peer"),
            of(num_peers, "newcomers know"),
            of(num_peers, "estimate of the size, lowest"),
            of(num_peers, "estimate of the size, highest"),
            of(num_peers, "the dead"),
        )
        for num_peers in (100, 1_000, 10_000, 100_000, 1_000_000)
    ]
    swarms = {
        "2 peers in lock step": "2 peers in lock step",
        "3 peers in lock step (only two can pair in a round)": "3 peers in lock step",
        "8 peers in lock step": "8 peers in lock step",
        "8 peers with speeds of 1x to 4x, random starts": "8 peers at 1x-4x",
        "64 peers in lock step": "64 peers in lock step",
        "64 peers with speeds of 1x to 4x, random starts": "64 peers at 1x-4x",
        "1,024 peers in lock step": "1024 peers in lock step",
    }
    pairs = [
        phrase(
            f"| {words} | {{:.0f}} % | {{:.0f}} % | {{:.1f}} |" + (" {:.2g} |" if has_variance else ""),
            100 * pairing(name, "paired"),
            100 * pairing(name, "paired within"),
            pairing(name, "offers a round"),
            *([pairing(name, "variance left")] if has_variance else []),
        )
        for words, name in swarms.items()
        for has_variance in [words[:2] not in ("2 ", "3 ")]
    ]
    return [
        *sizes,
        *pairs,
        phrase("a signed record ({:.1f} KB with all fields", claim("directory", "a record") / 1e3),
        phrase(
            "are {:.2f} and {:.2f} at 1,000 peers, and {:.2f} and {:.2f} at 100,000 peers",
            *(
                of(num_peers, f"chance of the {which}")
                for num_peers in (1_000, 100_000)
                for which in ("unluckiest", "luckiest")
            ),
        ),
        phrase("The goal was to pair 95 % of the peers within 5 offers each"),
        phrase("about 200 reads per minute with {:.0f} KB each", claim("directory", "a bucket of 32") / 1e3),
        phrase("an upload of nearly 6 MB per minute (0.8 Mbit/s)"),  # 200 times 29 KB
    ]


# docs/stages.md and README.md


def stage_loss(name: str, case: str, seed: int = 0) -> float:
    return row(f"stages_{name}", case, seed)["loss"]


def speed(name: str, case: str) -> float:
    """Return the speed as a percentage of the tokens/s that the links can carry in theory."""
    found = row(f"stages_{name}", case)
    return 100 * found["tokens_per_s"] / found["predicted_tokens_per_s"]


def lateness(name: str, case: str) -> list[float]:
    return [stage["lateness"] for stage in row(f"stages_{name}", case)["stages"]]


GATE = "3 stages x 4, 32 sequences, 0.024, int8, 5 % lost"
PIPELINES = {  # name in the tables -> study, case
    "| pipeline | 16 | 8 |": ("lateness", "16 sequences, 8 in flight, 0.016"),
    "| pipeline | 8 | 8 |": ("lateness", "8 sequences, 8 in flight, 0.016"),
    "| pipeline, fast links | 16 | 4 |": ("fast", "fast links, 16 sequences, 4 in flight, 0.016"),
    "| pipeline, fast links | 8 | 2 |": ("fast", "fast links, 8 sequences, 2 in flight, 0.016"),
}
WHOLE = {4: "whole x 4, 4 sequences, 0.008", 8: "whole x 4, 8 sequences, 0.016", 32: "whole x 4, 32 sequences, 0.024"}
WHOLE_16 = "whole x 4, 16 sequences, 0.024"
ABLATIONS = {
    "fixed paths": "fixed paths, noloco",
    "random paths, no swaps": "random paths, no gossip",
    "fixed paths, no swaps": "fixed paths, no gossip",
    "every backward one step late": "1 steps late",
    "every backward two steps late": "2 steps late",
    "20 % of the microbatches lost": "20 % lost",
    "int4 both ways instead of int8": "int4 both ways",
    "bf16 both ways instead of int8": "bf16 both ways",
    "fp32 both ways instead of int8": "fp32 both ways",
    "int8 for activations, int4 for gradients": "int8, gradients int4",
    "10 % of the microbatches lost": "10 % lost",
    "2 instead of 4 replicas in the middle stage": "4-2-4 replicas",
    "8 instead of 4 replicas in the middle stage": "4-8-4 replicas",
}


def behind() -> dict[str, list[float]]:
    """Return by how many per cent pipelines exceed the losses of whole models, by comparison and then by seed."""
    gate = [stage_loss("gate", GATE, seed) for seed in SEEDS]
    fast = {
        size: stage_loss("fast", PIPELINES[f"| pipeline, fast links | {size} | {size // 4} |"][1]) for size in (8, 16)
    }
    best = [stage_loss("whole", WHOLE[4], seed) for seed in SEEDS]
    same = [stage_loss("whole", WHOLE[32], seed) for seed in SEEDS]
    return {
        "gate, best": [above(one, other) for one, other in zip(gate, best, strict=True)],
        "gate, same": [above(one, other) for one, other in zip(gate, same, strict=True)],
        "small batch": [above(stage_loss("lateness", PIPELINES["| pipeline | 8 | 8 |"][1]), best[0])],
        "fast": [above(fast[8], best[0])],
        "fast, same": [
            above(fast[8], stage_loss("whole", WHOLE[8])),
            above(fast[16], stage_loss("whole", WHOLE_16)),
        ],
    }


def stages() -> list[Phrase]:
    return [*_stage_settings(), *_gate(), *_larger(), *_ablations(), *_lateness(), *_flow()]


def _stage_settings() -> list[Phrase]:
    codecs = {"fp32": "0", "bf16": "0.0017", "int8": "0.0065", "int4 with a Hadamard rotation": "0.118"}
    return [
        phrase("can train 1.8B parameters without stages"),
        phrase("within 1 % of the loss of whole models"),
        phrase("reaches 70 % of the predicted speed"),
        phrase("5 % of the microbatches are lost."),
        phrase("The model has 0.22M parameters"),
        phrase("(0.008 to 0.024). The pipeline used a rate of 0.024 at 32 sequences"),
        phrase("and 0.016 with fewer sequences"),
        phrase("match those of a single machine within 1e-5"),
        phrase("3 stages of 4, 0.84M parameters"),
        phrase("The target was 70 % of the predicted tokens/s for both links"),
        *(
            phrase(
                f"| {words} | {{:,.0f}} | {{:.{max(0, len(digits) - 2)}f}} |",
                claim("activation_codecs", f"{words.split()[0]}: bytes for a token"),
                claim("activation_codecs", f"{words.split()[0]}: error, Gaussian"),
            )
            for words, digits in codecs.items()
        ),
        phrase(
            "it took {:.0f} s for {:.0f} steps ([output](../benchmarks/results/demo_stages.txt)); the merged model had"
            " a validation loss of {:.3f}",
            line("demo_stages.txt", r"wall time: ([\d.]+) s"),
            *of_demo("demo_stages.txt"),
        ),
        phrase(
            "this check dropped {:.0f} of {:,.0f} honest payloads; with a factor of ten from the start, it would have"
            " dropped {:.0f}",
            *(
                sum(each["value"] for each in result("rms_gate") if each["claim"].endswith(what))
                for what in ("dropped by the gate", "honest frames", "dropped by a tenfold limit")
            ),
        ),
    ]


def _gate() -> list[Phrase]:
    percent = behind()
    spread = stdev(percent["gate, best"]) / len(SEEDS) ** 0.5
    whole = [stage_loss("whole", WHOLE[4]), stage_loss("whole", WHOLE[32])]
    small, large = (stage_loss("lateness", PIPELINES[f"| pipeline | {size} | 8 |"][1]) for size in (8, 16))
    at_same = above(small, stage_loss("whole", WHOLE[8])), above(large, stage_loss("whole", WHOLE_16))
    return [
        phrase(
            "the best setting measured is {:.1f} % higher than that of whole models. With the setting that reaches"
            " 70 % of the predicted speed, it is {:.1f} % higher (three paired seeds, standard error {:.1f} %)",
            *(percent["small batch"][0], fmean(percent["gate, best"]), spread),
        ),
        phrase("small batches fill the pipeline, the loss is {:.1f} % higher", *percent["fast"]),
        *(
            phrase(
                f"| whole models, three seeds | {size} | | | | {{:.4f}}, {{:.4f}}, {{:.4f}} |",
                *(stage_loss("whole", case, seed) for seed in SEEDS),
            )
            for size, case in WHOLE.items()
        ),
        phrase("| whole models | 16 | | | | {:.4f} |", stage_loss("whole", WHOLE_16)),
        phrase(
            "| pipeline, three seeds | 32 | 8 | {:.0f} % | {:.2f}, {:.2f}, {:.2f} | {:.4f}, {:.4f}, {:.4f} |",
            speed("gate", GATE),
            *lateness("gate", GATE),
            *(stage_loss("gate", GATE, seed) for seed in SEEDS),
        ),
        *(
            phrase(
                f"{words} {{:.0f}} % | {{:.2f}}, {{:.2f}}, {{:.2f}} | {{:.4f}} |",
                *(speed(*case), *lateness(*case), stage_loss(*case)),
            )
            for words, case in PIPELINES.items()
        ),
        phrase("(a rate of 0.032 gave a loss of {:.4f})", stage_loss("gate", GATE.replace("0.024", "0.032"))),
        phrase("raises the loss of whole models by {:.0f} %", above(whole[1], whole[0])),
        phrase(
            "the loss of a pipeline is {:.1f} % higher than that of whole models** ({:.1f}, {:.1f} and {:.1f} % with"
            " three paired seeds). At 8 and 16 sequences, where its gradients are staler, its loss is {:.0f} to {:.0f}"
            " % higher",
            fmean(percent["gate, same"]),
            *percent["gate, same"],
            *sorted(at_same),
        ),
        phrase("the difference is {:.1f} % at 8 sequences, and {:.1f} % at 16", *percent["fast, same"]),
        phrase("the loss is {:.1f} % lower than with 32", -above(small, stage_loss("gate", GATE))),
    ]


def _larger() -> list[Phrase]:
    best, same = stage_loss("whole", WHOLE[4]), stage_loss("whole", WHOLE[32])
    eight = stage_loss("whole", "whole x 8, 4 sequences, 0.008")
    found = []
    for words, case, other in (
        ("3 stages of 4", GATE, best),
        ("4 stages of 4", GATE.replace("3 stages", "4 stages"), best),
        ("3 stages of 8", GATE.replace("x 4", "x 8"), eight),
        ("4 stages of 8", GATE.replace("3 stages x 4", "4 stages x 8"), eight),
    ):
        mine = stage_loss("gate", case)
        head = f"| {words} | {{:.0f}} % | {{:.4f}} | {{:.4f}}, {{:+.1f}} % |"
        values = [speed("gate", case), mine, other, above(mine, other)]
        if words.endswith("of 4"):
            head, values = head + " {:.4f}, {:+.1f} % |", [*values, same, above(mine, same)]
        found.append(phrase(head, *values))
    small = stage_loss("small_gate", GATE)
    of_whole = [stage_loss("small_whole", WHOLE[size]) for size in (4, 32)]
    return [
        *found,
        phrase(
            "| 3 stages of 4, 0.84M parameters | {:.0f} % | {:.4f} | {:.4f}, {:+.1f} % | {:.4f}, {:+.1f} % |",
            *(speed("small_gate", GATE), small),
            *(value for other in of_whole for value in (other, above(small, other))),
        ),
    ]


def _ablations() -> list[Phrase]:
    base = stage_loss("ablations", "3 stages x 4")
    narrow, lossy = lateness("ablations", "4-2-4 replicas"), lateness("ablations", "20 % lost")
    return [
        phrase("| base run: random paths, swaps, nothing lost | {:.4f} |", base),
        *(
            phrase(f"| {words} | {{:.4f}} | {{:+.1f}} % |", *(mine, above(mine, base)))
            for words, case in ABLATIONS.items()
            for mine in [stage_loss("ablations", case)]
        ),
        phrase(
            "If 20 % of the microbatches are lost, the run slows to {:.0f} % of the predicted tokens/s. Because fewer"
            " microbatches are then in flight, gradients are less stale ({:.2f} steps late instead of {:.2f})",
            *(speed("ablations", "20 % lost"), lossy[0], lateness("ablations", "3 stages x 4")[0]),
        ),
        phrase("gradients are less stale ({:.2f}, {:.2f} and {:.2f} steps late in stages", *narrow),
        phrase("reaches {:.0f} % of the tokens/s predicted for the smaller", speed("ablations", "4-2-4 replicas")),
    ]


def _lateness() -> list[Phrase]:
    gate, (large, small), (fast_16, fast_8) = (
        stage_loss("gate", GATE),
        [stage_loss(*case) for words, case in PIPELINES.items() if "fast" not in words],
        [stage_loss(*case) for words, case in PIPELINES.items() if "fast" in words],
    )
    base = stage_loss("ablations", "3 stages x 4")
    one, two = (above(stage_loss("ablations", f"{steps} steps late"), base) for steps in (1, 2))
    return [
        phrase("| 32 sequences, 8 in flight, slow links | 0.25 | {:.2f}, {:.2f}, {:.2f} |", *lateness("gate", GATE)),
        *(
            phrase(f"| {words} | {share} | {{:.2f}}, {{:.2f}}, {{:.2f}} |", *lateness(*case))
            for (words, share), case in zip(
                (
                    ("batch of 16, 8 in flight", "0.5"),
                    ("batch of 8, 8 in flight", "1"),
                    ("16 sequences, 4 in flight, fast links", "0.25"),
                    ("8 sequences, 2 in flight, fast links", "0.25"),
                ),
                PIPELINES.values(),
                strict=True,
            )
        ),
        phrase("| {:.1f} %: the smaller batch gains", above(large, gate)),
        phrase("0.54, 0.31, 0.10 | {:.1f} % |", above(small, large)),
        phrase("0.11, 0.13, 0.04 | {:.1f} % |", above(fast_8, fast_16)),
        *(
            phrase(
                f"{words} | | {{:.1f}}, {{:.1f}}, {{:.1f}} | {{:+.0f}} %",
                *(late + steps for late in lateness("ablations", f"{steps} steps late")),
                percent,
            )
            for words, steps, percent in (
                ("every backward one step later (32 sequences)", 1, one),
                ("every backward two steps later", 2, two),
            )
        ),
        phrase(
            "| 20 % of the microbatches lost, so fewer are in flight | | {:.2f}, {:.2f}, {:.2f} | {:.1f} % compared",
            *lateness("ablations", "20 % lost"),
            above(stage_loss("ablations", "20 % lost"), base),
        ),
        phrase(
            "applied a few inner steps late increases the loss by up to {:.1f} %",
            between("waiting", "5: 0 1 1, eager, late by a quarter of a round", "5: 0 1 1, waiting"),
        ),
    ]


def _flow() -> list[Phrase]:
    def share(line_name: str, in_flight: int) -> float:
        return 100 * claim("flow", f"{line_name} Mbit/s, {in_flight} in flight: tokens / arithmetic")

    both = [share("20", 16), share("100", 16)]
    late = [each["value"] for each in result("flow") if "in flight: at least an inner step late" in each["claim"]]
    return [
        phrase("a link carries {:.0f} to {:.0f} % of the printed tokens per second", min(both), max(both)),
        *(
            phrase(f"| {name} Mbit/s | {{:.0f}} %{unit} | {{:.0f}} % |", *(share(name, 8), share(name, 16)))
            for name, unit in (("20", " of the predicted tokens/s"), ("100", ""))
        ),
        phrase("{:.0f} to {:.0f} % of the backward passes were at least one inner step late", min(late), max(late)),
        phrase("costs {:.0f} % of the tokens/s", 100 * (1 - claim("flow", "100 Mbit/s with swaps: tokens / without"))),
        phrase(
            "keep **{:.0f} %** of their tokens/s", 100 * claim("flow", "churn, 4 stages x 6: tokens/s / undisturbed")
        ),
        phrase(
            "between two inner steps of a peer was at most {:.1f} s, with a median of {:.1f} s. Each killed peer"
            " trained again within {:.0f} s",
            claim("stage_kills", "the longest time"),
            claim("stage_kills", "the same, median"),
            claim("stage_kills", "from the start of a new process"),
        ),
    ]


def readme() -> list[Phrase]:
    percent = behind()
    return [
        phrase("Python 3.11 or newer"),
        phrase("Apache 2.0"),
        phrase(
            "The early part then takes at most {:g} % of a round", 100 * line("round_lengths.txt", r"fill ([\d.]+)")
        ),
        phrase(
            "rounds of 5 steps | {:+.1f} %, for {:.1f} % of the bytes of fp32",
            between("best_8", "5: 0 1 1", "ddp"),
            share_of_ddp("5: 0 1 1"),
        ),
        phrase("a toy of 0.12M parameters"),
        phrase(
            "| {:+.1f} % with a tenth of the bytes of synchronous training, {:+.1f} % with a hundredth |",
            *(behind_by("DiLoCo", cap) for cap in CAPS),
        ),
        phrase("half applied | {:.0f} of 600", 600 - claim("kills_and_flips", "kills")),
        phrase("64 peers of four speeds | {:.0f} %", 100 * claim("pairing", "64 peers at 1x-4x: paired")),
        phrase(
            "two cores | {:.2f} (missed the target of 0.98)",
            line("overhead_busy.txt", r"^a swap at 100 Mbit/s: training beside it, two cores +([\d.]+)"),
        ),
        phrase("a loss {:.0f} to {:.0f} % higher than", percent["small batch"][0], fmean(percent["gate, best"])),
    ]


PAGES: Mapping[str, Callable[[], Sequence[Phrase]]] = {
    "README.md": readme,
    "SECURITY.md": security,
    "docs/results.md": results,
    "docs/scale.md": scale,
    "docs/stages.md": stages,
}

TRANSCRIPTS = {"README.md": "demo.txt"}

if __name__ == "__main__":
    sys.exit(run(PAGES, TRANSCRIPTS))
