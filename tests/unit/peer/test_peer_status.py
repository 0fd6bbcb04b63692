"""The counters of a peer continue after a restart, and it counts the peers of its own stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from noloco_p2p.gossip.gossip import Link
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.gossip.swap import Counts
from noloco_p2p.peer.network import LivePeers, Status
from noloco_p2p.peer.peer import Peer
from noloco_p2p.telemetry.metrics import Metrics


def test_counters_continue_after_a_restart() -> None:
    counts, before, metrics = Counts(swaps=3), Metrics(), Metrics()
    counts.failures["slow"] = 2
    counts.refused["UNLISTED"] = 1
    counts.bytes_sent = 100
    Status(before).count(counts, Link(), relayed_bytes=7)
    again = Status(metrics)
    again.restore({**before.as_dict(), "step": 40, "a metric of another version": 1})
    for _ in range(2):
        again.count(counts, Link(), relayed_bytes=7)
    found = (metrics.step, metrics.swaps, metrics.failed_slow, metrics.refused_unlisted, metrics.bytes_sent)
    assert found == (40, 6, 4, 2, 200)
    assert metrics.relayed_bytes == 14
    assert metrics.failed == {"unreachable": 0, "slow": 4, "corrupt": 0, "abandoned": 0}


def test_a_peer_without_a_model_has_no_link_in_use() -> None:
    metrics = Metrics(swaps_per_min=1.0, link_use=1.0)
    Status(metrics).count(Counts(), Link(), relayed_bytes=0)
    assert (metrics.swaps_per_min, metrics.link_use) == (0, 0)


def test_only_the_time_of_training_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, metrics = [100.0], Metrics()
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    status = Status(metrics)

    def trained_after(seconds: float) -> float | None:
        now_s[0] += seconds
        status.count(Counts(), Link(), relayed_bytes=0)
        return metrics.trained_s

    assert trained_after(5) == 0, "it has no model yet"
    status.enter()
    assert trained_after(5) == 5
    status.change("training")
    assert trained_after(2) == 7
    status.change("paused")
    assert trained_after(60) == 7
    status.change("training")
    assert trained_after(1) == 8
    metrics = Metrics()
    again = Status(metrics)
    again.restore({"trained_s": 8.0})
    again.count(Counts(), Link(), relayed_bytes=0)
    assert metrics.trained_s == 8


def test_a_fault_of_another_peer_says_how_long_ago_it_was() -> None:
    counts = Counts(last_failure="Ada: gone", failed_at_s=time.monotonic() - 3605.0)
    network = SimpleNamespace(directory=SimpleNamespace(fault=""), service=SimpleNamespace(counts=counts))
    assert Peer.last_fault(cast(Any, SimpleNamespace(_network=network))) == "1 h 0 min ago: Ada: gone"


def test_no_counter_decreases_when_the_checkpoint_is_of_this_process() -> None:
    counts, metrics = Counts(swaps=3), Metrics()
    status = Status(metrics)
    status.count(counts, Link(), relayed_bytes=0)
    metrics.tokens, metrics.loss, saved = 700, 2.0, metrics.as_dict()
    counts.swaps = 5
    status.count(counts, Link(), relayed_bytes=0)
    metrics.tokens, metrics.loss = 900, 1.0
    for values in (saved, Metrics().as_dict()):
        status.restore(values)
        status.count(counts, Link(), relayed_bytes=0)
        assert (metrics.swaps, metrics.tokens) == (5, 900)


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
