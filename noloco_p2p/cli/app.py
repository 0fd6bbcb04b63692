"""The table of verbs, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click
import typer

from noloco_p2p._version import __version__
from noloco_p2p.cli import bootstrap, demo, export, fork, identity, init, join, leave, monitor, status
from noloco_p2p.errors import (
    DirectoryError,
    IdentityError,
    NolocoError,
    PeerError,
    SettingsError,
    SpecError,
    TicketError,
)

EXIT_FAILED, EXIT_USAGE, EXIT_INVALID, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    help="Train one model together over the internet: no data centre, no master, no all-reduce.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    *(init.init, join.join, leave.leave, status.status, monitor.monitor),
    *(bootstrap.bootstrap, fork.fork, export.export, demo.demo),
):
    app.command()(verb)
app.command(name="id")(identity.identity)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    verbose: int = typer.Option(0, "--verbose", "-v", count=True, help="Say more; twice for everything."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Warnings and errors only."),
) -> None:
    if version:
        print(f"noloco_p2p {__version__}")
        raise typer.Exit
    level = logging.WARNING if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    configure_logging(level)


def configure_logging(level: int) -> None:
    """Logs go to standard error; those of other libraries only with -vv."""
    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr, level=logging.WARNING, force=True)
    logging.getLogger("noloco_p2p").setLevel(level)
    if level == logging.DEBUG:
        logging.getLogger().setLevel(logging.INFO)


def run(arguments: list[str]) -> int:
    """The exit code: 0 done, 1 failed, 2 usage, 3 spec or settings invalid, 4 network unreachable, 130 interrupted."""
    try:
        result: Any = app(arguments, standalone_mode=False)
    except (SpecError, SettingsError, TicketError, IdentityError) as error:
        return _complain(error, EXIT_INVALID)
    except (PeerError, DirectoryError) as error:
        return _complain(error, EXIT_UNREACHABLE)
    except NolocoError as error:
        return _complain(error, EXIT_FAILED)
    except (KeyboardInterrupt, click.exceptions.Abort):
        return EXIT_INTERRUPTED
    except click.exceptions.ClickException as error:
        error.show()
        return EXIT_USAGE
    except BrokenPipeError:  # whoever read our output has gone, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _complain(error: NolocoError, code: int) -> int:
    print(f"noloco: {error}", file=sys.stderr)
    return code
