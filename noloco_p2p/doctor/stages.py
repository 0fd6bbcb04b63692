"""What each stage of a run would cost on this machine, and how many tokens its link carries through a stage."""

from __future__ import annotations

from noloco_p2p.doctor.check import Check
from noloco_p2p.errors import NolocoError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.telemetry.console import count, mib
from noloco_p2p.trainer.cut import link_tokens_per_s
from noloco_p2p.trainer.needs import memory_limit
from noloco_p2p.trainer.stage_fitting import Fitting
from noloco_p2p.trainer.stage_needs import StageNeeds

USUAL_BYTES_PER_S = 12.5e6  # of a link that nothing is known of: 100 Mbit/s


def stages(spec: TrainerSpec, settings: PeerSettings, *, download_bytes_per_s: float | None = None) -> list[Check]:
    """One check a stage, and one of the link; `download_bytes_per_s` was measured. It is a failure when none fits."""
    try:
        needs = StageNeeds.as_cut(spec, folders=settings.models)
    except NolocoError as error:
        fix = "write the spec anew with `noloco init --stages`, or name the folder of its model: --model NAME=FOLDER"
        return [Check("the stages", "failed", str(error), fix)]
    fitting = Fitting.of(needs, settings)
    found = [_stage(needs, fitting, stage, settings) for stage in range(spec.pipeline.stages)]
    return [*found, _link(needs, settings, download_bytes_per_s)]


def _stage(needs: StageNeeds, fitting: Fitting, stage: int, settings: PeerSettings) -> Check:
    name = f"stage {stage}"
    if why := fitting.reasons.get(stage):
        level, other = ("warning", "hold another stage, or ") if fitting else ("failed", "")
        is_too_large = needs.memory(stage) > memory_limit(settings)
        fix = "use a machine with more memory" if is_too_large else "give the data"
        return Check(name, level, why, f"{other}{fix}")
    reads = "; this machine can be a head, as it can read the data" if stage == 0 else ""
    told = (
        f"{count(needs.part(stage).num_parameters)} parameters: {mib(needs.memory(stage))} of memory, and activations "
        f"on top; fits, as {mib(memory_limit(settings))} may be used{reads}"
    )
    return Check(name, "ok", told)


def _link(needs: StageNeeds, settings: PeerSettings, download_bytes_per_s: float | None) -> Check:
    """By the slowest of what was measured and what the settings allow."""
    known = {
        "measured": download_bytes_per_s,
        "--max-upload": settings.upload_bytes_per_s,
        "--max-download": settings.download_bytes_per_s,
    }
    rates = {origin: rate for origin, rate in known.items() if rate} or {"not measured": USUAL_BYTES_PER_S}
    origin = min(rates, key=lambda origin: rates[origin])
    mbit_s = rates[origin] * 8 / 1e6
    carried = link_tokens_per_s(needs.spec.pipeline, needs.sizes.hidden_size, mbit_s=mbit_s)
    return Check("link", "ok", f"{mbit_s:,.0f} Mbit/s each way ({origin}) carry {count(carried)} tokens/s")
