"""A peer that makes offers to everybody at once, on many calls and with forged times, gets at most its share of swaps.

Eight honest peers over real gRPC meet a liar that also accepts every offer. The test counts rounds and does not wait
for swaps: an honest peer without a partner takes a solo round, and the test continues.
"""

from __future__ import annotations

import pytest
from harness.greedy import GreedyNode, count_swaps
from harness.loopback import LoopbackSwarm
from harness.patience import PATIENCE_S
from harness.specs import FP32, published

from noloco_p2p.gossip.shares import FAIR_SHARES, START
from noloco_p2p.spec import RunSpec

SPEC = RunSpec(name="greedy", codec=FP32, outer=published(inner_steps=1, max_wait_s=PATIENCE_S))
NUM_HONEST, WAIT_S = 8, 6.0


@pytest.mark.parametrize(("is_listed", "num_rounds"), [(True, 18), (False, 6)])
def test_a_greedy_peer_gets_its_share_at_most(is_listed: bool, num_rounds: int) -> None:
    with LoopbackSwarm(SPEC) as swarm:
        peers = [swarm.peer(f"honest-{number}") for number in range(NUM_HONEST)]
        with GreedyNode(swarm, SPEC, is_listed=is_listed):
            *_, (swaps, bad) = count_swaps(peers, num_rounds, wait_s=WAIT_S)
        refused = sum(peer.driver.traffic.refused_over_share for peer in peers)
        unlisted = sum(peer.driver.traffic.refused_unlisted for peer in peers)
    assert swaps - bad >= NUM_HONEST * num_rounds / 4, "the honest ones go on; a busy machine ends some rounds early"
    if not is_listed:
        assert bad == 0
        assert unlisted > 0
        return
    # The bound for one honest peer, which draws the liar until it has had its share, and later only if nobody else is
    # free.
    most = START + 2 + FAIR_SHARES * num_rounds / NUM_HONEST
    assert bad <= NUM_HONEST * most
    assert refused > 0
