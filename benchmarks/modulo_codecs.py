"""Measure the speed of modulo coding on one core, and its ratio to the speed of modulo8.

    python benchmarks/modulo_codecs.py [--quick] [--json FILE]

Speed is the number of bytes of fp32 values that are encoded or compared (`differences`) per second of processor time,
for a whole chunk. The codecs take turns with modulo8, and the best of many calls counts. The codec `modulo` needs one
pass for a chunk whose differences fit into four bits, two passes for six bits and three for eight; its figures cover
all passes of a chunk together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from claims import Claim, run
from torch import Tensor

from noloco_p2p.codec import CHUNK_ELEMENTS
from noloco_p2p.codec.modulo import BLOCKS_A_CHUNK, MODULO8, MODULO_CODECS, Grid, ModuloCodec

DISTANCE = 1.0  # standard deviation; the largest value of a chunk is about five times that
LEAST = 0.8  # of the speed of modulo8, for a chunk that fits into four bits


def grid_of(exponent: int) -> Grid:
    return Grid(bytes([exponent & 0xFF] * BLOCKS_A_CHUNK), seed=1)


# By name: the codecs of all passes, and a grid with which the chunk needs the last of them.
CASES: dict[str, tuple[tuple[ModuloCodec, ...], Grid]] = {
    "modulo4": (MODULO_CODECS["modulo4"], grid_of(0)),
    **{
        f"modulo, {codec.known_bits} bits": (MODULO_CODECS["modulo"][: index + 1], grid_of(-2 * index))
        for index, codec in enumerate(MODULO_CODECS["modulo"])
    },
}


def encode(codecs: tuple[ModuloCodec, ...], values: Tensor, grid: Grid) -> list[bytes]:
    return [codec.encode(values, grid=grid, chunk_index=0) for codec in codecs]


def compare(codecs: tuple[ModuloCodec, ...], values: Tensor, payloads: list[bytes], grid: Grid) -> bytes | None:
    differences, earlier = None, b""
    for codec, payload in zip(codecs, payloads, strict=True):
        differences = codec.differences(values, payload, grid=grid, chunk_index=0, earlier=earlier)
        earlier += payload
    return differences


def processor_s(action: Callable[[], object]) -> float:
    began_s = time.thread_time()
    action()
    return time.thread_time() - began_s


def figures(name: str, quick: bool) -> list[Claim]:
    codecs, grid = CASES[name]
    generator = torch.Generator().manual_seed(0)
    own, apart = (torch.randn(CHUNK_ELEMENTS, generator=generator) for _ in range(2))
    partner, fine = own + DISTANCE * apart, grid_of(-3)
    payloads, baseline = encode(codecs, partner, grid), encode((MODULO8,), partner, fine)
    assert compare(codecs, own, payloads, grid) is not None, name
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "encode": (lambda: encode(codecs, own, grid), lambda: encode((MODULO8,), own, fine)),
        "differences": (
            lambda: compare(codecs, own, payloads, grid),
            lambda: compare((MODULO8,), own, baseline, fine),
        ),
    }
    claims = []
    for way, actions in ways.items():
        times = [[processor_s(action) for action in actions] for _ in range(50 if quick else 500)]
        own_s, baseline_s = (min(column) for column in zip(*times, strict=True))
        ratio = Claim(f"{name}: {way} / modulo8", baseline_s / own_s, "ratio")
        if len(codecs) == 1:
            ratio = replace(ratio, target=f">= {LEAST:g}", met=ratio.value >= LEAST)
        claims += [Claim(f"{name}: {way}", 4 * CHUNK_ELEMENTS / own_s / 1e9, "GB/s of fp32"), ratio]
    return claims


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    return [claim for name in CASES for claim in figures(name, quick)]


if __name__ == "__main__":
    run(measure, doc=__doc__)
