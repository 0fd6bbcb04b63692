"""The hostile peer, which breaks the protocol in one way for each flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from noloco_p2p.gossip.frames import Chunk, Frame, Header, Ready
from noloco_p2p.testing.faults import Fault, flip_bit

Left = Literal["nothing", "clipped"]  # what the victim keeps of the data that it received


@dataclass(frozen=True, slots=True)
class Flag:
    """One way to misbehave, and its effect on the victim.

    left: what the victim has kept after the swap. says: what its log line contains, besides the name of the peer.
    fault: what happens to each frame of this kind. lie: what the peer swaps instead of its vector. code: how it changes
    its payloads, with digests that fit. is_strike: whether only a faulty peer does this, so that three of them are a
    ban.
    """

    left: Left = "nothing"
    says: str = ""
    kind: type[Frame] = Chunk
    fault: Fault | None = None
    lie: Callable[[Tensor], Tensor] = lambda vector: vector
    code: Callable[[bytes], bytes] | None = None
    is_strike: bool = False


def strike(says: str, change: Callable[[Any], Frame], kind: type[Frame] = Chunk) -> Flag:
    return Flag(says=says, kind=kind, fault=change, is_strike=True)


def noise(vector: Tensor) -> Tensor:
    return torch.randn(vector.shape, generator=torch.Generator().manual_seed(666)) * vector.std()


FLAGS = {
    "vanish": Flag(says="a swap failed", fault="cut"),
    "freeze": Flag(says="no frame arrived", fault="stall"),
    "one-way": Flag(says="no frame arrived", kind=Header, fault="stall"),
    "truncate": strike("has 40 bytes instead of", lambda chunk: Chunk(chunk.payload[:40])),
    "flip": strike("header announced", flip_bit(77)),
    "missing-chunk": Flag(says="expected Chunk", fault="drop", is_strike=True),
    "ready-at-once": strike("expected Header", lambda frame: Ready(), Header),
    "longer": Flag(says="instead of", code=lambda payload: payload + bytes(4000), is_strike=True),
    "nan": Flag(says="NaN or infinity", code=lambda payload: b"\xff" * len(payload), is_strike=True),
    "scale": Flag("clipped", lie=lambda vector: 1000 * vector),
    "random": Flag("clipped", lie=noise),
    "flip-sign": Flag("clipped", lie=lambda vector: -vector),
    "lost-ready": Flag("clipped", kind=Ready, fault="drop"),
}
