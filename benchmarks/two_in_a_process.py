"""Let two peers of one process swap over gRPC and TLS, so many times in a row: no connection may be corrupted.

    python benchmarks/two_in_a_process.py [--runs 60] [--one-block] [--json FILE]

Each peer has its own network thread. In each run, two new peers enter, and train a model of 2M weights in turn until
both have taken part in a number of swaps. A run is bad if a swap fails, a connection breaks or is refused, or a peer
cannot announce itself. With --one-block, the connections of all peers are copied through one buffer of the process.
That was a fault once, and shows that this measurement would find it.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from claims import Claim, show
from torch import nn

from noloco_p2p import NoLoCo, Peer, PeerSettings, RunSpec, tcp

SPEC = RunSpec(name="two").with_changes({"codec.weights": "int8"})
NUM_SWAPS, PATIENCE_S = 30, 60.0
BROKEN = re.compile(r"has ended: |DECRYPT|TSI_|could not connect|failed|invalid data|to announce itself")
# A peer that looks whether it can be dialled closes its connection before the handshake, and of two offers that cross,
# the one of the lower peer id is withdrawn. If its connection breaks instead, the peer that has made it says so, too.
USUAL = re.compile(r"UNEXPECTED_EOF|an offer from .* failed")


class Faults(logging.Handler):
    """Collects what the log says about broken connections, and nothing else."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if BROKEN.search(sentence := record.getMessage()) and not USUAL.search(sentence):
            self.found.append(sentence)


def joined(target: RunSpec | str, folder: Path) -> Peer:
    return Peer.join(target, PeerSettings(state_dir=folder, listen="127.0.0.1:0"))


def training(peer: Peer) -> tuple[NoLoCo, Callable[[], None]]:
    """Return the outer optimizer of a peer, and a function that takes an inner step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 1024)).square().mean().backward()
        optimizer.step()

    return NoLoCo(model, optimizer, peer), step


def swaps_of_two_peers(folder: Path, faults: Faults) -> tuple[int, list[str]]:
    """Run two peers, and return the number of their swaps and what has failed."""
    faults.found = []
    with joined(SPEC, folder / "a") as a:
        outer, step_a = training(a)
        step_a()
        outer.save()
        with joined(a.ticket, folder / "b") as b:
            _, step_b = training(b)
            until_s = time.monotonic() + PATIENCE_S
            while min(a.metrics.swaps, b.metrics.swaps) < NUM_SWAPS and time.monotonic() < until_s:
                step_a()
                step_b()
                for peer in (a, b):
                    peer.count_traffic()
            wrong = list(faults.found)  # the end of the other peer may break the last swap
            for peer in (a, b):
                wrong += [f"{number} swaps failed: {kind}" for kind, number in peer.metrics.failed.items() if number]
            swaps = min(a.metrics.swaps, b.metrics.swaps)
    return swaps, wrong + [f"only {swaps} swaps in {PATIENCE_S:.0f} s"] * (swaps < NUM_SWAPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--one-block", action="store_true", help="put the fault back")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the claims as JSON")
    args = parser.parse_args()
    faults = Faults()
    log = logging.getLogger("noloco_p2p")
    log.addHandler(faults)
    log.setLevel(logging.DEBUG)
    if args.one_block:
        tcp._block = SimpleNamespace(view=memoryview(bytearray(tcp.BLOCK_BYTES)))  # pyright: ignore[reportAttributeAccessIssue]
    bad = swaps = 0
    for run in range(1, args.runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            num_swaps, wrong = swaps_of_two_peers(Path(folder), faults)
        bad, swaps = bad + bool(wrong), swaps + num_swaps
        print(
            f"{run:3d}  {time.monotonic() - began_s:5.1f} s  {num_swaps:3d} swaps  {wrong[0] if wrong else 'ok'}",
            flush=True,
        )
    target, met = ("", None) if args.one_block else ("0", not bad)
    claims = [Claim("bad runs", bad, f"of {args.runs}", target, met), Claim("swaps of each peer", swaps, "swaps")]
    show(claims, args.json)


if __name__ == "__main__":
    main()
