"""Real processes that are killed or frozen: the others train without a pause, and keep swapping with each other.

All tests of this file share one swarm: a (the first peer, whose ticket the others used), b, and c. They depend on their
order, as a machine with two cores cannot start a swarm for each.
"""

from __future__ import annotations

import random
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.processes import PeerProcess, small_spec, until, write_spec

from noloco_p2p.outer.checkpoint import Checkpoints

SEED = 2506_10911
BLOCKED_S = 1.0  # longest time that a fault may block training; each deadline of a swap is longer
SLACK_S = 6.0  # for a busy machine; that of a slow one is measured
SPEC = small_spec("chaos")
OFTEN = ("--save-every-s", "2")


@dataclass(frozen=True)
class Swarm:
    a: PeerProcess
    b: PeerProcess
    c: PeerProcess


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("chaos")
    with PeerProcess(write_spec(SPEC, folder), folder / "a", *OFTEN) as a:
        ticket = a.ticket
        with PeerProcess(ticket, folder / "b", *OFTEN) as b, PeerProcess(ticket, folder / "c", *OFTEN) as c:
            a.swap_with(b)
            a.swap_with(c)
            until(lambda: len(c.events("saved")) > 1, what="checkpoints of c")
            yield Swarm(a, b, c)


def assert_trains_on(peer: PeerProcess) -> None:
    """Check that a peer takes a hundred more steps, and that swaps block them for hardly any time."""
    before = peer.report_where(lambda event: True)
    after = peer.report_where(lambda event: event["step"] > before["step"] + 100)
    took_s = after["time_s"] - before["time_s"]
    assert after["blocked_s"] - before["blocked_s"] < max(BLOCKED_S, took_s / 4)
    assert "Traceback" not in peer.text


def test_a_partner_killed_in_the_middle_of_a_swap_is_hardly_noticed(swarm: Swarm) -> None:
    """The DHT lists the dead peer for another minute."""
    time.sleep(random.Random(SEED).uniform(0.0, 0.5))  # a random moment of a swap, the same in every run
    swarm.c.send(signal.SIGKILL)
    assert swarm.c.wait() == -signal.SIGKILL
    swarm.a.swap_with(swarm.b)
    swarm.b.swap_with(swarm.a)
    for peer in (swarm.a, swarm.b):
        assert_trains_on(peer)
    swaps = swarm.a.report_where(lambda event: True)["swaps"]
    last = swarm.a.report_where(lambda event: event["swaps"] > swaps + 3)
    assert last["last_partner"] == swarm.b.peer_id


def test_a_killed_p2pd_is_started_again_and_training_does_not_notice(swarm: Swarm) -> None:
    old = swarm.b.p2pd()
    old.kill()
    swarm.b.wait_for("p2pd has stopped (signal 9); restarting it")
    new = until(swarm.b.find_p2pd, what="another p2pd")
    assert new.pid != old.pid
    assert_trains_on(swarm.b)
    swarm.b.swap_with(swarm.a)


def test_a_frozen_peer_holds_nobody_up(swarm: Swarm) -> None:
    """The kernel of a peer that SIGSTOP has frozen still acknowledges packets, so other peers do not notice."""
    swarm.b.send(signal.SIGSTOP)
    try:
        assert_trains_on(swarm.a)
    finally:
        swarm.b.send(signal.SIGCONT)
    swarm.a.swap_with(swarm.b)


def test_a_full_disk_is_told_and_the_last_good_checkpoint_stays(swarm: Swarm) -> None:
    """A limit on the file size stands in for the full disk: the write fails half-way."""
    folder = swarm.b.folder / "runs" / SPEC.run_id / "checkpoints"
    [events] = swarm.b.folder.glob("runs/*/events.jsonl")
    longest = max(file.stat().st_size for file in (swarm.b.log, events))
    room = longest + 200_000  # enough for log and events, not for a checkpoint
    _, hard = resource.prlimit(swarm.b.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(swarm.b.process.pid, resource.RLIMIT_FSIZE, (room, hard))
    swarm.b.wait_for("cannot write the checkpoint")
    saved = swarm.b.events("saved")[-1]
    swarm.b.report_where(lambda event: event["step"] > saved["step"])
    newest = Checkpoints(folder).newest()
    assert newest is not None
    assert newest.path == Path(saved["folder"])
    assert not list(folder.glob(".partial-*"))
    resource.prlimit(swarm.b.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    until(lambda: swarm.b.events("saved")[-1] != saved, what="a checkpoint, as there is room again")


def test_the_swarm_outlives_its_first_peer(swarm: Swarm, tmp_path: Path) -> None:
    """c, which remembers b, resumes with the ticket of the dead peer; a newcomer joins with the ticket of b."""
    ticket, began_s = swarm.a.ticket, time.monotonic()
    swarm.a.send(signal.SIGKILL)
    swarm.a.wait()
    with PeerProcess(ticket, swarm.c.folder) as c, PeerProcess(swarm.b.ticket, tmp_path / "newcomer") as newcomer:
        assert c.event("started")["resumed_at"] == swarm.c.events("saved")[-1]["step"]
        assert c.peer_id == swarm.c.peer_id
        first = newcomer.event("report")
        assert first["progress"] * SPEC.schedule_steps > 2 * first["step"] + 100, "it took over the state of the swarm"
        c.swap_with(swarm.b)
        start_s = time.monotonic() - began_s
        newcomer.swap_with(swarm.b)
        newcomer.swap_with(c)
        time.sleep(random.Random(SEED + 1).uniform(0.0, 0.5))  # in a swap or not
        asked_s = time.monotonic()
        c.send(signal.SIGTERM)
        assert c.wait() == 0
        left_s = time.monotonic() - asked_s
        assert left_s < max(10.0 + SLACK_S, start_s), "finished or abandoned its swap, and wrote a checkpoint"
        newest = Checkpoints(c.folder / "runs" / SPEC.run_id / "checkpoints").newest()
        assert newest is not None
        assert newest.meta["outer"]["metrics"]["step"] == c.events("stopped")[-1]["step"]
        newcomer.send(signal.SIGSTOP)  # so that both signals arrive before it can leave
        newcomer.send(signal.SIGINT)
        newcomer.send(signal.SIGTERM)
        newcomer.send(signal.SIGCONT)
        assert newcomer.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM), "asked twice: at once"
