"""Asks three peers to dial back, to find out whether others can dial this peer, and advises the user.

`Reach` lists the kinds of reachability, both for this peer and for each of its neighbours.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from noloco_p2p.errors import PeerError
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.hosts import is_public
from noloco_p2p.identity import short_id
from noloco_p2p.swarm.addresses import any_public, host_of

log = logging.getLogger(__name__)

ASKED_PEERS = 3
LOOK_S = 0.5  # how often more peers are asked while fewer than three have dialled back
ASK_AGAIN_S = 15.0  # the pause before the same peer is asked again
# The interval between checks while this peer is not direct, so that a newly opened port is noticed without a restart.
RECHECK_S = 60.0
RECHECK_DIRECT_S = 900.0


class Reach(StrEnum):
    """A way in which a peer can be reached."""

    DIRECT = "direct"  # other peers can reach its gRPC port
    MAPPED = "mapped"  # the same, at a port that its router forwards because the peer asked for it
    PUNCHED = "punched"  # through holes in the routers, punched with the help of a relay
    RELAYED = "relayed"  # through a relay, which carries all traffic
    OUTBOUND_ONLY = "outbound-only"  # not at all; the peer makes offers, but receives none
    UNKNOWN = "unknown"  # no peer has dialled back yet


OPEN = frozenset({Reach.DIRECT, Reach.MAPPED})
CLOSED = frozenset({Reach.PUNCHED, Reach.RELAYED, Reach.OUTBOUND_ONLY})  # Others cannot dial such a peer directly.


def way_to(published: str, last_way: Reach | None, *, is_closed: bool) -> Reach:
    """Return how a neighbour is reached.

    `published` is the reachability in its record. `last_way` is the route of the last call to it, if that call went
    through a hole or a relay. `is_closed` is true if this peer cannot be dialled. Otherwise, a neighbour behind a
    closed port can dial this peer directly.
    """
    if published not in CLOSED:
        return Reach.MAPPED if published == Reach.MAPPED else Reach.DIRECT
    if not is_closed:
        return Reach.DIRECT
    if published == Reach.OUTBOUND_ONLY:
        return Reach.OUTBOUND_ONLY
    return last_way or Reach.RELAYED


@dataclass(frozen=True, slots=True)
class DialBack:
    """The report of a peer that dialled back.

    `observed_host` is the address at which it sees this peer. `reached` maps each port to the reason why it cannot be
    reached, or to an empty string if it can.
    """

    observed_host: str
    reached: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reachability of this peer, and a sentence that explains it to the user."""

    state: Reach
    sentence: str


