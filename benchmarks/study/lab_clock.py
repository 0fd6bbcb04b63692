"""Compute how long a round of each rule takes for a model size and a link. This is the clock of the lab.

    python benchmarks/study/lab_clock.py      # measures coding on one core, and writes results/lab_coding.json

The lab gets its losses from the toy model and its times from this module. A card delivers FLOP_PER_S, and an inner step
takes 6 FLOP per parameter and token. All replicas have the same card and the same link, which carries both directions
at once.

    ddp      the ring overlaps with the backward, which is two thirds of a step
    DiLoCo   all replicas wait for the ring after the inner steps, as in PRIME
    NoLoCo   the early part travels during the inner steps, and both partners wait for the late part

Sending overlaps with encoding and decoding, chunk by chunk. An exchange takes as long as the slower of the two, plus
its delays. `tests/unit/study/test_lab.py` compares the rounds of NoLoCo with those of the simulated swarm. The clock
does not model rounds of NoLoCo whose early part takes more than the fraction FILL of the round: partners then wait for
this part and miss each other.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch
from runs import RESULTS

from noloco_p2p.codec import CHUNK_ELEMENTS, get_codec
from noloco_p2p.gossip.frames import Part
from noloco_p2p.gossip.round_length import FILL
from noloco_p2p.gossip.sections import part_bytes, section_plans
from noloco_p2p.optim.allreduce import ring_bytes, ring_s
from noloco_p2p.optim.mixing import closing_rounds
from noloco_p2p.optim.rules import NOLOCO
from noloco_p2p.simulate.lockstep import ring_of
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.testing.links import CABLE, HOME_FIBRE, LinkProfile

FLOP_PER_S = 40e12  # delivered by a 24 GB card: a quarter of the bf16 peak of an RTX 4090, half of that of an RTX 3090
BACKWARD_SHARE = 2 / 3
EARLY_DELAYS, LATE_DELAYS = 10, 4  # consecutive link delays, as many as in the simulated swarm
CODING = RESULTS / "lab_coding.json"
LINKS = {
    "home-fibre": HOME_FIBRE,
    "cable": CABLE,
    "100 Mbit/s, 50 ms": LinkProfile("100mbit-50ms", down_mbit_s=100, up_mbit_s=100, delay_ms=25, jitter_ms=0),
    "data centre": LinkProfile("data-centre", down_mbit_s=25_000, up_mbit_s=25_000, delay_ms=0.05, jitter_ms=0),
}


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the tokens of an inner step of one replica."""

    name: str
    num_parameters: int
    tokens: int

    @property
    def step_s(self) -> float:
        return 6 * self.num_parameters * self.tokens / FLOP_PER_S


SIZES = (Size("125M", 125_000_000, 65_536), Size("1B", 1_000_000_000, 65_536))  # tokens of arXiv 2506.10911


@dataclass(frozen=True, slots=True)
class Clock:
    """The times of one rule with its spec, size and link.

    `step_s` is the duration of an inner step including waits, and `closing_s` is the time after the schedule.
    `is_hidden` says whether the early part of a swap takes no longer than the inner steps.
    """

    step_s: float
    closing_s: float
    is_hidden: bool

    def seconds(self, steps: int) -> float:
        return steps * self.step_s + self.closing_s


def clock_of(
    rule: str, spec: TrainerSpec, size: Size, link: LinkProfile, *, num_replicas: int, coding_s: float
) -> Clock:
    """Return the clock of a rule. `coding_s` is the time to encode one element and to decode two (see `coding`)."""
    bytes_per_s = min(link.up_mbit_s, link.down_mbit_s) * 1e6 / 8
    delay_s = link.delay_ms / 1e3 + link.jitter_ms / 2e3

    def exchange_s(num_bytes: float) -> float:
        return max(num_bytes / bytes_per_s, coding_s * size.num_parameters) if num_bytes else 0.0

    steps = spec.outer.first_inner_steps
    if rule == NOLOCO:
        early_s, late_s = (
            exchange_s(num_bytes) + delays * delay_s if num_bytes else 0.0
            for num_bytes, delays in zip(
                swap_bytes(spec, size.num_parameters), (EARLY_DELAYS, LATE_DELAYS), strict=True
            )
        )
        closing_s = closing_rounds(spec.outer, num_replicas) * (early_s + late_s)
        return Clock((steps * size.step_s + late_s) / steps, closing_s, early_s <= FILL * steps * size.step_s)
    if rule == "local":
        return Clock(size.step_s, 0.0, True)
    waits = ring_s(0.0, num_replicas, bytes_per_s=1.0, delay_s=2 * delay_s)
    ring = ring_of(rule, spec.codec.outer_gradient, num_elements=CHUNK_ELEMENTS)
    exchanged_s = exchange_s(ring.sent_bytes(size.num_parameters, num_replicas)) + waits
    if rule == "ddp":
        return Clock(size.step_s + max(0.0, exchanged_s - BACKWARD_SHARE * size.step_s), 0.0, True)
    return Clock(size.step_s + exchanged_s / steps, 0.0, True)


def swap_bytes(spec: TrainerSpec, num_elements: int) -> tuple[float, float]:
    """Return the bytes of the (early, late) part that each side of a swap sends."""
    plans = section_plans(spec.codec, swap_momentum=spec.outer.sends_momentum, num_elements=num_elements)
    return part_bytes(plans, Part.EARLY), part_bytes(plans, Part.LATE)


def round_bytes(rule: str, spec: TrainerSpec, *, num_replicas: int) -> float:
    """Return the bytes per parameter that a replica sends in a round. A round of ddp is one step."""
    if rule == NOLOCO:
        return sum(swap_bytes(spec, CHUNK_ELEMENTS)) / CHUNK_ELEMENTS
    if rule == "local":
        return 0.0
    ring = ring_of(rule, spec.codec.outer_gradient, num_elements=CHUNK_ELEMENTS)
    return ring_bytes(ring.bytes_per_element, num_replicas)


def coding() -> float:
    """Return the measured seconds per element of the slowest codec, which the clock uses for all rules."""
    return max(json.loads(CODING.read_text(encoding="utf-8"))["ns_per_element"].values()) / 1e9


def measure_coding() -> dict[str, float]:
    """Measure how many ns it takes to encode one element and decode two, by codec, as a partner or a ring hop does."""
    torch.set_num_threads(1)
    values = torch.randn(CHUNK_ELEMENTS, generator=torch.manual_seed(0))
    found = {}
    for name in ("bf16", "int8", "int4"):
        codec, seconds = get_codec(name), []
        for _ in range(20):
            began_s = time.process_time()
            payload = codec.encode(values)
            for _ in range(2):
                codec.decode(payload, num_elements=len(values))
            seconds.append(time.process_time() - began_s)
        found[name] = round(sorted(seconds)[len(seconds) // 2] / CHUNK_ELEMENTS * 1e9, 2)
    return found


if __name__ == "__main__":
    from study import machine

    report = {"machine": machine(), "ns_per_element": measure_coding()}
    CODING.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(report)
