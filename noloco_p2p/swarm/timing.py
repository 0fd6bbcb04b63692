"""Sets how often a directory performs its tasks. Tests use shorter times."""

from __future__ import annotations

from dataclasses import dataclass

from noloco_p2p.swarm.records import TTL_S


@dataclass(frozen=True, slots=True)
class Timing:
    """The pauses of the periodic tasks of a directory.

    The defaults are the values of the protocol. During the first `quick_for_s` seconds after its start, a node reads
    records every `quick_view_s` seconds.
    """

    heartbeat_s: float = TTL_S / 4
    view_s: float = 5.0
    bucket_view_s: float = 10.0
    quick_view_s: float = 1.0
    quick_for_s: float = 30.0
    dial_s: float = 10.0
    freshen_s: float = 30.0
