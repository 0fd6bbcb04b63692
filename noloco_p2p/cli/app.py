"""Registers the commands, and turns every error into a message and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import typer

from noloco_p2p._version import __version__
from noloco_p2p.cli import checks, demo, join, local, model, monitor, runs, service, simulate
from noloco_p2p.cli.options import Grouped
from noloco_p2p.errors import IdentityError, NolocoError, PeerError, SettingsError, SpecError, TicketError, printable
from noloco_p2p.telemetry.console import PrintableStream

EXIT_FAILED, EXIT_INVALID, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 3, 4, 130

VERBOSITY = {"-v", "-vv", "-q", "--verbose", "--quiet"}  # allowed before or after the verb

app = typer.Typer(
    help="Train one model together over the internet, without a data centre, a coordinator or all-reduce.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    *(runs.init, join.join, local.leave, local.pause, local.resume, local.status, runs.ticket, monitor.monitor),
    *(checks.doctor, runs.bootstrap, service.service, model.fork, model.evaluate, model.export),
    *(demo.demo, simulate.simulate, local.ban),
):
    app.command(cls=Grouped if verb is join.join else None)(verb)
app.add_typer(checks.data, name="data")
app.command(name="id")(local.identity)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    verbose: int = typer.Option(0, "--verbose", "-v", count=True, help="Log more. Repeat it (-vv) to log everything."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Log warnings and errors only."),
) -> None:
    if version:
        print(f"noloco_p2p {__version__}")
        raise typer.Exit
    level = logging.WARNING if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    configure_logging(level)


def configure_logging(level: int) -> None:
    """Send logs to standard error. Other libraries log only with -vv."""
    handler = _StandardError()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("noloco_p2p").setLevel(level)
    if level == logging.DEBUG:
        logging.getLogger().setLevel(logging.INFO)


class _StandardError(logging.StreamHandler):
    """A handler that writes to the current `sys.stderr`, which is replaced while a progress bar is shown.

    Messages may quote what a stranger wrote, and rich would pass its escapes on to the terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code.

    The exit codes are 0 (success), 1 (failure), 2 (wrong usage), 3 (invalid spec or settings), 4 (network unreachable)
    and 130 (interrupted). Typer itself reports wrong usage, and exits with 130 on Ctrl-C and with 1 on a closed pipe.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the caller has closed it, as `noloco join ... >&-` does
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - until the process ends
    sys.stdout, sys.stderr = PrintableStream.around(sys.stdout), PrintableStream.around(sys.stderr)
    everywhere = [argument for argument in arguments if argument in VERBOSITY]
    rest = [argument for argument in arguments if argument not in VERBOSITY]
    try:
        app([*everywhere, *rest], prog_name="noloco")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except NolocoError as error:
        print(f"noloco: {error}", file=sys.stderr)
        if isinstance(error, (SpecError, SettingsError, TicketError, IdentityError)):
            return EXIT_INVALID
        return EXIT_UNREACHABLE if isinstance(error, PeerError) else EXIT_FAILED
    except KeyboardInterrupt:  # Ctrl-C that Typer does not catch
        return EXIT_INTERRUPTED
    return 0
