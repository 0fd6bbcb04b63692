"""Measure the extra memory of a swap. The limit is one encoded payload per direction and section, plus 64 MiB.

    python benchmarks/memory.py [--quick] [--json FILE]

Two processes swap over loopback. The extra memory of a process is its peak resident memory in a round (VmHWM, reset
before the round) minus its resident memory before the first round. The process with more extra memory counts.
"""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection
from pathlib import Path

from claims import Claim, run
from harness.specs import published
from pair import Side, run_pair

from noloco_p2p.codec import vector_bytes
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.gossip.sections import section_plans
from noloco_p2p.spec import RunSpec

SPEC = RunSpec(name="memory", outer=published(inner_steps=1, max_wait_s=300.0))
MIB = 1 << 20


def resident_bytes(field: str) -> int:
    """Return the VmRSS (current) or VmHWM (peak) of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def side(name: str, pipe: Connection, num_elements: int, repeats: int) -> None:
    peer = Side(name, pipe, SPEC, num_elements)
    gc.collect()
    before = resident_bytes("VmRSS")
    for index in range(repeats):
        pipe.recv()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        peer.open(index)
        peer.wait_for_early()
        peer.stage()
        outcome = peer.exchange.collect(300.0)
        assert isinstance(outcome, Swapped), outcome
        del outcome
        pipe.send(resident_bytes("VmHWM") - before)
    peer.stop()


def measure(quick: bool) -> list[Claim]:
    num_elements = 25_000_000 if quick else 125_000_000
    plans = section_plans(SPEC.codec, swap_momentum=True, num_elements=num_elements)
    payloads = 2 * sum(vector_bytes(plan.codec, num_elements) for plan in plans)
    peaks = run_pair(side, num_elements, repeats=3)
    claims = [
        Claim("numbers in the vector", num_elements, "fp32"),
        Claim("coded payloads, both directions, all sections", payloads / MIB, "MiB"),
    ]
    for index, peak in enumerate(peaks):
        extra = (max(peak) - payloads) / MIB
        claims.append(Claim(f"peak beyond them, round {index}", extra, "MiB", "<= 64", extra <= 64))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
