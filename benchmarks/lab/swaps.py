"""Decide on a virtual clock when replicas train, and when and what they mix, before any weight exists.

The unit of time is an inner step of the fastest replica, which is a *tick*. A `Schedule` is a list of ticks. In each,
some replicas take an inner step, then the half-differences that have arrived are added, and then snapshots for new
swaps are taken. Times do not depend on weights, so the lab can train many schedules at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from stack import NUM_CHUNKS

Pick = Literal["oldest for both", "oldest for one", "random"]


@dataclass(frozen=True, slots=True)
class Swap:
    """Two replicas exchange chunks [first, last) at one tick, and each adds its half-difference at a later one."""

    one: int
    other: int
    first: int = 0
    last: int = NUM_CHUNKS
    due: tuple[int, int] | None = None  # ticks at which `one` and `other` add; None if the swap breaks


@dataclass(slots=True)
class Tick:
    """What happens in one tick: inner steps of `training`, then a mean over all replicas or the `swaps` that begin."""

    training: list[int]
    swaps: list[Swap] = field(default_factory=list)
    reduce: tuple[int, int, int] | None = None  # chunks [first, last) are averaged over all, and added at this tick


@dataclass(frozen=True, slots=True)
class Links:
    """How fast the replicas are: `upload[i]` is the number of ticks in which i's link moves a whole coded vector."""

    upload: tuple[float, ...]
    ticks_a_step: tuple[float, ...]

    @staticmethod
    def equal(num_replicas: int, upload: float) -> Links:
        return Links((upload,) * num_replicas, (1.0,) * num_replicas)


@dataclass(slots=True)
class _Replica:
    phase: float = 0.0  # how far into a tick its inner steps end
    free_at: float = 0.0
    partner: int = -1  # of the last swap
    mixed: list[int] = field(default_factory=lambda: [0] * NUM_CHUNKS)  # the tick at which a chunk was last mixed
    pieces: float = 0.0  # of an inner step


@dataclass(frozen=True, slots=True)
class Result:
    """The ticks of a schedule, with the share of the link time that was used and the mean age of half-differences."""

    ticks: list[Tick]
    use: float
    age: float
    num_swaps: float  # of one replica


