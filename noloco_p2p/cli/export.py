"""noloco export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noloco_p2p.cli.options import Model
from noloco_p2p.errors import SettingsError


def export(
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|TICKET", help="A checkpoint folder; a ticket with --merge.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The Hugging Face folder to write.")],
    merge: Annotated[bool, typer.Option("--merge", help="Average the slow weights of live peers.")] = False,
    adapters: Annotated[bool, typer.Option("--adapters", help="LoRA: write the adapters alone, for peft.")] = False,
    model: Model = None,
    sample: Annotated[
        int | None, typer.Option(help="With --merge: of so many peers.", show_default="all", min=1)
    ] = None,
) -> None:
    """Write a model folder for transformers, from a checkpoint or from the live swarm."""
    from noloco_p2p.peer.kept import check_checkpoint_folder
    from noloco_p2p.settings import PeerSettings, parse_folders
    from noloco_p2p.ticket import Ticket, is_ticket

    if merge != is_ticket(source):
        raise SettingsError("--merge goes with a ticket, and a ticket with --merge; a checkpoint is a folder")
    if not merge:
        check_checkpoint_folder(Path(source))
    if sample and not merge:
        raise SettingsError("--sample goes with --merge")
    folders = PeerSettings.load({"models": parse_folders(model) if model else None}).models
    import uvloop

    from noloco_p2p.telemetry.bars import drawing
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.trainer.export import check_export_folder, export_model
    from noloco_p2p.trainer.merge import from_checkpoint, mean_of_swarm
    from noloco_p2p.trainer.model import build_tokenizer

    check_export_folder(folder)
    progress = Progress(drawing(print))
    if merge:
        state = uvloop.run(mean_of_swarm(Ticket.decode(source), sample=sample, progress=progress, folders=folders))
    else:
        with progress.task("reading the checkpoint"):
            state = from_checkpoint(Path(source), folders=folders)
    if adapters and not state.spec.model.lora.rank:
        raise SettingsError(f"--adapters: the run {state.spec.name} trains all weights (model.lora.rank is 0)")
    with progress.task("writing the model"):
        tokenizer = build_tokenizer(state.spec.data, folders=folders)
        export_model(state.fill_model(), tokenizer, folder, adapters_of=state.spec.model if adapters else None)
    of = f"the mean of {state.num_peers} peers" if merge else "the checkpoint"
    print(f"wrote {folder}: {of} of run {state.spec.name}")
    for notice in state.notices():
        print(notice)
    if state.num_silent:
        print(f"{state.num_silent} more gave no state: a peer has one after its first round; try again in a minute")
