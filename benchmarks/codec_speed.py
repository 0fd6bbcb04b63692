"""Measure how fast each codec encodes and decodes full chunks on one thread, relative to int4 in the same run.

    python benchmarks/codec_speed.py [--quick] [--json FILE]

As in a swap, the memory for payloads, values and intermediate results is allocated beforehand. The codecs take turns
after every chunk, and the shortest time of each codec counts, because the machine is shared. Chunks are drawn from a
normal distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from claims import Claim, run

from noloco_p2p.codec import CHUNK_ELEMENTS, CODEC_NAMES, Scratch, get_codec

BESIDE = "int4"
WAYS = ("encode", "decode")
AS_FAST = 0.9  # of int4's speed: best times differ by a few per cent from run to run
COARSE = "int2"


def actions(name: str) -> list[Callable[[], object]]:
    """Return the functions that encode and decode one chunk with the codec."""
    codec, scratch = get_codec(name), Scratch()
    chunk = torch.randn(CHUNK_ELEMENTS, generator=torch.Generator().manual_seed(0))
    payload = torch.empty(codec.num_bytes(CHUNK_ELEMENTS), dtype=torch.uint8)
    values = torch.empty(CHUNK_ELEMENTS)
    coded = payload.numpy().data
    return [
        lambda: codec.encode_into(chunk, payload, scratch=scratch),
        lambda: codec.decode(coded, num_elements=CHUNK_ELEMENTS, out=values, scratch=scratch),
    ]


def speeds(repeats: int) -> dict[tuple[str, str], float]:
    """Return the GB/s of fp32 values for each codec and direction."""
    torch.set_num_threads(1)
    calls = {(name, way): call for name in CODEC_NAMES for way, call in zip(WAYS, actions(name), strict=True)}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for key, call in calls.items():
            began_s = time.perf_counter()
            call()
            best[key] = min(best[key], time.perf_counter() - began_s)
    return {key: 4 * CHUNK_ELEMENTS / seconds / 1e9 for key, seconds in best.items()}


def measure(quick: bool) -> list[Claim]:
    measured = speeds(200 if quick else 3000)
    claims = [
        Claim(f"{name} {way}, one core", speed, "GB/s of fp32", ">= 1", speed >= 1)
        for (name, way), speed in measured.items()
    ]
    for way in WAYS:
        ratio = measured[COARSE, way] / measured[BESIDE, way]
        claims.append(Claim(f"{COARSE} / {BESIDE}, {way}", ratio, "ratio", f">= {AS_FAST}", ratio >= AS_FAST))
    return claims


if __name__ == "__main__":
    run(measure, doc=__doc__)
