"""noloco fork"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noloco_p2p.cli.options import Changes, parse_changes, takes_settings
from noloco_p2p.errors import CheckpointError, SettingsError
from noloco_p2p.settings import PeerSettings


@takes_settings("models", "state_dir")
def fork(
    source: Annotated[str, typer.Argument(metavar="SPEC.toml|TICKET", help="The run to fork.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.toml", help="Where to write the spec of the new run.")],
    changes: Changes = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Take this checkpoint instead of the newest.", show_default=False)
    ] = None,
    *,
    settings: PeerSettings,
) -> None:
    """Start a new run from where another one stands, with changed settings.

    A spec file takes the newest checkpoint on this machine, a ticket the state of a live peer: the middle one of five.
    """
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket, is_ticket

    if new.exists() or not new.absolute().parent.is_dir():
        why = "exists" if new.exists() else f"cannot be written: there is no folder {new.absolute().parent}"
        raise SettingsError(f"{new} {why}; choose another name for the spec of the new run")
    values = parse_changes(changes)
    for key in values:
        if key.startswith("model."):
            raise SettingsError(f"--set {key}: a fork keeps the model of the run, as it starts from its weights")
    folder, folders = settings.state_dir, settings.models
    entry = Ticket.decode(source) if is_ticket(source) else TrainerSpec.load(source)
    if isinstance(entry, TrainerSpec):
        entry.with_changes(values, origin="--set")  # a wrong value is told before seconds of imports
    import uvloop

    from noloco_p2p.peer.run_folder import folder_of
    from noloco_p2p.presets import render
    from noloco_p2p.telemetry.bars import drawing
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.trainer.merge import from_checkpoint, state_from_swarm
    from noloco_p2p.trainer.start import save_start

    if checkpoint:
        state = from_checkpoint(checkpoint, folders=folders)
    elif isinstance(entry, Ticket):
        state = uvloop.run(state_from_swarm(entry, progress=Progress(drawing(print)), folders=folders))
    else:
        run_folder = folder_of(folder, entry.run_id)
        if not run_folder.is_dir():
            raise CheckpointError(
                f"this machine has no checkpoint of the run {entry.name} in {run_folder}; "
                "fork with a ticket of a live peer, or name another --state-dir or --checkpoint"
            )
        state = from_checkpoint(run_folder, folders=folders)
    old = entry if isinstance(entry, TrainerSpec) else state.spec
    values = {"name": f"{old.name}-fork", **values}
    old.with_changes(values, origin="--set")  # a wrong value is told before the state is written
    spec = old.with_changes({**values, "model.start": save_start(state.slow_weights, state_dir=folder)})
    new.write_text(render(spec), encoding="utf-8")
    for notice in state.notices():
        print(notice)
    join = f"noloco join {new}" + (f" --state-dir {folder}" if settings.origins()["state_dir"] == "flag" else "")
    print(f"wrote {new}: run {spec.name}, from the state of {old.name}; start it with: {join}")
