"""Measure the CPU time of a round of 125M parameters without training and network: encoding, checking and adding.

    python benchmarks/boundary.py [--quick] [--json FILE]

Training waits for the work labelled "boundary" and "eager"; the codec thread does the work labelled "behind". The
benchmark uses one torch thread, the codecs that `noloco init` writes, and tensors shaped like a Llama's. The shortest
of several processor times counts. The baseline is a copy of the same number of fp32 values in memory, because reading
and writing the weights cannot be faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from claims import Claim, run
from torch import Tensor, nn

from noloco_p2p.codec import Scratch, chunk_bounds
from noloco_p2p.codec.modulo import Bounds, Grid
from noloco_p2p.gossip.frames import Payload
from noloco_p2p.gossip.outcome import Correction, Received
from noloco_p2p.gossip.payload_memory import PayloadMemory
from noloco_p2p.gossip.round_length import LinkMeasure
from noloco_p2p.gossip.sections import Coding, SectionPair, SectionPlan, Squares, section_plans
from noloco_p2p.optim.mixing import Agreement
from noloco_p2p.outer.outer_state import OuterState
from noloco_p2p.spec import CodecSpec, OuterSpec

CODECS = CodecSpec(slow_weights="modulo8", outer_gradient="int4")
EVEN = Agreement(5)
Timed = Callable[[str, Callable[[], object]], None]


def model(num_layers: int) -> nn.Module:
    shapes = [(15_000 * num_layers // 12, 768)]
    shapes += num_layers * [*4 * [(768, 768)], *2 * [(3072, 768)], (768, 3072), (768,), (768,)]
    return nn.ParameterList(torch.randn(shape) * 0.02 for shape in shapes)


def measure(quick: bool) -> list[Claim]:
    torch.set_num_threads(1)
    weights, best = model(1 if quick else 12), dict[str, float]()

    def timed(name: str, action: Callable[[], object]) -> None:
        began_s = time.thread_time()
        action()
        best[name] = min(best.get(name, float("inf")), time.thread_time() - began_s)

    state = OuterState(weights, OuterSpec(inner_steps=5))
    copy = torch.empty_like(state.slow_weights)
    for _ in range(5):
        train(weights)
        one_round(state, lambda: train(weights), timed)
        timed("copy of the weights in memory", lambda: copy.copy_(state.slow_weights))
    claims = [Claim("parameters", state.num_elements / 1e6, "M")]
    return claims + [Claim(name, seconds, "s") for name, seconds in best.items()]


def train(weights: nn.Module) -> None:
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)


def one_round(state: OuterState, trained: Callable[[], None], timed: Timed) -> None:
    memory, scratch = PayloadMemory(), Scratch()
    early, late = section_plans(CODECS, swap_momentum=False, num_elements=state.num_elements)
    coding, squares = Coding(late), Squares()
    slab = memory.take(late.num_bytes)
    own: list[Payload] = []
    timed("boundary: coding", lambda: own.extend(slab.code(late.codec, chunk) for chunk in state.outer_gradient()))
    partner = [*own[1:-1], own[0], own[-1]]  # payloads with the same sizes and norms

    def add_up() -> None:
        squares.own = sum(coding.square(payload, index, scratch=scratch) for index, payload in enumerate(own))

    timed("behind: norm of a coded gradient", add_up)
    squares.partner = squares.own
    gradient = SectionPair(coding, [*own], [*partner], squares)
    weights = modulo_pair(early, state.slow_weights, timed)
    link = LinkMeasure(early_s=1.0, late_s=0.0, is_whole=True)
    received = Received("b", 0, 0.0, EVEN, {early.name: weights, late.name: gradient}, link, 0, 0, 1.0, 0.0, 0.0, 2)
    timed("boundary: adding", lambda: state.step(received))
    trained()
    correction = Correction(gradient, "b", 0, EVEN)
    timed("eager: adding what came late", lambda: state.correct(correction))


def modulo_pair(plan: SectionPlan, own: Tensor, timed: Timed) -> SectionPair:
    """Encode and check a partner's slow weights, which differ from this peer's by about 1e-4, and return the pair."""
    (codec,), places = plan.modulo, list(enumerate(chunk_bounds(own.numel())))
    partner = own + 1e-4 * torch.randn_like(own)
    bounds = Bounds(own.numel(), codec=codec)
    for index, (start, stop) in places:
        there = partner[start:stop]
        bounds.update(index, half_difference=(there - own[start:stop]) / 2, values=there)
    grid = Grid(bounds.propose(), seed=1)
    coding, sent = Coding(plan, grid), list[bytes]()
    kept: list[bytes] = []

    def encode() -> None:
        sent.extend(codec.encode(partner[a:b], grid=grid, chunk_index=index) for index, (a, b) in places)

    def check() -> None:
        for index, (a, b) in places:
            differences = codec.differences(own[a:b], sent[index], grid=grid, chunk_index=index)
            assert differences
            kept.append(differences)
            half = coding.half_difference(codec, differences, index)
            bounds.update(index, half_difference=half, values=own[a:b])

    timed("behind: coding slow weights", encode)
    timed("behind: checking slow weights", check)
    return SectionPair(coding, [codec] * len(places), [*kept], Squares())


if __name__ == "__main__":
    run(measure, doc=__doc__)
