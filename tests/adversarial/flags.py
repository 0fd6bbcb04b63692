"""The hostile peer, which breaks the protocol in one way for each flag: one flag for each row of docs/faults.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from harness.rounds import Vectors

from noloco_p2p.gossip.frames import Chunk, Header, Part, Ready, SectionName
from noloco_p2p.testing.faults import (
    Announce,
    At,
    Cut,
    Drop,
    FaultPlan,
    FlipBit,
    Lengthen,
    NotFinite,
    Repeat,
    Stall,
    SwapWithNext,
    Truncate,
)

EARLY, LATE = SectionName.OUTER_MOMENTUM, SectionName.OUTER_GRADIENT
Left = Literal["nothing", "early", "clipped"]  # what the victim keeps of the data that it received


@dataclass(frozen=True, slots=True)
class Flag:
    """One way to misbehave, and its effect on the victim.

    left: what the victim has kept after the swap. says: what its log line contains, besides the name of the peer.
    """

    row: str
    left: Left
    says: str = ""
    plan: FaultPlan = field(default_factory=FaultPlan)
    lie: Callable[[Vectors], Vectors] = lambda vectors: vectors
    round: int = 0


def early(fault: object, *, at: type = Chunk) -> FaultPlan:
    return FaultPlan().fail_at(At(at, section=EARLY), send=fault)  # pyright: ignore[reportArgumentType]


def late(fault: object, *, at: type = Chunk) -> FaultPlan:
    return FaultPlan().fail_at(At(at, section=LATE), send=fault)  # pyright: ignore[reportArgumentType]


def ready(part: Part, fault: object) -> FaultPlan:
    return FaultPlan().fail_at(At(Ready, part=part), send=fault)  # pyright: ignore[reportArgumentType]


def gradient(scale: float) -> Callable[[Vectors], Vectors]:
    return lambda vectors: replace(vectors, outer_gradient=vectors.outer_gradient * scale)


def state(scale: float) -> Callable[[Vectors], Vectors]:
    return lambda vectors: replace(
        vectors, slow_weights=vectors.slow_weights * scale, outer_momentum=vectors.outer_momentum + scale
    )


def noise(vectors: Vectors) -> Vectors:
    random = Vectors.random(666, num_elements=vectors.slow_weights.numel())
    return replace(random, outer_gradient=random.outer_gradient * vectors.outer_gradient.norm() / 20)


FLAGS = {
    "vanish-early": Flag("1", "nothing", "nothing applied", early(Cut())),
    "vanish-late": Flag("1", "early", "early part kept", late(Cut())),
    "freeze-early": Flag("2", "nothing", "no progress for", early(Stall())),
    "freeze-late": Flag("2", "early", "no progress for", late(Stall())),
    "truncate": Flag("4", "nothing", "is damaged", early(Truncate(40))),
    "truncate-late": Flag("4", "early", "is damaged", late(Truncate(40))),
    "flip": Flag("5", "nothing", "is damaged", early(FlipBit(77))),
    "flip-late": Flag("5", "early", "is damaged", late(FlipBit(77))),
    "other-codec": Flag("6", "nothing", "codec='int4'", early(Announce(codec="int4"), at=Header)),
    "other-shape": Flag("6", "nothing", "num_elements=7", early(Announce(num_elements=7), at=Header)),
    "missing-tensor": Flag("6", "nothing", "got chunk 0 of outer_momentum", early(Drop(), at=Header)),
    "nan": Flag("7", "nothing", "NaN or infinity", early(NotFinite())),
    "nan-late": Flag("7", "early", "NaN or infinity", late(NotFinite())),
    "huge": Flag("8", "nothing", f"num_bytes={2**60}", early(Announce(num_bytes=2**60), at=Header)),
    "scale": Flag("21", "nothing", "times this peer's usual norm", lie=gradient(1000)),
    "scale-state": Flag("21", "clipped", lie=state(1000)),
    "random": Flag("21", "clipped", lie=noise),
    "flip-sign": Flag("22", "clipped", lie=gradient(-1)),
    "flip-sign-x7": Flag("22", "clipped", lie=gradient(-7)),
    "lost-ready": Flag("31", "clipped", plan=ready(Part.LATE, Drop())),
    "one-way": Flag("32", "nothing", "no progress for", FaultPlan().fail_at(At(Header), send=Stall())),
    "repeat": Flag("35", "nothing", "does not end with the expected digest", early(Repeat())),
    "reorder": Flag("35", "nothing", "expected chunk 0", early(SwapWithNext())),
    "longer": Flag("36", "nothing", "must have", early(Lengthen(4000))),
    "longer-late": Flag("36", "early", "must have", late(Lengthen(4000))),
    "behind": Flag("38", "clipped", lie=state(-1), round=50),
}
