"""Which peers of the next stage a peer of a pipeline sends to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from noloco_p2p.flow.neighbours import Few
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.peer.live_peers import LivePeers


class Directory:
    """A directory that lists a part of a large swarm; a third of the listed peers hold stage 0."""

    def live(self) -> Sequence[Candidate]:
        return [Candidate(f"peer-{number}", address="", stage=min(number % 3, 1)) for number in range(30)]

    def headcount(self) -> Any:
        return SimpleNamespace(others=300)


def test_peers_of_other_stages_do_not_count_for_the_shares_of_this_one() -> None:
    peers = LivePeers(cast(Any, Directory()), cast(Any, None))
    assert peers.num_live() == 301
    for stage, others in ((0, 100), (1, 200)):
        peers.stage = stage
        assert peers.num_live() == 1 + others
        assert {peer.stage for peer in peers.mates()} == {stage}


def test_a_few_of_those_who_live_are_kept_while_they_do() -> None:
    neighbours = Few(random.Random(0), most=3)
    neighbours.update({"a", "b"})
    assert sorted(neighbours.chosen) == ["a", "b"]
    neighbours.update({"a", "b", "c", "d", "e"})
    first = neighbours.chosen
    assert len(first) == 3
    assert {"a", "b"} < set(first)
    neighbours.update({"a", "b", "c", "d", "e"})
    assert neighbours.chosen == first
    neighbours.update({"b", "d", "e"})
    assert sorted(neighbours.chosen) == ["b", "d", "e"]
    neighbours.update(set())
    assert neighbours.chosen == ()


def test_one_place_is_drawn_anew_so_that_each_peer_is_met_in_time() -> None:
    everybody = {f"peer-{number}" for number in range(12)}
    neighbours, met = Few(random.Random(0), most=4), set[str]()
    for _ in range(100):
        neighbours.update(everybody)
        assert len(neighbours.chosen) == 4
        met.update(neighbours.chosen)
        neighbours.drop_one()
        assert len(neighbours.chosen) == 3
    assert met == everybody
