"""Implements the commands that take the weights of a run: `noloco evaluate`, `noloco export` and `noloco fork`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli.options import Changes, Json, parse_changes, print_json, takes_settings
from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.console import counted
from noloco_p2p.telemetry.progress import Progress

if TYPE_CHECKING:
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket
    from noloco_p2p.trainer.merge import LiveRun, TakenState
    from noloco_p2p.trainer.start import NewStart


@takes_settings("data", "models", "device")
def evaluate(
    settings: PeerSettings,
    checkpoints: list[Path] = typer.Argument(
        ...,
        metavar="CHECKPOINT...",
        help="Checkpoints or run folders. If there are several, their mean is also evaluated.",
    ),
    as_json: Json = False,
) -> None:
    """Measure the perplexity of each peer's weights and of the merged model on the held-out sequences of the run."""
    from noloco_p2p.peer.run_folder import check_checkpoint_folder

    for folder in checkpoints:
        check_checkpoint_folder(folder)
    from noloco_p2p.trainer.compute import choose_device
    from noloco_p2p.trainer.evaluate import perplexity
    from noloco_p2p.trainer.merge import spec_of
    from noloco_p2p.trainer.swarm_evaluation import evaluate_each

    settings.check_names(spec_of(checkpoints[0]))
    found = evaluate_each(
        checkpoints,
        device=choose_device(settings.device),
        bindings=settings.data,
        models=settings.models,
        progress=None if as_json else Progress(print),
    )
    if as_json:
        peers = [
            {"checkpoint": str(folder), "validation_loss": loss, "perplexity": perplexity(loss)}
            for folder, loss in found.losses.items()
        ]
        merged = {"validation_loss": found.merged_loss, "perplexity": perplexity(found.merged_loss)}
        run = {"run": found.spec.name, "num_sequences": found.num_sequences}
        print_json({**run, "peers": peers, "merged": merged, "spread": found.spread})
        return
    rows = [(str(folder), loss) for folder, loss in found.losses.items()]
    if len(rows) > 1:
        rows.append((f"mean of {len(rows)} checkpoints", found.merged_loss))
    for name, loss in rows:
        print(f"{name}: validation loss {loss:.4f}, perplexity {perplexity(loss):.4g}")
    if len(found.losses) > 1:
        print(f"spread of the weights: {100 * found.spread:.2g} % of their norm")
    print(f"measured on {found.num_sequences} held-out sequences of run {found.spec.name}")


@takes_settings("models")
def export(
    source: str = typer.Argument(
        ...,
        metavar="CHECKPOINT|TICKET",
        help="A checkpoint folder or, with --merge, a ticket (or @FILE containing one).",
    ),
    folder: Path = typer.Argument(..., metavar="DIR", help="The output folder, in Hugging Face format."),
    merge: bool = typer.Option(False, "--merge", help="Average the weights of live peers."),
    adapters: bool = typer.Option(False, "--adapters", help="For a LoRA run: write only the adapters, for peft."),
    *,
    settings: PeerSettings,
    sample: int | None = typer.Option(
        None, help="With --merge: the number of peers to average.", show_default="all", min=1
    ),
    push_to_hub: str = typer.Option(
        "",
        metavar="OWNER/NAME",
        help="Upload the folder to this repository on the Hugging Face Hub. A new repository is private.",
    ),
) -> None:
    """Write a model folder for the transformers library, from a checkpoint or from the live swarm."""
    from noloco_p2p.peer.run_folder import check_checkpoint_folder
    from noloco_p2p.ticket import find

    ticket = find(source)
    if merge != bool(ticket):
        raise SettingsError(
            "--merge requires a ticket, and a ticket requires --merge; to export a checkpoint, omit --merge"
        )
    if not merge:
        check_checkpoint_folder(Path(source))
    if sample and not merge:
        raise SettingsError("--sample requires --merge")
    from noloco_p2p.trainer.export import check_export_folder, claim_repo, push
    from noloco_p2p.trainer.merge import from_checkpoint, spec_of

    check_export_folder(folder)
    if push_to_hub:
        claim_repo(push_to_hub)
    progress, folders = Progress(print), settings.models
    if ticket:
        import uvloop

        uvloop.run(_merge(ticket, folder, settings, adapters=adapters, sample=sample, progress=progress))
    else:
        settings.check_names(spec_of(Path(source)))
        with progress.task("reading the checkpoint"):
            state = from_checkpoint(Path(source), folders=folders)
        _write(state, folder, folders, adapters=adapters, progress=progress)
        print(f"wrote {folder}: the checkpoint of run {state.spec.name}")
    if push_to_hub:
        with progress.task("pushing the model"):
            address = push(folder, push_to_hub)
        print(f"pushed to {address}")


