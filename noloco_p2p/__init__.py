"""noloco_p2p: train one model together over the internet, without a data centre, a master or an all-reduce.

    with Peer.join(ticket_or_spec) as peer:
        outer = NoLoCo(model, peer)
        for batch in data:
            ...                      # forward, backward, optimizer.step()
            outer.step()

The names below are loaded when they are first used: `import noloco_p2p` itself loads neither torch nor hivemind.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from noloco_p2p._version import __version__

if TYPE_CHECKING:
    from noloco_p2p.gossip.outcome import Alone, Half, Swapped
    from noloco_p2p.peer.peer import Peer
    from noloco_p2p.settings import PeerSettings
    from noloco_p2p.spec import CodecSpec, DataSpec, EvaluateSpec, ModelSpec, OuterSpec, RunSpec, TrainSpec
    from noloco_p2p.ticket import Ticket
    from noloco_p2p.train.checkpoint import Checkpoints
    from noloco_p2p.train.outer import NoLoCo, RoundResult

_HOME = {
    "Peer": "noloco_p2p.peer.peer",
    "PeerSettings": "noloco_p2p.settings",
    "NoLoCo": "noloco_p2p.train.outer",
    "RoundResult": "noloco_p2p.train.outer",
    "Checkpoints": "noloco_p2p.train.checkpoint",
    **dict.fromkeys(("Swapped", "Half", "Alone"), "noloco_p2p.gossip.outcome"),
    "Ticket": "noloco_p2p.ticket",
    **dict.fromkeys(
        ("RunSpec", "OuterSpec", "CodecSpec", "ModelSpec", "DataSpec", "TrainSpec", "EvaluateSpec"), "noloco_p2p.spec"
    ),
}

__all__ = [
    "Alone",
    "Checkpoints",
    "CodecSpec",
    "DataSpec",
    "EvaluateSpec",
    "Half",
    "ModelSpec",
    "NoLoCo",
    "OuterSpec",
    "Peer",
    "PeerSettings",
    "RoundResult",
    "RunSpec",
    "Swapped",
    "Ticket",
    "TrainSpec",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
