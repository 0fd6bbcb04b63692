"""The counters of a peer continue after a restart, and after it has begun to train another model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from noloco_p2p.gossip.gossip import Counts, Link
from noloco_p2p.peer.status import PublishedStatus
from noloco_p2p.telemetry.metrics import Metrics


def status_of(counts: Counts, *, relayed_bytes: int = 0, link: Link | None = None) -> tuple[PublishedStatus, Metrics]:
    metrics, nothing = Metrics(), cast(Any, None)
    status = PublishedStatus(
        ("run", "0" * 64), nothing, nothing, None, settings=nothing, metrics=metrics, progress=nothing, pausing=nothing
    )
    service = SimpleNamespace(counts=counts, gossip=SimpleNamespace(link=link) if link else None)
    status.network = cast(Any, SimpleNamespace(service=service, directory=SimpleNamespace(relayed_bytes=relayed_bytes)))
    return status, metrics


def test_counters_continue_after_a_restart() -> None:
    counts = Counts(swaps=3)
    counts.failures["slow"] = 2
    counts.refused["UNLISTED"] = 1
    counts.traffic.bytes_sent = 100
    status, before = status_of(counts, relayed_bytes=7)
    status.count()
    again, metrics = status_of(counts, relayed_bytes=7)
    again.restore_metrics({**before.as_dict(), "step": 40, "a metric of another version": 1})
    again.count()
    again.count()
    found = (metrics.step, metrics.swaps, metrics.failed_slow, metrics.refused_unlisted, metrics.bytes_sent)
    assert found == (40, 6, 4, 2, 200)
    assert metrics.relayed_bytes == 14
    assert metrics.failed == {"unreachable": 0, "slow": 4, "corrupt": 0, "abandoned": 0}


def test_a_peer_without_a_model_has_no_link_in_use() -> None:
    status, metrics = status_of(Counts(), link=Link())
    metrics.swaps_per_min = metrics.link_use = 1.0
    status.count()
    assert (metrics.swaps_per_min, metrics.link_use) == (0, 0)
