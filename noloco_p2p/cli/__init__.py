"""The `noloco` command. Each verb has one file, which parses the flags, does the work and prints the result."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the `noloco` command, and exit with its exit code."""
    from noloco_p2p.cli.app import run

    sys.exit(run(sys.argv[1:]))
