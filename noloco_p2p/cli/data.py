"""Implements the command `noloco data check`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from noloco_p2p.cli.options import Json, print_json, takes_settings
from noloco_p2p.settings import PeerSettings

if TYPE_CHECKING:
    from noloco_p2p.data.check import DataReport

SHOWN_FAULTS = 20
SHOWN_CHARS = 300

app = typer.Typer(help="Check the data of a run on this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _data() -> None:
    """Without a callback, Typer would drop the name `check`."""


@app.command()
@takes_settings("data", "models")
def check(
    file: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The run spec.")],
    settings: PeerSettings,
    full: Annotated[bool, typer.Option("--full", help="Read all rows of every file, not only the first rows.")] = False,
    as_json: Json = False,
) -> None:
    """Show samples of the data, the reading speed, and faults in the files. The exit code is 1 if there are faults."""
    from noloco_p2p.spec import TrainerSpec

    spec = TrainerSpec.load(file)
    from noloco_p2p.data.check import check_data
    from noloco_p2p.telemetry.progress import Progress
    from noloco_p2p.trainer.model import build_tokenizer

    logging.getLogger("noloco_p2p.data.documents").setLevel(logging.ERROR)  # the report lists the faults
    report = check_data(
        spec.data,
        tokenizer=build_tokenizer(spec.data, folders=settings.models),
        bindings=settings.data,
        num_sequences=spec.evaluate.num_sequences,
        full=full,
        progress=None if as_json else Progress(print),
    )
    if as_json:
        print_json(asdict(report))
    else:
        _tell(report)
    if report.num_faults:
        raise typer.Exit(1)


def _tell(report: DataReport) -> None:
    from noloco_p2p.telemetry.console import count, counted

    for source in report.sources:
        looked = "" if source.num_looked_at == source.num_files else f" ({source.num_looked_at} examined)"
        print(
            f"{source.name}: {counted(source.num_files, 'file')}{looked}, {count(source.num_documents)} documents "
            f"in the {count(source.num_rows)} rows that were read"
        )
    for number, sample in enumerate(report.samples, start=1):
        print(f"sample {number}: {sample[:SHOWN_CHARS]!r}")
    print(
        f"this machine reads and packs {count(report.tokens_per_s)} tokens/s "
        f"(measured on {count(report.num_tokens)} tokens)"
    )
    print(f"held out: {report.num_held_out} sequences")
    print(f"faults: {report.num_faults or 'none'}")
    for fault in report.faults[:SHOWN_FAULTS]:
        print(f"  {fault}")
    if report.num_faults > SHOWN_FAULTS:
        print(f"  and {report.num_faults - SHOWN_FAULTS} more; --json lists the first {len(report.faults)}")
