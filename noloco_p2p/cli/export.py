"""Implements the command `noloco export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli.options import takes_settings
from noloco_p2p.errors import SettingsError
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.ticket import Ticket
    from noloco_p2p.trainer.merge import LiveRun, TakenState


@takes_settings("models")
def export(
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|TICKET", help="A checkpoint folder or, with --merge, a ticket.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The output folder, in Hugging Face format.")],
    merge: Annotated[bool, typer.Option("--merge", help="Average the weights of live peers.")] = False,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="For a LoRA run: write only the adapters, for peft.")
    ] = False,
    *,
    settings: PeerSettings,
    sample: Annotated[
        int | None, typer.Option(help="With --merge: the number of peers to average.", show_default="all", min=1)
    ] = None,
    push_to_hub: Annotated[
        str,
        typer.Option(
            metavar="OWNER/NAME",
            help="Upload the folder to this repository on the Hugging Face Hub. A new repository is private.",
        ),
    ] = "",
) -> None:
    """Write a model folder for the transformers library, from a checkpoint or from the live swarm."""
    from noloco_p2p.peer.run_folder import check_checkpoint_folder
    from noloco_p2p.ticket import Ticket, is_ticket

    if merge != is_ticket(source):
        raise SettingsError(
            "--merge requires a ticket, and a ticket requires --merge; to export a checkpoint, omit --merge"
        )
    if not merge:
        check_checkpoint_folder(Path(source))
    if sample and not merge:
        raise SettingsError("--sample requires --merge")
    folders = settings.models
    from noloco_p2p.telemetry.bars import drawing
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.trainer.export import check_export_folder
    from noloco_p2p.trainer.merge import from_checkpoint

    check_export_folder(folder)
    if push_to_hub:
        from noloco_p2p.trainer.push import claim

        claim(push_to_hub)
    progress = Progress(drawing(print))
    if merge:
        import uvloop

        uvloop.run(_merge(Ticket.decode(source), folder, folders, adapters=adapters, sample=sample, progress=progress))
    else:
        with progress.task("reading the checkpoint"):
            state = from_checkpoint(Path(source), folders=folders)
        _write(state, folder, folders, adapters=adapters, progress=progress)
        print(f"wrote {folder}: the checkpoint of run {state.spec.name}")
    if push_to_hub:
        from noloco_p2p.trainer.push import push

        with progress.task("pushing the model"):
            address = push(folder, push_to_hub)
        print(f"pushed to {address}")


async def _merge(
    ticket: Ticket, folder: Path, folders: dict[str, str], *, adapters: bool, sample: int | None, progress: Progress
) -> None:
    from noloco_p2p.trainer.merge import live_run

    async with live_run(ticket, progress=progress, folders=folders) as live:
        _check_adapters(live.spec, adapters=adapters)
        if live.spec.pipeline.stages > 1:
            await _merge_stages(live, folder, sample=sample)
            return
        state = await live.take(None, sample=sample)
    _write(state, folder, folders, adapters=adapters, progress=progress)
    print(f"wrote {folder}: {_mean(state)} of run {state.spec.name}")
    _tell(state)


async def _merge_stages(live: LiveRun, folder: Path, *, sample: int | None) -> None:
    """Export the stages in turn, so that only one of them is in memory at a time."""
    import asyncio

    from noloco_p2p.trainer.export import StageShards, new_folder

    live.check_stages()
    with new_folder(folder) as partial:
        shards = StageShards(partial, live.spec)
        for stage in range(live.spec.pipeline.stages):
            state = await live.take(stage, sample=sample)
            with live.progress.task(f"writing stage {stage}"):
                await asyncio.to_thread(shards.write, stage, state.by_name())
            print(f"stage {stage}: {_mean(state)}")
            _tell(state)
            del state
        shards.finish(folders=live.folders)
    print(f"wrote {folder}: the merged stages of run {live.spec.name}")


def _write(state: TakenState, folder: Path, folders: dict[str, str], *, adapters: bool, progress: Progress) -> None:
    from noloco_p2p.trainer.export import export_model
    from noloco_p2p.trainer.model import build_tokenizer

    _check_adapters(state.spec, adapters=adapters)
    with progress.task("writing the model"):
        tokenizer = build_tokenizer(state.spec.data, folders=folders)
        export_model(state.fill_model(), tokenizer, folder, adapters_of=state.spec.model if adapters else None)


def _check_adapters(spec: TrainerSpec, *, adapters: bool) -> None:
    if adapters and not spec.model.lora.rank:
        raise SettingsError(
            f"--adapters: run {spec.name} has no adapters, because it trains all weights (model.lora.rank is 0)"
        )


def _mean(state: TakenState) -> str:
    from noloco_p2p.telemetry.console import counted

    return f"the mean of {counted(state.num_peers, 'peer')}"


def _tell(state: TakenState) -> None:
    for notice in state.notices():
        print(notice)
    if state.num_silent:
        print(
            f"peers that have no state yet: {state.num_silent} (a peer has a state seconds after it begins to train; "
            "try again in a minute)"
        )
