"""Real processes that are killed or frozen: the other peers lose at most one round each, and the swarm continues.

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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from harness.processes import PeerProcess, small_spec, until, write_spec

from noloco_p2p.outer.checkpoint import Checkpoints

SEED = 2506_10911
MAX_WAIT_S = 2.0
NETWORK_ANSWER_S = 5.0  # time of the network thread beyond max_wait_s: gossip.exchange
SLACK_S = 6.0  # for a busy machine; that of a slow one is measured
SPEC = small_spec("chaos", outer__max_wait_s=MAX_WAIT_S)


@dataclass(frozen=True)
class Swarm:
    a: PeerProcess
    b: PeerProcess
    c: PeerProcess


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("chaos")
    often = ("--save-every-rounds", "5")
    with PeerProcess(write_spec(SPEC, folder), folder / "a", *often) as a:
        ticket = a.ticket
        with PeerProcess(ticket, folder / "b", *often) as b, PeerProcess(ticket, folder / "c", *often) as c:
            a.swap_with(b)
            a.swap_with(c)
            until(lambda: len(c.events("saved")) > 1, what="checkpoints of c")
            yield Swarm(a, b, c)


def assert_no_round_is_longer(peer: PeerProcess, *, since_s: float) -> None:
    """Check that no round since `since_s` (wall clock) took longer than its limit and a few usual rounds.

    A round that was running at `since_s` counts too.
    """
    ends = [event["time_s"] for event in peer.events("round")]
    pauses_s = [(later - earlier, later) for earlier, later in pairwise(ends)]
    usual_s = median(pause_s for pause_s, _ in pauses_s)
    longest_s = max(pause_s for pause_s, end_s in pauses_s if end_s >= since_s)
    assert longest_s < MAX_WAIT_S + NETWORK_ANSWER_S + max(SLACK_S, 4 * usual_s)


def is_swap_with(event: dict[str, Any], partner: PeerProcess) -> bool:
    end = partner.peer_id[-6:]
    return event["last_outcome"].startswith((f"swapped with ..{end}", f"half with ..{end}"))


def num_long_waits(rounds: list[dict[str, Any]]) -> int:
    return sum(event["blocked_s"] > 0.75 * MAX_WAIT_S for event in rounds)


def test_a_partner_killed_in_the_middle_costs_a_round_at_most(swarm: Swarm) -> None:
    time.sleep(random.Random(SEED).uniform(0.0, 0.5))  # a random moment of a round, the same in every run
    done = {peer: len(peer.events("round")) for peer in (swarm.a, swarm.b)}
    killed_s = time.time()
    swarm.c.send(signal.SIGKILL)
    assert swarm.c.wait() == -signal.SIGKILL
    swarm.a.swap_with(swarm.b, after=done[swarm.a] + 1)
    swarm.b.swap_with(swarm.a, after=done[swarm.b] + 1)
    for peer in done:
        later = [event for event in peer.events("round") if event["time_s"] >= killed_s]
        assert sum(is_swap_with(event, swarm.c) for event in later) <= 1, "that of the round in which it died"
        assert_no_round_is_longer(peer, since_s=killed_s)
        assert "Traceback" not in peer.text


def test_a_dead_peer_does_not_slow_the_others_down(swarm: Swarm) -> None:
    """The DHT lists the dead peer for another minute. Rounds that waited for it would take ten times as long."""
    before = [event for event in swarm.a.events("round") if event["time_s"] <= swarm.c.events("round")[-1]["time_s"]]
    done = len(swarm.a.events("round"))
    swarm.a.round_where(lambda event: True, after=done + 10)
    since = swarm.a.events("round")[done : done + 10]
    usual = 10 * num_long_waits(before) / len(before)  # on a slow machine rounds also wait for live peers
    assert num_long_waits(since) <= 3 + usual, [event["blocked_s"] for event in since]


def test_a_killed_p2pd_is_started_again_and_training_does_not_notice(swarm: Swarm) -> None:
    done = len(swarm.b.events("round"))
    old = swarm.b.p2pd()
    old.kill()
    swarm.b.wait_for("p2pd has stopped (signal 9); restarting it")
    new = until(swarm.b.find_p2pd, what="another p2pd")
    assert new.pid != old.pid
    swarm.b.swap_with(swarm.a, after=done + 3)


def test_a_frozen_peer_costs_its_partner_no_more_than_the_wait(swarm: Swarm) -> None:
    """The kernel of a peer that SIGSTOP has frozen still acknowledges packets, so other peers do not notice."""
    done = len(swarm.a.events("round"))
    frozen_s = time.time()
    swarm.b.send(signal.SIGSTOP)
    try:
        swarm.a.round_where(lambda event: True, after=done + 5)
        assert_no_round_is_longer(swarm.a, since_s=frozen_s)
    finally:
        swarm.b.send(signal.SIGCONT)
    swarm.a.swap_with(swarm.b, after=len(swarm.a.events("round")))


def test_a_full_disk_is_told_and_the_last_good_checkpoint_stays(swarm: Swarm) -> None:
    """A limit on the file size stands in for the full disk: the write fails half-way."""
    folder = swarm.b.folder / "runs" / SPEC.run_id / "checkpoints"
    room = swarm.b.log.stat().st_size + 200_000  # enough for log and events, not for a checkpoint
    _, hard = resource.prlimit(swarm.b.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(swarm.b.process.pid, resource.RLIMIT_FSIZE, (room, hard))
    swarm.b.wait_for("cannot write the checkpoint")
    saved = swarm.b.events("saved")[-1]
    swarm.b.round_where(lambda event: event["step"] > saved["step"], after=len(swarm.b.events("round")) + 2)
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
        assert newcomer.event("evaluated")["round"] > 0
        c.swap_with(swarm.b)
        start_s = time.monotonic() - began_s
        newcomer.swap_with(swarm.b)
        newcomer.swap_with(c)
        in_a_swap_or_not_s = random.Random(SEED + 1).uniform(0.0, 0.5)
        time.sleep(in_a_swap_or_not_s)
        asked_s = time.monotonic()
        c.send(signal.SIGTERM)
        assert c.wait() == 0
        left_s = time.monotonic() - asked_s
        assert left_s < max(10.0 + SLACK_S, start_s), "finished or abandoned its swap, and wrote a checkpoint"
        newest = Checkpoints(c.folder / "runs" / SPEC.run_id / "checkpoints").newest()
        assert newest is not None
        assert newest.meta["metrics"]["step"] == c.events("stopped")[-1]["step"]
        newcomer.send(signal.SIGSTOP)  # so that both signals arrive before it can leave
        newcomer.send(signal.SIGINT)
        newcomer.send(signal.SIGTERM)
        newcomer.send(signal.SIGCONT)
        assert newcomer.wait() in (128 + signal.SIGINT, 128 + signal.SIGTERM), "asked twice: at once"
