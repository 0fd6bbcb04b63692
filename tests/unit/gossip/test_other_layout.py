"""A peer that switches to another model, as when it moves to another stage of a pipeline."""

from __future__ import annotations

import pytest
from harness.patience import PATIENCE_S
from harness.rounds import Vectors, one_round

from noloco_p2p.codec.modulo import BLOCK_ELEMENTS
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.outcome import Swapped
from noloco_p2p.spec import CodecSpec, TrainerSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = TrainerSpec(name="layouts", codec=CodecSpec(slow_weights="modulo", outer_momentum="modulo"))


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_what_was_learned_of_another_model_does_not_count(num_blocks: int) -> None:
    with MemorySwarm(SPEC) as swarm:
        peers = [swarm.peer(name) for name in "ab"]
        for round_index, blocks in enumerate((3, 3, num_blocks, num_blocks)):
            size = blocks * BLOCK_ELEMENTS
            for peer in peers if round_index in (0, 2) else ():
                peer.enter(layout=ModelLayout((("weight", (size,)),)), target=None)
            vectors = [Vectors.random(seed, num_elements=size) for seed in (1, 2)]
            outcomes = one_round(peers, vectors, wait_s=PATIENCE_S, round_index=round_index)
            assert all(isinstance(outcome, Swapped) for outcome in outcomes), (blocks, outcomes)
