"""Implements the command `noloco service`, which runs a peer as a service of systemd for this user."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import typer

from noloco_p2p.atomic_file import write_atomically
from noloco_p2p.cli import entry
from noloco_p2p.cli.join import check_access
from noloco_p2p.cli.options import takes_settings
from noloco_p2p.errors import NolocoError
from noloco_p2p.settings import PeerSettings, user_file
from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)

NAME = "noloco.service"
STOP_S = 150  # a large checkpoint takes time
NO_BUS = (
    "; without a session of this user (as after su, or in a container), start `noloco join` yourself, or run "
    "`loginctl enable-linger` and log in again, for example with ssh"
)
ANSWER_S = STOP_S + 30.0  # a restart waits until the peer has stopped
# Wrong settings (3) and wrong usage (2) do not get better by themselves. After `noloco leave`, the peer stays away
# until the next start of the machine.
UNIT = """\
[Unit]
Description=noloco_p2p peer

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=2 3
KillMode=mixed
TimeoutStopSec={stop_s}

[Install]
WantedBy=default.target
"""


@takes_settings("state_dir")
def service(
    settings: PeerSettings,
    run: str = typer.Argument(..., metavar="SPEC.toml|TICKET", help="As for `noloco join`."),
    only_print: bool = typer.Option(False, "--print", help="Print the unit, and change nothing."),
) -> None:
    """Run a peer as a systemd service of this user. Its settings come from the settings file.

    The service starts now and whenever this user logs in, or with this machine after `loginctl enable-linger`. Running
    the command again replaces it.
    """
    target = entry.opened(run)
    check_access(target, settings)
    unseen = [name for name, origin in settings.origins().items() if origin == "environment" and name != "state_dir"]
    if unseen:
        log.warning(
            "the service sees no NOLOCO_* variables; put these settings into %s: %s", user_file(), ", ".join(unseen)
        )
    ticket_file = settings.state_dir / "service.ticket"  # a ticket can be a secret, and command lines are public
    where = f"@{ticket_file}" if isinstance(target, Ticket) else str(Path(run).absolute())
    unit = unit_of("join", where, "--state-dir", str(settings.state_dir))
    if only_print:
        print(unit, end="")
        return
    _systemctl("show-environment")  # before anything is written
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / NAME
    for folder in (settings.state_dir, path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if isinstance(target, Ticket):
        entry.write(ticket_file, target.encode(), flag="--state-dir", is_secret=True)
    write_atomically(path, unit.encode())
    _systemctl("daemon-reload")
    _systemctl("enable", NAME)
    _systemctl("restart", NAME)
    print(
        f"wrote {path}; the peer runs as a service: `noloco status` shows it, and `journalctl --user -u noloco` its log"
    )
    print("`systemctl --user disable --now noloco` ends it; `loginctl enable-linger` keeps it running when you log out")


def unit_of(*arguments: str) -> str:
    """Return the unit that runs `noloco ARGUMENTS` with this Python."""
    words = (sys.executable, "-m", "noloco_p2p", *arguments)
    return UNIT.format(command=" ".join(map(_quoted, words)), stop_s=STOP_S)


def _quoted(word: str) -> str:
    """Quote a word for systemd, which expands % and $."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(word) & set(" \t\"'\\;") else escaped


def _systemctl(*arguments: str) -> None:
    command = ["systemctl", "--user", *arguments]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        raise NolocoError("this machine has no systemd; start `noloco join` with its own service manager") from None
    except subprocess.TimeoutExpired:
        raise NolocoError(f"`{' '.join(command)}` did not end within {ANSWER_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        fix = NO_BUS if "bus" in error.stderr else ""
        raise NolocoError(f"`{' '.join(command)}` failed: {error.stderr.strip()}{fix}") from None
