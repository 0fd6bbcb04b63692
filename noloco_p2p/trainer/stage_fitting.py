"""Which stages of a run a machine can hold."""

from __future__ import annotations

from noloco_p2p.data.sources import check_bindings
from noloco_p2p.errors import DataError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.console import mib
from noloco_p2p.trainer.cut import cut_of
from noloco_p2p.trainer.needs import memory_limit
from noloco_p2p.trainer.stage_needs import StageNeeds


class Fitting(list[int]):
    """Stages that this machine can hold. reasons: why it cannot hold the others, in a sentence each."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[int, str] = {}

    @classmethod
    def of(cls, needs: StageNeeds, settings: PeerSettings) -> Fitting:
        """By memory, and a head by its data."""
        fitting, limit = cls(), memory_limit(settings)
        for stage in range(len(cut_of(needs.spec))):
            needed = needs.memory(stage)
            if needed > limit:
                fitting.reasons[stage] = f"stage {stage} takes at least {mib(needed)} of memory, not {mib(limit)}"
            elif stage == 0 and (why := _why_no_head(needs, settings)):
                fitting.reasons[stage] = why
            else:
                fitting.append(stage)
        return fitting


def _why_no_head(needs: StageNeeds, settings: PeerSettings) -> str:
    try:
        check_bindings(needs.spec.data, settings.data)
    except DataError as error:
        return f"stage 0 reads the data, and {error}"
    return ""
