"""Implements the commands that check this machine: `noloco doctor` and `noloco data check`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from noloco_p2p.cli import entry
from noloco_p2p.cli.options import Json, print_json, takes_settings
from noloco_p2p.settings import PeerSettings
from noloco_p2p.telemetry.console import count, counted
from noloco_p2p.telemetry.progress import Progress

if TYPE_CHECKING:
    from noloco_p2p.data.check import DataReport
    from noloco_p2p.doctor import Check
    from noloco_p2p.spec import TrainerSpec
    from noloco_p2p.ticket import Ticket

SHOWN_FAULTS = 20
SHOWN_CHARS = 300


@takes_settings("listen", "announce", "max_upload", "max_download", "state_dir", "data", "models", "run_key")
def doctor(
    run: str | None = typer.Argument(
        None,
        metavar="[SPEC.toml|TICKET]",
        help="Check whether this machine can take part in this run. With a ticket (or @FILE containing one), "
        "also check the swarm.",
    ),
    *,
    settings: PeerSettings,
    as_json: Json = False,
) -> None:
    """Check this machine and its connection to a run. The exit code is 1 if a problem would prevent training."""
    from noloco_p2p.ticket import Ticket

    examined = entry.opened(run) if run else None
    import uvloop

    checks: list[Check] = []

    async def examine() -> None:
        async for check in _examine(examined, settings):
            checks.append(check)
            if not as_json:
                print("\n".join(check.lines()), flush=True)

    uvloop.run(examine())
    levels = Counter(check.level for check in checks)
    if as_json:
        print_json({"healthy": not levels["failed"], "checks": [asdict(check) for check in checks]})
    else:
        warnings = f" ({counted(levels['warning'], 'warning')})" if levels["warning"] else ""
        problems = counted(levels["failed"], "problem")
        print(
            f"{problems} would prevent training; see the advice next to the arrows above"
            if levels["failed"]
            else f"found nothing that would prevent training{warnings}"
        )
        if not isinstance(examined, Ticket):
            needs = "" if examined else ", and what the model needs"
            print(f"to also check the clock, reachability and bandwidth{needs}, run: noloco doctor TICKET")
    if levels["failed"]:
        raise typer.Exit(1)


async def _examine(run: TrainerSpec | Ticket | None, settings: PeerSettings) -> AsyncIterator[Check]:
    from noloco_p2p.doctor import versions
    from noloco_p2p.ticket import Ticket

    yield (installed := versions())
    if installed.level == "failed":
        return  # the other checks import the missing packages
    from noloco_p2p.doctor import machine

    yield machine.ports(settings)
    for check in (machine.disk(settings), machine.memory(), machine.accelerator(), machine.codec_speed()):
        yield check
    yield await machine.p2pd()
    if run:
        from noloco_p2p.doctor.swarm import bound, examine, invited, model

        if isinstance(run, Ticket):
            async for found in examine(run, settings):
                yield found
        else:
            for found in (*invited(run, settings), *bound(run, settings), *model(run, settings)):
                yield found


data = typer.Typer(help="Check the data of a run on this machine.", no_args_is_help=True, rich_markup_mode=None)


@data.callback()
def _data() -> None:
    """Without a callback, Typer would drop the name `check`."""


@data.command()
@takes_settings("data", "models")
def check(
    settings: PeerSettings,
    file: Path = typer.Argument(..., metavar="SPEC.toml", help="The run spec."),
    full: bool = typer.Option(False, "--full", help="Read all rows of every file, not only the first rows."),
    as_json: Json = False,
) -> None:
    """Show samples of the data, the reading speed, and faults in the files. The exit code is 1 if there are faults."""
    from noloco_p2p.spec import TrainerSpec

    spec = TrainerSpec.load(file)
    settings.check_names(spec)
    from noloco_p2p.data.check import check_data
    from noloco_p2p.data.stream import Corpus
    from noloco_p2p.trainer.model import build_tokenizer

    logging.getLogger("noloco_p2p.data.documents").setLevel(logging.ERROR)  # the report lists the faults
    tokenizer, progress = build_tokenizer(spec.data, folders=settings.models), Progress(None if as_json else print)
    corpus = Corpus(spec.data, tokenizer, settings.data, progress)
    report = check_data(corpus, num_sequences=spec.evaluate.num_sequences, full=full)
    if as_json:
        print_json(asdict(report))
    else:
        _tell(report)
    if report.num_faults:
        raise typer.Exit(1)


def _tell(report: DataReport) -> None:
    for source in report.sources:
        looked = "" if source.num_looked_at == source.num_files else f" ({source.num_looked_at} examined)"
        print(
            f"{source.name}: {counted(source.num_files, 'file')}{looked}, {count(source.num_documents)} documents "
            f"in the {count(source.num_rows)} rows that were read"
        )
    for number, sample in enumerate(report.samples, start=1):
        print(f"sample {number}: {sample[:SHOWN_CHARS]!r}")
    if report.marked:
        print("a chat; the loss counts only what follows +:")
        for is_learned, text in report.marked:
            print(f"  {'+' if is_learned else '-'} {text[:SHOWN_CHARS]!r}")
        print(f"the loss counts {report.num_learned / report.num_tokens:.0%} of the tokens of a sequence")
        print(f"chats longer than data.sequence_length, which are truncated: {report.num_truncated or 'none'}")
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
