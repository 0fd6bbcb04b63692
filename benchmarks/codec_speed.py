"""Measure how fast each codec encodes and decodes full chunks on one thread.

    python benchmarks/codec_speed.py [--quick] [--json FILE]

The codecs take turns after every chunk, and the shortest time of each codec counts, because the machine is shared.
Chunks are drawn from a normal distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from claims import Claim, run

from noloco_p2p.codec import CHUNK_ELEMENTS, CODECS, Codec

WAYS = ("encode", "decode")


def actions(codec: Codec) -> list[Callable[[], object]]:
    """Return the functions that encode and decode one chunk with the codec."""
    chunk = torch.randn(CHUNK_ELEMENTS, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(chunk)
    return [lambda: codec.encode(chunk), lambda: codec.decode(payload, shape=chunk.shape)]


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    calls = {(name, way): call for name in CODECS for way, call in zip(WAYS, actions(CODECS[name]), strict=True)}
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(200 if quick else 3000):
        for key, call in calls.items():
            began_s = time.perf_counter()
            call()
            best[key] = min(best[key], time.perf_counter() - began_s)
    speeds = {key: 4 * CHUNK_ELEMENTS / seconds / 1e9 for key, seconds in best.items()}
    return [
        Claim(f"{name} {way}, one core", speed, "GB/s of fp32", ">= 1", speed >= 1)
        for (name, way), speed in speeds.items()
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
