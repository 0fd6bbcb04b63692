"""Measure how a swarm recovers from network faults: real peers in network namespaces, with a tiny model.

sudo python benchmarks/healing.py [--quick] [--json FILE]

cut         the network is cut for 120 s (25 s with --quick) between two pairs of peers, one of which has the bootstrap
one way     packets from the first peer to the second one are lost for 30 s; the other direction works
daemon      the p2pd of one peer is killed, and that of another peer is stopped (SIGSTOP)
entrance    the founder, the only bootstrap of all peers, is killed; a newcomer joins with another peer's ticket
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from claims import Claim, run
from harness.processes import PeerProcess, noloco, small_spec, write_spec
from netlab import LabError, NetLab, home

from noloco_p2p.control import ask
from noloco_p2p.errors import SettingsError

NUM_PEERS = 4
PATIENCE_S = 150.0
POLL_S = 0.5


def status(peer: PeerProcess) -> dict[str, Any]:
    """Return the output of `noloco status --json`, which is empty while the peer does not answer."""
    try:
        return ask(peer.folder, "status") or {}
    except SettingsError:
        return {}


def seconds_until(condition: Callable[[], bool]) -> float:
    """Return how many seconds pass until the condition holds, or infinity if it does not hold within PATIENCE_S."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < PATIENCE_S:
        if condition():
            return time.monotonic() - began_s
        time.sleep(POLL_S)
    return float("inf")


def partners(peer: PeerProcess, *, after: int = 0) -> set[str]:
    outcomes = [event["last_outcome"] for event in peer.events("round")[after:]]
    return {outcome.rpartition("..")[2] for outcome in outcomes if outcome.startswith("swapped with")}


def swapped_across(sides: Sequence[Sequence[PeerProcess]], rounds: dict[PeerProcess, int]) -> bool:
    """Return whether every peer has swapped with a peer of the other side since `rounds`."""
    for side, other in (sides, sides[::-1]):
        names = {peer.peer_id[-6:] for peer in other}
        if not all(names & partners(peer, after=rounds[peer]) for peer in side):
            return False
    return True


def num_rounds(peers: Sequence[PeerProcess]) -> dict[PeerProcess, int]:
    return {peer: len(peer.events("round")) for peer in peers}


def longest_round_s(peers: Sequence[PeerProcess], since_s: float) -> float:
    """Return the longest time between the ends of two successive rounds of a peer since `since_s`, from its events."""
    longest_s = 0.0
    for peer in peers:
        times_s = [event["time_s"] for event in peer.events("round") if event["time_s"] >= since_s]
        longest_s = max([longest_s, *(later - sooner for sooner, later in itertools.pairwise(times_s))])
    return longest_s


def cut(lab: NetLab, peers: list[PeerProcess], *, seconds: float) -> list[Claim]:
    sides = [peers[:2], peers[2:]]
    began_s, rounds = time.time(), num_rounds(peers)
    lab.partition([0, 1], [2, 3])
    time.sleep(seconds)
    inside = [name for peer in peers if (name := peer.peer_id[-6:])]
    apart = all(status(peer).get("live_peers") == 1 for peer in peers) if seconds > 75 else True
    trained = min(now - rounds[peer] for peer, now in num_rounds(peers).items())
    lab.heal()
    rounds = num_rounds(peers)
    whole_s = seconds_until(lambda: all(status(peer).get("live_peers") == len(inside) - 1 for peer in peers))
    mixed_s = whole_s + seconds_until(lambda: swapped_across(sides, rounds))
    name = f"cut of {seconds:.0f} s"
    return [
        Claim(f"{name}: islands while it lasts (1 = yes)", float(apart), "", "1", apart),
        Claim(f"{name}: fewest rounds of a peer meanwhile", trained, "rounds", "> 0", trained > 0),
        Claim(f"{name}: longest round meanwhile", longest_round_s(peers, began_s), "s"),
        Claim(f"{name}: everybody sees everybody after", whole_s, "s", "<= 60", whole_s <= 60),
        Claim(f"{name}: everybody has swapped across it after", mixed_s, "s"),
    ]


