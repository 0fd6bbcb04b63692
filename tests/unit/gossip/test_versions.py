"""Peers with one major version of the protocol swap, whichever of the two makes the offer."""

from __future__ import annotations

import pytest
from harness.rounds import Vectors, open_round, wait_until
from harness.specs import FP32, published

from noloco_p2p.gossip.round_events import RoundPhase
from noloco_p2p.spec import RunSpec
from noloco_p2p.testing.peers import MemorySwarm

SPEC = RunSpec(name="v", codec=FP32, outer=published())


@pytest.mark.parametrize("theirs", ["1.1", "1.2", "1.97"])
@pytest.mark.parametrize("offers", ["older", "newer"])
def test_minor_versions_swap_in_both_roles(theirs: str, offers: str) -> None:
    with MemorySwarm(SPEC) as swarm:
        peers = [swarm.peer("older", protocol_version="1.0"), swarm.peer("newer", protocol_version=theirs)]
        swarm.network.closed.add(offers)  # so that only the other peer makes offers
        for seed, peer in enumerate(peers):
            open_round(peer, Vectors.random(seed))
        wait_until(lambda: all(peer.driver.phase is RoundPhase.EARLY for peer in peers))
