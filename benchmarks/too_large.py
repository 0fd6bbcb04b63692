"""Train a model that exceeds a memory limit for one process, with four processes that stay within the limit.

    python benchmarks/too_large.py [--limit-gb 3] [--json FILE]

All peers are real processes on loopback, and the kernel enforces the limit for each of them (RLIMIT_DATA, which counts
the memory that a process allocates, but not program files). The model is that of the preset `small` with bytes as its
vocabulary, in two stages of two replicas. First, a peer without stages is started under the same limit, with and
without --max-memory. Then each of the four peers takes three inner steps and does one swap. The benchmark takes about
five minutes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from harness.processes import PeerProcess, until, write_spec

from noloco_p2p.presets import PRESETS
from noloco_p2p.spec import TrainerSpec
from noloco_p2p.trainer.stage_choice import StageNeeds

PATIENCE_S = 1200.0
BESIDE_GB = (
    1.0  # of a process beyond weights, moments and slow weights, which --max-memory counts: torch, hivemind, a step
)
CHANGES: dict[str, Any] = {
    "name": "too-large",
    "data.source": "stdlib",
    "data.tokenizer": "bytes",
    "model.vocab_size": 384,
    "data.sequence_length": 64,
    "train.batch_size": 4,
    "train.total_steps": 1000,
    "train.warmup_steps": 1,
    "outer.inner_steps": 3,
    "outer.max_wait_s": 60.0,
    "evaluate.num_sequences": 2,
}


def limited(target: str | Path, folder: Path, limit_bytes: int, *flags: str) -> PeerProcess:
    peer = PeerProcess(target, folder, *flags)
    resource.prlimit(peer.process.pid, resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return peer


def alone(spec: TrainerSpec, folder: Path, limit_bytes: int, *flags: str) -> str:
    """Return what happens to a peer that tries to hold the whole model."""
    with limited(write_spec(spec, folder), folder / f"whole-{len(flags)}", limit_bytes, *flags) as peer:
        try:
            code = peer.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "it went on"
        return f"exit code {code}: {peer.text.strip().splitlines()[-1]}"


def in_stages(spec: TrainerSpec, folder: Path, limit_bytes: int, flag: str) -> list[dict[str, Any]]:
    began_s = time.monotonic()
    with ExitStack() as stack:

        def join(target: str | Path, stage: int, number: int) -> PeerProcess:
            flags = ("--stage", str(stage), "--max-memory", flag)
            peer = limited(target, folder / f"stage-{stage}-{number}", limit_bytes, *flags)
            return stack.enter_context(peer)

        peers = [join(write_spec(spec, folder), 0, 0)]
        ticket = until(lambda: ticket_of(peers[0]), what="a ticket", timeout_s=PATIENCE_S)
        peers += [join(ticket, 1, 0), join(ticket, 0, 1), join(ticket, 1, 1)]
        for peer in peers:
            until(lambda peer=peer: has_swapped(peer), what=lambda peer=peer: peer.text, timeout_s=PATIENCE_S)
        rows = [row(peer) for peer in peers]
    return [{**each, "seconds": round(time.monotonic() - began_s)} for each in rows]


def ticket_of(peer: PeerProcess) -> str:
    assert peer.process.poll() is None, peer.text
    lines = [line for line in peer.text.splitlines() if line.startswith("noloco join noloco1")]
    return lines[0].split()[-1] if lines else ""


def has_swapped(peer: PeerProcess) -> bool:
    assert peer.process.poll() is None, peer.text
    return any(event["swaps"] for event in peer.events("round"))


def row(peer: PeerProcess) -> dict[str, Any]:
    last, started = peer.events("round")[-1], peer.events("started")[0]
    memory = Path(f"/proc/{peer.process.pid}/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in memory.splitlines() if line.startswith("VmHWM"))
    return {
        "stage": started["stage"],
        "steps": last["step"],
        "swaps": last["swaps"],
        "loss": last["loss"],
        "peak_resident_gb": round(peak * 1024 / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-gb", type=float, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    limit_bytes, flag = int(args.limit_gb * 1e9), f"{args.limit_gb - BESIDE_GB:.1f}GB"
    whole = PRESETS["small"].with_changes(CHANGES, origin="benchmark")
    staged = StageNeeds.of(whole, 2).spec
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {
            "limit_gb": args.limit_gb,
            "cores": psutil.cpu_count(),
            "whole, told its limit": alone(whole, Path(folder), limit_bytes, "--max-memory", flag),
            "whole, not told": alone(whole, Path(folder), limit_bytes),
        }
        print(f"each process may allocate {args.limit_gb:g} GB")
        for case in ("whole, told its limit", "whole, not told"):
            print(f"{case}: {report[case]}", flush=True)
        report["stages"] = in_stages(staged, Path(folder), limit_bytes, flag)
    for each in report["stages"]:
        loss = "-" if each["loss"] is None else f"{each['loss']:.3f}"
        print(
            f"stage {each['stage']}: {each['steps']} inner steps, {each['swaps']} swaps, loss {loss}, at most "
            f"{each['peak_resident_gb']:.2f} GB resident"
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