def small_swaps(
    links: Links,
    num_ticks: int,
    seed: int,
    *,
    slice_ticks: float,
    pick: Pick = "oldest for both",
    ahead: bool = True,
    repeats: bool = False,
    broken: float = 0.0,
    jitter: float = 0.2,
    pairing_ticks: float = 0.1,
    in_phase: bool = False,
) -> Result:
    """One swap after another, each with one random replica that is free.

    A slice takes `slice_ticks` on the slower link of the pair. With `ahead`, a replica takes the snapshot for its next
    swap at the last inner step before the current swap ends, so that its link is not idle until the next inner step. A
    replica does not repeat its last partner (unless `repeats`) while it can expect another one within a slice.
    `pairing_ticks` pass before the first byte. The inner steps of the replicas do not end at the same moment, unless
    `in_phase`.
    """
    rng, num = random.Random(seed), len(links.upload)
    replicas = [_Replica(0.0 if in_phase else rng.random()) for _ in range(num)]
    ticks, busy, ages, begun = [], 0.0, [], 0
    for now in range(num_ticks):
        training = []
        for i, replica in enumerate(replicas):
            replica.pieces += 1 / links.ticks_a_step[i]
            if replica.pieces >= 1 - 1e-9:
                replica.pieces -= 1
                training.append(i)
        tick = Tick(training)
        waiting = [i for i, r in enumerate(replicas) if r.free_at <= now + r.phase + (1.0 if ahead else 0.0)]
        rng.shuffle(waiting)
        while len(waiting) > 1:
            i = waiting.pop()
            others = [j for j in waiting if repeats or not _just_met(replicas, i, j, now, slice_ticks)]
            if not others:
                continue
            j = others[0]
            waiting.remove(j)
            a_chunk = max(links.upload[i], links.upload[j]) / NUM_CHUNKS
            width = max(1, min(NUM_CHUNKS, round(slice_ticks / a_chunk)))
            first = _slice(rng, pick, now, replicas[i].mixed, replicas[j].mixed, width)
            began = max(max(now + replicas[k].phase, replicas[k].free_at) for k in (i, j)) + pairing_ticks
            took = a_chunk * width * (1 + jitter * rng.uniform(-1, 1))
            breaks = rng.random() < broken
            ended = began + took * (rng.random() if breaks else 1.0)
            for k in (i, j):
                replicas[k].free_at, replicas[k].partner = ended, i + j - k
                busy += (ended - began) * links.upload[k] / max(links.upload[i], links.upload[j])
                if not breaks:
                    replicas[k].mixed[first : first + width] = [now] * width
            due = [max(now + 1, -int(-(ended - replicas[k].phase) // 1)) for k in (i, j)]
            tick.swaps.append(Swap(i, j, first, first + width, None if breaks else (due[0], due[1])))
            if not breaks:
                ages += [when - now for when in due]
            begun += 2
        ticks.append(tick)
    return Result(ticks, busy / (num * num_ticks), sum(ages) / max(1, len(ages)), begun / num)


def _just_met(replicas: list[_Replica], i: int, j: int, now: float, slice_ticks: float) -> bool:
    met = replicas[i].partner == j and replicas[j].partner == i
    return met and now - max(replicas[i].free_at, replicas[j].free_at) < slice_ticks


def _slice(rng: random.Random, pick: Pick, now: int, one: list[int], other: list[int], width: int) -> int:
    """Return the first chunk of a slice of `width` chunks: the one whose chunks were mixed longest ago."""
    if width == NUM_CHUNKS:
        return 0
    starts = range(NUM_CHUNKS - width + 1)
    if pick == "random":
        return rng.choice(starts)
    ages = [(now - a) + (now - b if pick == "oldest for both" else 0) for a, b in zip(one, other, strict=True)]
    sums = [sum(ages[:width])]
    for start in starts[1:]:
        sums.append(sums[-1] - ages[start - 1] + ages[start + width - 1])
    return max(starts, key=lambda start: (sums[start], rng.random()))


def blocking(num_replicas: int, num_ticks: int, *, steps: int, wait: float) -> tuple[list[Tick], int]:
    """Average all replicas after every `steps` inner steps, while all of them wait for `wait` ticks.

    Also return the number of inner steps.
    """
    ticks, taken, owed = list[Tick](), 0, 0.0
    for _ in range(num_ticks):
        if owed >= 1:
            owed -= 1
            ticks.append(Tick([]))
            continue
        tick = Tick([*range(num_replicas)])
        ticks.append(tick)
        taken += 1
        if taken % steps == 0:
            owed += wait
            tick.reduce = (0, NUM_CHUNKS, len(ticks))
    return ticks, taken


def streaming(num_replicas: int, num_ticks: int, *, slices: int, upload: float) -> list[Tick]:
    """An all-reduce of one slice after another, which overlaps with training; `upload` is the time of a whole ring."""
    ticks = [Tick([*range(num_replicas)]) for _ in range(num_ticks)]
    began, index = 0.0, 0
    while began + upload / slices < num_ticks:
        now, ended = int(began), began + upload / slices
        part = index % slices
        ticks[now].reduce = (
            NUM_CHUNKS * part // slices,
            NUM_CHUNKS * (part + 1) // slices,
            max(now + 1, -int(-ended // 1)),
        )
        began, index = float(max(now + 1, -int(-ended // 1))), index + 1
    return ticks


def every_tick(num_replicas: int, num_ticks: int) -> list[Tick]:
    return [Tick([*range(num_replicas)]) for _ in range(num_ticks)]
