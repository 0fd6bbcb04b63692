"""Check that a pipeline of real processes continues while one of its peers is killed every minute.

    python benchmarks/stage_kills.py [--quick] [--json FILE]

Six `noloco join` processes run on loopback, two for each of three stages. Every minute, a random one is killed with
SIGKILL, and joins again at once with its own state folder. A peer stalls if it closes no inner step for more than a
minute. Only the time from the first step of a process until it is killed counts.

This takes twelve minutes, or four minutes with --quick.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from claims import Claim, run
from harness.processes import PeerProcess, small_spec, until, write_spec

from noloco_p2p.control import ask

NUM_STAGES, NUM_REPLICAS = 3, 2
EVERY_S, STALL_S, START_S, SAMPLE_S = 60.0, 60.0, 180.0, 0.5
SPEC = small_spec(
    "stage-kills",
    model__num_layers=NUM_STAGES,
    model__parameter_seeds=True,
    pipeline__stages=NUM_STAGES,
    pipeline__cut=[1] * NUM_STAGES,
    outer__inner_steps=10,
)


@dataclass
class Peer:
    """A state folder and its successive processes. `gaps_s` has the times between observed steps of all processes."""

    process: PeerProcess
    step: int = -1  # the last observed step; -1 = none of this process
    since_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)  # from a start after a kill to the first step

    def look(self, now_s: float) -> None:
        answer = ask(self.process.folder, "status", timeout_s=5.0)
        step = answer["step"] if answer and answer["state"] == "training" else -1
        if step < 0 or step == self.step:
            return
        if self.step >= 0:
            self.gaps_s.append(now_s - self.since_s)
        elif self.gaps_s:
            self.back_s.append(now_s - self.since_s)
        self.step, self.since_s = step, now_s

    def open_gap_s(self, now_s: float) -> float:
        return now_s - self.since_s if self.step >= 0 else 0.0


class Swarm:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        names = [(stage, replica) for stage in range(NUM_STAGES) for replica in range(NUM_REPLICAS)]
        target: str | Path = write_spec(SPEC, folder)
        self.peers: list[Peer] = []
        for stage, replica in names:
            process = self._join(target, folder / f"{stage}-{replica}", "--stage", str(stage))
            self.peers.append(Peer(process))
            target = self.peers[0].process.ticket

    def kill(self, victim: Peer, now_s: float) -> None:
        victim.gaps_s.append(victim.open_gap_s(now_s))
        ticket = next(peer.process.ticket for peer in self.peers if peer is not victim)
        victim.process.send(signal.SIGKILL)
        victim.process.wait()
        victim.process = self._join(ticket, victim.process.folder)
        victim.step, victim.since_s = -1, now_s

    def watch(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for peer in self.peers:
                peer.look(time.monotonic())
            time.sleep(SAMPLE_S)

    def _join(self, target: str | Path, folder: Path, *flags: str) -> PeerProcess:
        return self._stack.enter_context(PeerProcess(target, folder, "--save-every-rounds", "1", *flags))


def measure(quick: bool) -> list[Claim]:
    rng, num_kills = random.Random(0), 3 if quick else 10
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        swarm = Swarm(Path(folder), stack)

        def all_train() -> bool:
            swarm.watch(1.0)
            return all(peer.step > 0 for peer in swarm.peers)

        until(all_train, timeout_s=START_S, what="an inner step of every peer")
        for _ in range(num_kills):
            swarm.watch(EVERY_S / 2)
            swarm.kill(rng.choice(swarm.peers), time.monotonic())
            swarm.watch(EVERY_S / 2)
        swarm.watch(EVERY_S / 2)
        now_s = time.monotonic()
        gaps = [gap for peer in swarm.peers for gap in (*peer.gaps_s, peer.open_gap_s(now_s))]
        back = [seconds for peer in swarm.peers for seconds in peer.back_s]
        ended = [peer for peer in swarm.peers if peer.process.process.poll() is not None]
        tracebacks = [peer for peer in swarm.peers if "Traceback" in peer.process.text]
        away = [peer for peer in swarm.peers if peer.step < 0]
    return [
        Claim("kills", num_kills, f"in {num_kills * EVERY_S:.0f} s"),
        Claim("the longest time without an inner step", max(gaps), "s", f"< {STALL_S:.0f}", max(gaps) < STALL_S),
        Claim("the same, 99th percentile of all gaps", sorted(gaps)[int(0.99 * len(gaps))], "s"),
        Claim("the same, median", median(gaps), "s"),
        Claim("from the start of a new process to its first step, longest", max(back), "s"),
        Claim("peers that had not come back", len(away), "peers", "0", not away),
        Claim("peers that ended by themselves", len(ended), "peers", "0", not ended),
        Claim("peers with a traceback in their log", len(tracebacks), "peers", "0", not tracebacks),
    ]


if __name__ == "__main__":
    run(measure, doc=__doc__)
