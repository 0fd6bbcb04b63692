"""Train one model together over the internet, without a data centre, a coordinator or an all-reduce.

    with Peer.join(ticket_or_spec) as peer:
        NoLoCo(model, optimizer, peer)
        for batch in data:
            ...                      # forward, backward, optimizer.step(), optimizer.zero_grad()

The names below are loaded on first use, so `import noloco_p2p` itself loads neither torch nor hivemind.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from noloco_p2p._version import __version__

if TYPE_CHECKING:
    from noloco_p2p.errors import (
        CheckpointError,
        CorruptPayload,
        DataError,
        DirectoryError,
        IdentityError,
        Left,
        ModelError,
        NolocoError,
        NotFinite,
        PeerError,
        RankError,
        Refused,
        SettingsError,
        SpecError,
        TicketError,
        TimedOut,
        Unreachable,
    )
    from noloco_p2p.outer.checkpoint import Checkpoint, Checkpoints
    from noloco_p2p.outer.noloco import NoLoCo, Swapped
    from noloco_p2p.outer.optimizer_state import InnerState
    from noloco_p2p.peer.peer import Peer
    from noloco_p2p.settings import PeerSettings
    from noloco_p2p.spec import (
        CodecSpec,
        DataSpec,
        EvaluateSpec,
        ModelSpec,
        OuterSpec,
        RunSpec,
        Spec,
        TrainerSpec,
        TrainSpec,
    )
    from noloco_p2p.ticket import Ticket

_NAMES = {
    "noloco_p2p.errors": (
        "CheckpointError CorruptPayload DataError DirectoryError IdentityError Left ModelError NolocoError NotFinite "
        "PeerError RankError Refused SettingsError SpecError TicketError TimedOut Unreachable"
    ),
    "noloco_p2p.outer.checkpoint": "Checkpoint Checkpoints",
    "noloco_p2p.outer.noloco": "NoLoCo Swapped",
    "noloco_p2p.outer.optimizer_state": "InnerState",
    "noloco_p2p.peer.peer": "Peer",
    "noloco_p2p.settings": "PeerSettings",
    "noloco_p2p.spec": ("CodecSpec DataSpec EvaluateSpec ModelSpec OuterSpec RunSpec Spec TrainerSpec TrainSpec"),
    "noloco_p2p.ticket": "Ticket",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "CodecSpec",
    "CorruptPayload",
    "DataError",
    "DataSpec",
    "DirectoryError",
    "EvaluateSpec",
    "IdentityError",
    "InnerState",
    "Left",
    "ModelError",
    "ModelSpec",
    "NoLoCo",
    "NolocoError",
    "NotFinite",
    "OuterSpec",
    "Peer",
    "PeerError",
    "PeerSettings",
    "RankError",
    "Refused",
    "RunSpec",
    "SettingsError",
    "Spec",
    "SpecError",
    "Swapped",
    "Ticket",
    "TicketError",
    "TimedOut",
    "TrainSpec",
    "TrainerSpec",
    "Unreachable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
