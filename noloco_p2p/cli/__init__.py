"""The `noloco` command.

Each subcommand has its own file, which parses the arguments, imports and calls what it needs, and prints the result.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `noloco` command, and exit with its exit code."""
    from noloco_p2p.cli.app import run

    sys.exit(run(sys.argv[1:]))
