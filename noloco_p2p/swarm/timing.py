"""How often a directory performs its tasks; in tests everything is faster."""

from __future__ import annotations

from dataclasses import dataclass

from noloco_p2p.swarm.records import TTL_S


@dataclass(frozen=True, slots=True)
class Timing:
    """Pauses between the runs of each task; the defaults are the protocol's. `quick_*`: while a node is young."""

    heartbeat_s: float = TTL_S / 4
    view_s: float = 5.0
    bucket_view_s: float = 10.0
    quick_view_s: float = 1.0
    quick_for_s: float = 30.0
    dial_s: float = 10.0
    freshen_s: float = 30.0