def is_abroad(entrances: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether the swarm is on public addresses.

    `entrances` are the multiaddrs of bootstraps, and `others` are the HOST:PORT addresses of live peers.
    """
    return any_public(entrances) or any(is_public(host_of(address)) for address in others)


def assess(
    announced: str,
    *,
    ports: tuple[int, int],
    dial_backs: Sequence[DialBack],
    abroad: bool,
    num_calls: int,
    relayed: bool = False,
    num_holes: int = 0,
    is_mapped: bool = False,
) -> Verdict:
    """Assess the reachability of this peer.

    `announced` is its HOST:PORT address, and `ports` are its gRPC and libp2p ports as others see them. `abroad` is true
    if the swarm is on public addresses. `num_calls` is the number of calls that other peers have made to it. `relayed`
    is true if a relay holds a reservation for it. `num_holes` is the number of connections to other peers through holes
    in routers. `is_mapped` is true if the router forwards the ports.
    """
    host = host_of(announced)
    observed = next((seen.observed_host for seen in dial_backs if is_public(seen.observed_host)), "")
    through = [seen for seen in dial_backs if not seen.reached.get(ports[0], "not asked")]
    closed = Reach.OUTBOUND_ONLY if not relayed else Reach.PUNCHED if num_holes else Reach.RELAYED
    if abroad and not is_public(host):
        reason = f"{host} is a private address, which peers on other networks cannot dial"
        if through:
            return Verdict(closed, f"{reason}, but they can reach {observed}: join with --announce {observed}")
        return Verdict(closed, f"{reason}; {_advice(ports, observed or 'HOST')}")
    if not dial_backs:
        if num_calls:
            return Verdict(Reach.DIRECT, f"calls received from other peers: {num_calls}")
        return Verdict(Reach.UNKNOWN, "no other peer has dialled back or called this peer yet")
    if 2 * len(through) >= len(dial_backs):
        told = f"{len(through)} of {len(dial_backs)} peers that dialled back reached port {ports[0]}"
        if is_mapped:
            return Verdict(Reach.MAPPED, f"{told}, which the router maps to this machine (UPnP)")
        if all(seen.reached.get(ports[1]) for seen in through):
            told += f"; port {ports[1]} (libp2p) is closed; open it as well, so that others can join through this peer"
        return Verdict(Reach.DIRECT, told)
    why = next(reason for seen in dial_backs if (reason := seen.reached.get(ports[0], "not asked")))
    told = f"{len(dial_backs) - len(through)} of {len(dial_backs)} peers could not reach port {ports[0]} ({why})"
    effect = {
        Reach.OUTBOUND_ONLY: "so this peer can make offers but cannot receive any",
        Reach.RELAYED: "so others with closed ports call this peer through a relay",
        Reach.PUNCHED: (
            f"so this peer reaches others with closed ports by hole punching (connections so far: {num_holes})"
        ),
    }[closed]
    return Verdict(closed, f"{told}, {effect}; {_advice(ports, observed or host)}")


def _advice(ports: tuple[int, int], host: str) -> str:
    return (
        f"to make this peer reachable, forward TCP ports {ports[0]} and {ports[1]} from the router to this machine, "
        f"open them in this machine's firewall, and join with --announce {host}"
    )


class DialBacks:
    """Asks up to three live peers to dial back, and repeats this from time to time.

    Start `run()` as a task on the network thread. `live` returns the peers that are known now. `ask` asks one of them
    to dial back, and raises PeerError if the call fails.
    """

    def __init__(
        self,
        *,
        live: Callable[[], Sequence[Candidate]],
        ask: Callable[[Candidate], Awaitable[DialBack]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._ask = ask
        self._clock = clock
        self._seen: dict[str, DialBack] = {}
        self._not_before_s: dict[str, float] = {}
        self._first = asyncio.Event()
        self._again = asyncio.Event()

    def seen(self) -> list[DialBack]:
        return list(self._seen.values())

    def ask_again(self) -> None:
        """Forget the reports so far and ask again, because the ports have changed."""
        self._seen.clear()
        self._not_before_s.clear()
        self._again.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until a peer has dialled back, for at most `timeout_s`. Return at once if there is no peer to ask."""
        if any(peer.can_be_called for peer in self._live()):
            try:
                await asyncio.wait_for(self._first.wait(), timeout_s)
            except TimeoutError:
                log.info("no peer dialled back within %.0f s", timeout_s)

    async def run(self, *, is_direct: Callable[[], bool]) -> None:
        while True:
            until_s = self._clock()
            while len(self._seen) < ASKED_PEERS:
                await self._ask_some()
                await asyncio.sleep(LOOK_S)
                if self._seen and self._clock() - until_s > RECHECK_S:
                    break
            self._again.clear()
            try:
                await asyncio.wait_for(self._again.wait(), RECHECK_DIRECT_S if is_direct() else RECHECK_S)
            except TimeoutError:
                await self._renew()

    async def _ask_some(self) -> None:
        now_s = self._clock()
        may_ask = [
            peer
            for peer in self._live()
            if peer.can_be_called
            and peer.peer_id not in self._seen
            and self._not_before_s.get(peer.peer_id, 0) <= now_s
        ]
        chosen = random.sample(may_ask, min(len(may_ask), ASKED_PEERS - len(self._seen)))
        await asyncio.gather(*(self._ask_one(peer, self._seen) for peer in chosen))

    async def _renew(self) -> None:
        """Ask peers to dial back again. The old reports count until new ones arrive."""
        fresh: dict[str, DialBack] = {}
        peers = [peer for peer in self._live() if peer.can_be_called]
        chosen = random.sample(peers, min(len(peers), ASKED_PEERS))
        await asyncio.gather(*(self._ask_one(peer, fresh) for peer in chosen))
        self._seen = fresh or self._seen

    async def _ask_one(self, peer: Candidate, found: dict[str, DialBack]) -> None:
        self._not_before_s[peer.peer_id] = self._clock() + ASK_AGAIN_S
        try:
            found[peer.peer_id] = await self._ask(peer)
            self._first.set()
        except PeerError as error:
            log.debug("could not ask %s to dial back: %s", short_id(peer.peer_id), error)
        except Exception:  # a stranger's answer must not keep the others from being asked
            log.exception("could not process the dial-back reply from %s", short_id(peer.peer_id))
