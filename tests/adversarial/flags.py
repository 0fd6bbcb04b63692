"""The hostile peer, which breaks the protocol in one way for each flag. SECURITY.md names the flags in its tables."""

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
    is_strike: whether only a faulty peer does this, so that three of them are a ban.
    """

    left: Left
    says: str = ""
    plan: FaultPlan = field(default_factory=FaultPlan)
    lie: Callable[[Vectors], Vectors] = lambda vectors: vectors
    round: int = 0
    is_strike: bool = False


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
    "vanish-early": Flag("nothing", "nothing applied", early(Cut())),
    "vanish-late": Flag("early", "early part kept", late(Cut())),
    "freeze-early": Flag("nothing", "no progress for", early(Stall())),
    "freeze-late": Flag("early", "no progress for", late(Stall())),
    "truncate": Flag("nothing", "is damaged", early(Truncate(40)), is_strike=True),
    "truncate-late": Flag("early", "is damaged", late(Truncate(40)), is_strike=True),
    "flip": Flag("nothing", "is damaged", early(FlipBit(77)), is_strike=True),
    "flip-late": Flag("early", "is damaged", late(FlipBit(77)), is_strike=True),
    "other-codec": Flag("nothing", "codec='int4'", early(Announce(codec="int4"), at=Header), is_strike=True),
    "other-shape": Flag("nothing", "num_elements=7", early(Announce(num_elements=7), at=Header), is_strike=True),
    "missing-tensor": Flag("nothing", "got chunk 0 of outer_momentum", early(Drop(), at=Header), is_strike=True),
    "nan": Flag("nothing", "NaN or infinity", early(NotFinite()), is_strike=True),
    "nan-late": Flag("early", "NaN or infinity", late(NotFinite()), is_strike=True),
    "huge": Flag("nothing", f"num_bytes={2**60}", early(Announce(num_bytes=2**60), at=Header), is_strike=True),
    "scale": Flag("nothing", "times this peer's usual norm", lie=gradient(1000)),
    "scale-state": Flag("clipped", lie=state(1000)),
    "random": Flag("clipped", lie=noise),
    "flip-sign": Flag("clipped", lie=gradient(-1)),
    "flip-sign-x7": Flag("clipped", lie=gradient(-7)),
    "lost-ready": Flag("clipped", plan=ready(Part.LATE, Drop())),
    "one-way": Flag("nothing", "no progress for", FaultPlan().fail_at(At(Header), send=Stall())),
    "repeat": Flag("nothing", "does not end with the expected digest", early(Repeat()), is_strike=True),
    "reorder": Flag("nothing", "expected chunk 0", early(SwapWithNext()), is_strike=True),
    "longer": Flag("nothing", "must have", early(Lengthen(4000)), is_strike=True),
    "longer-late": Flag("early", "must have", late(Lengthen(4000)), is_strike=True),
    "behind": Flag("clipped", lie=state(-1), round=50),
}
