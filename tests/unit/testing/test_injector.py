"""A fault at an exact round and phase: the outcome of that round fits the phase, and the rounds around it are whole."""

from __future__ import annotations

import pytest
from harness.injector import Injector, Phase
from harness.patience import PATIENCE_S, PATIENT
from harness.replicas import Pair
from harness.rounds import Vectors, one_round
from harness.specs import FP32, published

from noloco_p2p.gossip.outcome import Alone, Half, Outcome, Swapped
from noloco_p2p.presets import BEST_CODEC
from noloco_p2p.spec import CodecSpec, RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="inject", codec=FP32, outer=published())
KILLS = 10
ALLOWED: dict[Phase, set[type[Outcome]]] = {  # if a Ready is lost, the partner may answer no
    Phase.OFFER: {Alone},
    Phase.EARLY_HEADER: {Alone},
    Phase.EARLY_CHUNK: {Alone},
    Phase.EARLY_READY: {Alone, Half},
    Phase.LATE_CHUNK: {Half},
    Phase.LATE_READY: {Half, Swapped},
}


@pytest.mark.parametrize("codec", [FP32, BEST_CODEC], ids=["fp32", "of-init"])
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name.lower())
def test_a_kill_in_every_other_round_costs_no_more_than_its_swap(phase: Phase, codec: CodecSpec) -> None:
    """10 kills for each of six phases and two codecs. The result of a round is applied whole or not at all."""
    spec = RunSpec(name="inject", codec=codec, outer=published())
    for kill in range(KILLS):
        killed = 1 + kill % 2  # after one or two rounds without a fault
        injector = Injector().fail_at(peer="a", round=killed, phase=phase)
        pair = Pair.make(spec.outer)
        with MemorySwarm(spec, deadlines=PATIENT) as swarm:
            peers = [swarm.peer("a", **injector.of("a")), swarm.peer("b")]
            for round_index in range(killed + 1):
                vectors = pair.train()
                outcomes = one_round(peers, vectors, wait_s=PATIENCE_S, round_index=round_index)
                kinds = {type(outcome) for outcome in outcomes}
                assert kinds <= (ALLOWED[phase] if round_index == killed else {Swapped})
                assert len(kinds) == 1, "both sides alike"
                assert pair.is_whole(outcomes, vectors, codec=codec)


def test_only_the_named_peer_is_faulty_and_the_fault_is_counted() -> None:
    victims: list[str] = []
    injector = Injector(on_fault=victims.append).fail_at(peer="b", round=0, phase=Phase.LATE_CHUNK)
    with MemorySwarm(SPEC, deadlines=PATIENT) as swarm:
        peers = [swarm.peer(name, **injector.of(name)) for name in ("a", "b")]
        outcomes = one_round(peers, [Vectors.random(1), Vectors.random(2)], wait_s=PATIENCE_S)
    assert [type(outcome) for outcome in outcomes] == [Half, Half]
    assert (injector.fired, victims) == (1, ["b"])
