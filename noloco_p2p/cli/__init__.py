"""The `noloco` command. Each verb has one file, which parses the flags, does the work and prints the result."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the `noloco` command, and exit with its exit code.

    Like Ctrl-C, SIGTERM raises KeyboardInterrupt, so that no command leaves temporary files. Some have other handlers.
    """
    from noloco_p2p.cli.app import run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))