async def _merge(
    ticket: Ticket, folder: Path, settings: PeerSettings, *, adapters: bool, sample: int | None, progress: Progress
) -> None:
    from noloco_p2p.trainer.merge import live_run

    folders = settings.models
    async with live_run(ticket, progress=progress, folders=folders) as live:
        settings.check_names(live.spec)
        _check_adapters(live.spec, adapters=adapters)
        if live.spec.pipeline.stages > 1:
            await _merge_stages(live, folder, sample=sample)
            print(f"wrote {folder}: the merged stages of run {live.spec.name}")
            return
        state = await live.take(None, sample=sample)
    _write(state, folder, folders, adapters=adapters, progress=progress)
    print(f"wrote {folder}: the mean of {counted(state.num_peers, 'peer')} of run {state.spec.name}")
    for notice in state.notices:
        print(notice)


async def _merge_stages(live: LiveRun, folder: Path, *, sample: int | None) -> None:
    """Export the stages in turn, so that only one of them is in memory at a time."""
    from noloco_p2p.trainer.export import StageShards, new_folder

    live.check_stages()
    with new_folder(folder) as partial:
        shards = StageShards(partial, live.spec)
        for stage in range(live.spec.pipeline.stages):
            state = await live.take(stage, sample=sample)
            with live.progress.task(f"writing stage {stage}"):
                await asyncio.to_thread(shards.write, stage, state.by_name())
            print(f"stage {stage}: the mean of {counted(state.num_peers, 'peer')}")
            for notice in state.notices:
                print(notice)
            del state
        shards.finish(folders=live.folders)


def _write(state: TakenState, folder: Path, folders: dict[str, str], *, adapters: bool, progress: Progress) -> None:
    from noloco_p2p.trainer.export import StageShards, export_model, new_folder
    from noloco_p2p.trainer.model import build_tokenizer

    _check_adapters(state.spec, adapters=adapters)
    with progress.task("writing the model"):
        if state.model.device.type == "meta":
            with new_folder(folder) as partial:
                shards = StageShards(partial, state.spec)
                shards.write(0, state.by_name())
                shards.finish(folders=folders)
            return
        tokenizer = build_tokenizer(state.spec.data, folders=folders)
        export_model(state.fill_model(), tokenizer, folder, adapters_of=state.spec.model if adapters else None)


def _check_adapters(spec: TrainerSpec, *, adapters: bool) -> None:
    if adapters and not spec.model.lora.rank:
        raise SettingsError(
            f"--adapters: run {spec.name} has no adapters, because it trains all weights (model.lora.rank is 0)"
        )


