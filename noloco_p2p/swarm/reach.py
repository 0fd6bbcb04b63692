"""Whether others can dial this peer, as far as it can tell by itself. Pure.

Proof is only a call that came in. Without one, two things speak against it: it knows none but private addresses while
the swarm is on public ones (a container or a home behind a router), or nobody has called for many rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noloco_p2p.swarm.addresses import any_public, is_public

REACHED, OUTBOUND_ONLY, UNKNOWN = "reached", "outbound only", "unknown"
SILENT_ROUNDS = 20  # each of two others offers to this peer in every second round or so: by chance 1 in 1,000,000
SILENT_PEERS = 2  # with a single other one, who opens its rounds first may go on to do so: silence then tells nothing

FORWARD = "forward its two ports to this machine, and give the public address or name with --announce HOST[:PORT]"


@dataclass(frozen=True, slots=True)
class Reach:
    """`state` is one of REACHED, OUTBOUND_ONLY and UNKNOWN; `sentence` is for people."""

    state: str
    sentence: str


def judge(
    announced: str, *, others: Iterable[str], entrances: Iterable[str], num_calls: int, rounds_here: int
) -> Reach:
    """`announced` and `others` are gRPC HOST:PORT, of this peer and of live ones; `entrances` the multiaddrs that it
    was given to enter through; `num_calls` calls of other peers came in, in `rounds_here` rounds since the start."""
    host, others = announced.rpartition(":")[0], list(others)
    if num_calls:
        return Reach(REACHED, f"other peers have called {num_calls} times")
    is_abroad = any_public(entrances) or any(is_public(address.rpartition(":")[0]) for address in others)
    if is_abroad and not is_public(host):
        return Reach(
            OUTBOUND_ONLY,
            f"{host} is a private address, which peers on other networks cannot dial, so this peer offers swaps and is "
            f"offered none; to be reached, {FORWARD}",
        )
    if rounds_here >= SILENT_ROUNDS and len(others) >= SILENT_PEERS:
        return Reach(
            OUTBOUND_ONLY,
            f"no other peer has called in {rounds_here} rounds, so {announced} seems closed to them, and this peer "
            f"offers swaps and is offered none; to be reached, {FORWARD}",
        )
    return Reach(UNKNOWN, "no other peer has called yet")
