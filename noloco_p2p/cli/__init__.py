"""The `noloco` command: one file a verb. A verb parses, imports what it needs, calls it, and prints."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `noloco` script."""
    from noloco_p2p.cli.app import run

    sys.exit(run(sys.argv[1:]))