@takes_settings("models", "state_dir")
def fork(
    source: str = typer.Argument(..., metavar="SPEC.toml|TICKET", help="The run to fork."),
    new: Path = typer.Argument(..., metavar="NEW.toml", help="Where to write the spec of the new run."),
    changes: Changes = None,
    checkpoint: Path | None = typer.Option(
        None, help="Use this checkpoint instead of the newest one.", show_default=False
    ),
    *,
    settings: PeerSettings,
) -> None:
    """Start a new run from the weights of another run, with changed settings.

    With a spec file, the fork starts from the newest checkpoint on this machine. With a ticket, it fetches the states
    of up to five live peers, and starts from the state nearest to their median. In a run with stages, this is done for
    every stage.
    """
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket

    if new.exists() or not new.absolute().parent.is_dir():
        why = "already exists" if new.exists() else f"cannot be written: there is no folder {new.absolute().parent}"
        raise SettingsError(f"{new} {why}; choose another path for the spec of the new run")
    values = parse_changes(changes)
    for key in values:
        if key.startswith("model."):
            raise SettingsError(
                f"--set {key}: the model cannot change, because a fork starts from the weights of the old run"
            )
    old = entry.opened(source)
    if isinstance(old, TrainerSpec):
        _changed(old, values)  # fail before the slow imports
    import uvloop

    from noloco_p2p.presets import render
    from noloco_p2p.trainer.start import new_start

    with new_start(settings.state_dir) as start:
        if isinstance(old, Ticket) and not checkpoint:
            old, spec = uvloop.run(_take_live(old, start, values, settings))
        else:
            old, spec = _take_kept(old, checkpoint, start, values, settings)
    new.write_text(render(spec.with_changes({"model.start": start.digest})), encoding="utf-8")
    join = f"noloco join {new}"
    if settings.origins()["state_dir"] == "flag":
        join += f" --state-dir {settings.state_dir}"
    if spec.run_key and not settings.run_key:
        join += " --run-key FILE"
    if spec.pipeline.stages > 1:
        join += " --stage 0"
    print(f"wrote {new}: run {spec.name}, which starts from the state of run {old.name}; start it with: {join}")
    if spec.pipeline.stages > 1:
        print(
            f"the first peer of each stage needs a copy of {start.folder} in the subfolder `starts` of its own "
            "--state-dir; later peers fetch the state of their stage"
        )


def _take_kept(
    old: TrainerSpec | Ticket,
    checkpoint: Path | None,
    start: NewStart,
    values: dict[str, Any],
    settings: PeerSettings,
) -> tuple[TrainerSpec, TrainerSpec]:
    """Fork from a checkpoint on this machine. Return the specs of the old and the new run."""
    from noloco_p2p.peer.run_folder import folder_of
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.trainer.merge import from_checkpoint, spec_of

    if checkpoint is None:
        assert isinstance(old, TrainerSpec), "with a ticket, the state comes from live peers"
        checkpoint = folder_of(settings.state_dir, old.run_id)
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"this machine has no checkpoint of run {old.name} in {checkpoint}; "
                "use the ticket of a live peer, another --state-dir or --checkpoint"
            )
    settings.check_names(old if isinstance(old, TrainerSpec) else spec_of(checkpoint))
    state = from_checkpoint(checkpoint, folders=settings.models)
    old = old if isinstance(old, TrainerSpec) else state.spec
    spec = _forked(old, values, settings.models)
    start.add(state.by_name())
    return old, spec


async def _take_live(
    ticket: Ticket, start: NewStart, values: dict[str, Any], settings: PeerSettings
) -> tuple[TrainerSpec, TrainerSpec]:
    """Fork from live peers, with one stage in memory at a time. Return the specs of the old and the new run."""
    from noloco_p2p.trainer.merge import COMPARED, live_run, state_in_the_middle

    async with live_run(ticket, progress=Progress(print), folders=settings.models) as live:
        settings.check_names(live.spec)
        old, spec = live.spec, _forked(live.spec, values, settings.models)  # fail before anything is fetched
        live.check_stages()
        for stage in live.stages():
            state = await live.take(stage, sample=COMPARED, judge=state_in_the_middle)
            await asyncio.to_thread(start.add, state.by_name())
            for notice in state.notices:
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
    from noloco_p2p.trainer.stage_choice import StageNeeds

    spec = _changed(old, values)
    if spec.pipeline.stages > 1 and spec.pipeline.cut == "auto":
        return StageNeeds.of(spec, spec.pipeline.stages, folders=folders).spec
    return spec
