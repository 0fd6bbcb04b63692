"""Implements the command `noloco fork`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noloco_p2p.cli.options import Changes, parse_changes, takes_settings
from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket
    from noloco_p2p.trainer.start import NewStart


@takes_settings("models", "state_dir")
def fork(
    source: Annotated[str, typer.Argument(metavar="SPEC.toml|TICKET", help="The run to fork.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.toml", help="Where to write the spec of the new run.")],
    changes: Changes = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Use this checkpoint instead of the newest one.", show_default=False)
    ] = None,
    *,
    settings: PeerSettings,
) -> None:
    """Start a new run from the weights of another run, with changed settings.

    With a spec file, the fork starts from the newest checkpoint on this machine. With a ticket, it fetches the states
    of up to five live peers, and starts from the state nearest to their median. In a run with stages, this is done for
    every stage.
    """
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket, is_ticket

    if new.exists() or not new.absolute().parent.is_dir():
        why = "already exists" if new.exists() else f"cannot be written: there is no folder {new.absolute().parent}"
        raise SettingsError(f"{new} {why}; choose another path for the spec of the new run")
    values = parse_changes(changes)
    for key in values:
        if key.startswith("model."):
            raise SettingsError(
                f"--set {key}: the model cannot change, because a fork starts from the weights of the old run"
            )
    entry = Ticket.decode(source) if is_ticket(source) else TrainerSpec.load(source)
    if isinstance(entry, TrainerSpec):
        _changed(entry, values)  # fail before the slow imports
    import uvloop

    from noloco_p2p.presets import render
    from noloco_p2p.trainer.start import new_start

    with new_start(settings.state_dir) as start:
        if isinstance(entry, Ticket) and not checkpoint:
            old, spec = uvloop.run(_take_live(entry, start, values, settings.models))
        else:
            old, spec = _take_kept(entry, checkpoint, start, values, settings)
    new.write_text(render(spec.with_changes({"model.start": start.digest})), encoding="utf-8")
    join = f"noloco join {new}"
    if settings.origins()["state_dir"] == "flag":
        join += f" --state-dir {settings.state_dir}"
    if spec.pipeline.stages > 1:
        join += " --stage 0"
    print(f"wrote {new}: run {spec.name}, which starts from the state of run {old.name}; start it with: {join}")
    if spec.pipeline.stages > 1:
        print(
            f"the first peer of each stage needs a copy of {start.folder} in the subfolder `starts` of its own "
            "--state-dir; later peers fetch the state of their stage"
        )


def _take_kept(
    entry: TrainerSpec | Ticket,
    checkpoint: Path | None,
    start: NewStart,
    values: dict[str, Any],
    settings: PeerSettings,
) -> tuple[TrainerSpec, TrainerSpec]:
    """Fork from a checkpoint on this machine. Return the specs of the old and the new run."""
    from noloco_p2p.peer.run_folder import folder_of
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.trainer.merge import from_checkpoint

    if checkpoint is None:
        assert isinstance(entry, TrainerSpec), "with a ticket, the state comes from live peers"
        checkpoint = folder_of(settings.state_dir, entry.run_id)
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"this machine has no checkpoint of run {entry.name} in {checkpoint}; "
                "use the ticket of a live peer, another --state-dir or --checkpoint"
            )
    state = from_checkpoint(checkpoint, folders=settings.models)
    old = entry if isinstance(entry, TrainerSpec) else state.spec
    spec = _forked(old, values, settings.models)
    start.add(state.by_name())
    return old, spec


async def _take_live(
    ticket: Ticket, start: NewStart, values: dict[str, Any], folders: dict[str, str]
) -> tuple[TrainerSpec, TrainerSpec]:
    """Fork from live peers, with one stage in memory at a time. Return the specs of the old and the new run."""
    import asyncio

    from noloco_p2p.telemetry.bars import drawing
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.trainer.merge import COMPARED, live_run, state_in_the_middle

    async with live_run(ticket, progress=Progress(drawing(print)), folders=folders) as live:
        old, spec = live.spec, _forked(live.spec, values, folders)  # fail before anything is fetched
        live.check_stages()
        for stage in live.stages():
            state = await live.take(stage, sample=COMPARED, judge=state_in_the_middle)
            await asyncio.to_thread(start.add, state.by_name())
            for notice in state.notices():
                print(notice)
            del state
        return old, spec


def _changed(old: TrainerSpec, values: dict[str, Any]) -> TrainerSpec:
    """Return the spec of the fork. Raises SpecError.

    If `values` sets the number of stages, `pipeline.cut` is still `auto`.
    """
    automatic: dict[str, Any] = {"name": f"{old.name}-fork"}
    if "pipeline.stages" in values:
        automatic["pipeline.cut"] = "auto"
        automatic["model.parameter_seeds"] = old.model.parameter_seeds or values["pipeline.stages"] != 1
    return old.with_changes(automatic | values, origin="--set")


def _forked(old: TrainerSpec, values: dict[str, Any], folders: dict[str, str]) -> TrainerSpec:
    """Return the spec of the fork, but without the digest of its initial state."""
    from noloco_p2p.trainer.stage_needs import StageNeeds

    spec = _changed(old, values)
    if spec.pipeline.stages > 1 and spec.pipeline.cut == "auto":
        return StageNeeds.of(spec, spec.pipeline.stages, folders=folders).spec
    return spec
