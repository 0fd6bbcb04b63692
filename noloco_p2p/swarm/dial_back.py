"""Whether others can dial this peer: what three of them saw when they dialled back, and what to do about it.

`Reach` has the words for it, of a peer and of each of its neighbours.
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
LOOK_S = 0.5  # how often newcomers are checked while fewer than three have answered
ASK_AGAIN_S = 15.0  # after a peer could not be asked
RECHECK_S = 60.0  # while not direct, so that opening a port needs no restart
RECHECK_DIRECT_S = 900.0


class Reach(StrEnum):
    """How a peer is reached."""

    DIRECT = "direct"  # other peers reach its gRPC port
    MAPPED = "mapped"  # the same, at a port that its router forwards as this peer asked it to
    PUNCHED = "punched"  # through holes in the routers, which a relay helps to punch
    RELAYED = "relayed"  # through a relay, which carries all bytes
    OUTBOUND_ONLY = "outbound-only"  # not at all: it makes offers, but gets none
    UNKNOWN = "unknown"  # no peer has dialled back yet


OPEN = frozenset({Reach.DIRECT, Reach.MAPPED})
CLOSED = frozenset({Reach.PUNCHED, Reach.RELAYED, Reach.OUTBOUND_ONLY})  # others cannot simply dial it


def way_to(published: str, last_way: Reach | None, *, is_closed: bool) -> Reach:
    """How a neighbour is reached. `published`: what it says of itself; `last_way`: of the last call to it, if that was
    a hole or a relay; `is_closed`: this peer cannot be dialled either, else such a neighbour dials it."""
    if published not in CLOSED:
        return Reach.MAPPED if published == Reach.MAPPED else Reach.DIRECT
    if not is_closed:
        return Reach.DIRECT
    if published == Reach.OUTBOUND_ONLY:
        return Reach.OUTBOUND_ONLY
    return last_way or Reach.RELAYED


@dataclass(frozen=True, slots=True)
class DialBack:
    """What one peer saw. `reached`: port -> "" or why it cannot be reached."""

    observed_host: str
    reached: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`sentence` is for people."""

    state: Reach
    sentence: str


def is_abroad(entrances: Iterable[str], others: Iterable[str]) -> bool:
    """Whether the swarm is on public addresses. `entrances` are multiaddrs, `others` HOST:PORT of live peers."""
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
    mapped_by: str = "",
) -> Verdict:
    """Assess the reachability of this peer.

    announced: its HOST:PORT. ports: its gRPC and libp2p ports as others see them. abroad: the swarm is on public
    addresses. num_calls: how many calls of other peers arrived. relayed: a relay holds a reservation for it.
    num_holes: through how many holes in routers this peer and others are connected. mapped_by: how the router maps
    these ports, if others have reached them.
    """
    host = host_of(announced)
    observed = next((seen.observed_host for seen in dial_backs if is_public(seen.observed_host)), "")
    through = [seen for seen in dial_backs if not seen.reached.get(ports[0], "not asked")]
    closed = Reach.OUTBOUND_ONLY if not relayed else Reach.PUNCHED if num_holes else Reach.RELAYED
    if abroad and not is_public(host):
        reason = f"{host} is a private address, which peers on other networks cannot dial"
        if through:
            return Verdict(closed, f"{reason}, though they get through to {observed}: join with --announce {observed}")
        return Verdict(closed, f"{reason}; {_advice(ports, observed or 'HOST')}")
    if not dial_backs:
        if num_calls:
            return Verdict(Reach.DIRECT, f"other peers have called {num_calls} times")
        return Verdict(Reach.UNKNOWN, "no other peer has dialled back or called yet")
    if 2 * len(through) >= len(dial_backs):
        told = f"{len(through)} of {len(dial_backs)} peers that dialled back got through to port {ports[0]}"
        if mapped_by:
            return Verdict(Reach.MAPPED, f"{told}, which the router maps ({mapped_by})")
        if all(seen.reached.get(ports[1]) for seen in through):
            told += f"; port {ports[1]} (libp2p) is closed: open it too, so that others can enter through this peer"
        return Verdict(Reach.DIRECT, told)
    why = next(reason for seen in dial_backs if (reason := seen.reached.get(ports[0], "not asked")))
    told = f"{len(dial_backs) - len(through)} of {len(dial_backs)} peers could not dial port {ports[0]} ({why})"
    effect = {
        Reach.OUTBOUND_ONLY: "so this peer makes offers and gets none",
        Reach.RELAYED: "so other peers behind closed ports call it through a relay",
        Reach.PUNCHED: f"so it connects to other such peers through holes in the routers, {num_holes} so far",
    }[closed]
    return Verdict(closed, f"{told}, {effect}; {_advice(ports, observed or host)}")


def _advice(ports: tuple[int, int], host: str) -> str:
    return (
        f"to be reached, forward TCP {ports[0]} and {ports[1]} to this machine in the router, open them in its "
        f"firewall, and join with --announce {host}"
    )


class DialBacks:
    """Asks up to three live peers to dial back, and again from time to time. Run it as a task of the network thread.

    `ask` raises PeerError; `live` returns the peers known now.
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
        """Forget what peers reported, because other ports are asked about now."""
        self._seen.clear()
        self._not_before_s.clear()
        self._again.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until a peer has dialled back; at most `timeout_s`, and not at all while there is no peer to ask."""
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
        """Ask again; old answers count until there are new ones."""
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
            log.debug("%s could not be asked to dial back: %s", short_id(peer.peer_id), error)
        except Exception:  # whatever a stranger answers, the others are still asked
            log.exception("handling the dial-back answer of %s failed", short_id(peer.peer_id))
