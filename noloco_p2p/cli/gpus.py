"""The launcher of `noloco join --gpus N`, which runs the same command in N processes, one per GPU. Rank 0 is the peer.

The launcher works like `torchrun` on one machine, with two differences. No rank is killed while rank 0 leaves cleanly,
and the launcher returns the exit code of rank 0.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_p2p.cli import entry
from noloco_p2p.errors import SettingsError

POLL_S = 0.1
END_S = 30.0  # how long the other ranks may take to end after the first one has ended
FAILED = 1


@dataclass(frozen=True, slots=True)
class OwnRank:
    """The rank of this process within its peer. `gpu` is the index of its GPU on this machine."""

    rank: int
    num_ranks: int
    gpu: int


def own_rank() -> OwnRank | None:
    """Return the rank of this process, or None if it is the only one.

    Raises SettingsError if torchrun started processes on several machines, because a peer runs on one machine.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(size))) != size:
        raise SettingsError(
            "torchrun --nnodes is not supported, because a peer runs on one machine; start one peer on each machine"
        )
    return OwnRank(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `noloco ARGUMENTS` in `num_ranks` processes, and return the exit code of rank 0.

    The result is 1 if rank 0 was killed by a signal or did not end in time. SIGINT, SIGTERM and SIGHUP are passed on to
    rank 0, and the other ranks end when rank 0 does. If the launcher is killed, rank 0 leaves.
    """
    from noloco_p2p.swarm.launch import with_parent

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks))}
    ranks = [
        subprocess.Popen(
            with_parent(sys.executable, "-m", "noloco_p2p", *arguments),
            env=threads | os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the launcher, which passes it on
        )
        for rank in range(num_ranks)
    ]
    entry.on_leaving(lambda signum, frame: ranks[0].send_signal(signum))
    until_s = None  # set when a rank fails or rank 0 ends
    try:
        while any(process.poll() is None for process in ranks):
            if until_s is None and (ranks[0].returncode is not None or any(process.returncode for process in ranks)):
                until_s = time.monotonic() + END_S
            if until_s is not None and time.monotonic() > until_s:
                break
            time.sleep(POLL_S)
        for rank, process in enumerate(ranks):
            if (process.returncode or 0) < 0:
                print(f"noloco: rank {rank} was terminated by signal {-process.returncode}", file=sys.stderr)
        code = ranks[0].returncode
        return code if code is not None and code >= 0 else FAILED
    finally:
        for process in ranks:
            process.kill()
            process.wait()