def one_way(lab: NetLab, peers: list[PeerProcess], *, seconds: float) -> list[Claim]:
    began_s, rounds = time.time(), num_rounds(peers)
    lab.block((0, 1))
    time.sleep(seconds)
    trained = min(now - rounds[peer] for peer, now in num_rounds(peers).items())
    longest_s = longest_round_s(peers, began_s)
    swapped = min(
        sum(event["last_outcome"].startswith("swapped") for event in peer.events("round")[rounds[peer] :])
        for peer in peers
    )
    lab.heal()
    rounds = num_rounds(peers)
    first, second = peers[0].peer_id[-6:], peers[1]
    again_s = seconds_until(lambda: first in partners(second, after=rounds[second]))
    name = f"one way lost for {seconds:.0f} s"
    return [
        Claim(f"{name}: fewest rounds of a peer", trained, "rounds", "> 0", trained > 0),
        Claim(f"{name}: fewest swaps of a peer", swapped, "rounds", "> 0", swapped > 0),
        Claim(f"{name}: longest round", longest_s, "s"),
        Claim(f"{name}: the two swap again after", again_s, "s"),
    ]


def daemon(peers: list[PeerProcess]) -> list[Claim]:
    claims = []
    for peer, signum in ((peers[1], signal.SIGKILL), (peers[2], signal.SIGSTOP)):
        old = peer.p2pd()
        old.send_signal(signum)
        back_s = seconds_until(lambda peer=peer, old=old: (now := peer.find_p2pd()) is not None and now.pid != old.pid)
        claims.append(Claim(f"p2pd after {signum.name}: another one runs after", back_s, "s", "<= 15", back_s <= 15))
    return claims


def entrance(lab: NetLab, peers: list[PeerProcess], folder: Path) -> list[Claim]:
    ticket = noloco("ticket", "--state-dir", peers[2].folder).stdout.strip()
    rounds = num_rounds(peers)
    peers[0].send(signal.SIGKILL)
    left = peers[1:]
    goes_on_s = seconds_until(lambda: all(partners(peer, after=rounds[peer] + 2) for peer in left))
    where = lab.nodes[0]
    with PeerProcess(ticket, folder / "late", namespace=where.namespace, host=where.address) as late:
        started_s = seconds_until(lambda: bool(late.events("started")))
        swaps_s = started_s + seconds_until(lambda: bool(partners(late)))
    return [
        Claim("founder killed: the others have swapped after", goes_on_s, "s", "<= 60", goes_on_s <= 60),
        Claim("founder killed: a newcomer has swapped after", swaps_s, "s", "<= 120", swaps_s <= 120),
    ]


def measure(quick: bool) -> list[Claim]:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        lab = stack.enter_context(NetLab([home(rate_mbit_s=100, round_trip_ms=20)] * NUM_PEERS))
        homes: list[dict[str, Any]] = [{"namespace": node.namespace, "host": node.address} for node in lab.nodes]
        target: Path | str = write_spec(small_spec("healing"), folder)
        peers: list[PeerProcess] = []
        for index, where in enumerate(homes):
            peers.append(stack.enter_context(PeerProcess(target, folder / f"peer{index}", **where)))
            target = peers[0].ticket
        whole_s = seconds_until(lambda: all(status(peer).get("live_peers") == NUM_PEERS - 1 for peer in peers))
        claims = [Claim("four peers see each other after the start of the last", whole_s, "s")]
        claims += cut(lab, peers, seconds=25 if quick else 120)
        claims += one_way(lab, peers, seconds=10 if quick else 30)
        claims += daemon(peers)
        claims += entrance(lab, peers, folder)
    return claims


if __name__ == "__main__":
    try:
        run(measure, doc=__doc__)
    except LabError as failure:
        sys.exit(f"healing: {failure}")
