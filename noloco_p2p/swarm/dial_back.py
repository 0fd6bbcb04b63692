"""Asks three nodes to dial back, to find out whether others can dial this peer, and advises the user.

Every DHT node answers this question, over libp2p, whether it is a peer of the run or not. Nobody can make a node dial a
stranger: it dials only the address from which the question came, on two ports, and only a few times per minute.
`Reach` lists the kinds of reachability, both for this peer and for each of its neighbours.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from noloco_p2p.errors import DirectoryError
from noloco_p2p.hosts import is_public, network_of
from noloco_p2p.identity import short_id
from noloco_p2p.rates import Rates
from noloco_p2p.swarm.addresses import host_of, listen_multiaddr, only_public
from noloco_p2p.swarm.node import SwarmNode, knock
from noloco_p2p.swarm.streams import FAULTS, read_line

log = logging.getLogger(__name__)

DIAL = "/noloco_p2p/dial/1"
MAX_PORTS = 2
DIALS_A_MINUTE_OF_ONE, DIALS_A_MINUTE = 4, 12  # per requesting peer, and per dialled network; bursts are allowed
ANSWER_S = 10.0
NO = b"no\n"

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
    """The report of a node that dialled back.

    `observed_host` is the address at which it sees this peer. `reached` maps each port to the reason why it cannot be
    reached, or to an empty string if it can.
    """

    observed_host: str
    reached: Mapping[int, str]

    @classmethod
    def parse(cls, line: bytes, ports: Sequence[int]) -> DialBack:
        """Parse the answer of another node to a question about `ports`. Raises ValueError if it is not a report."""
        try:
            host, reached = json.loads(line)
            return cls(_shown(host, 100), {port: _shown(reached[str(port)], 200) for port in ports})
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"its answer is not a report: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reachability of this peer, and a sentence that explains it to the user."""

    state: Reach
    sentence: str


def is_abroad(entrances: Iterable[str], others: Iterable[str]) -> bool:
    """Return whether the swarm is on public addresses.

    `entrances` are the multiaddrs of bootstraps, and `others` are the HOST:PORT addresses of live peers.
    """
    return bool(only_public(entrances)) or any(is_public(host_of(address)) for address in others)


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
    """Asks up to three nodes to dial back, and repeats this from time to time.

    Start `run()` as a task on the network thread. `nodes` returns the ids of the nodes that can be asked now. `ask`
    asks one of them, and raises DirectoryError if it does not dial back.
    """

    def __init__(
        self,
        *,
        nodes: Callable[[], Sequence[str]],
        ask: Callable[[str], Awaitable[DialBack]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._ask = ask
        self._clock = clock
        self._seen: dict[str, tuple[float, DialBack]] = {}  # the latest reports, each with its time
        self._not_before_s: dict[str, float] = {}
        self._first = asyncio.Event()

    def seen(self) -> list[DialBack]:
        return [report for _, report in self._seen.values()]

    def ask_again(self) -> None:
        """Forget the reports so far and ask again, because the ports have changed."""
        self._seen.clear()
        self._not_before_s.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait until a node has dialled back, for at most `timeout_s`. Return at once if there is no node to ask."""
        if self._nodes():
            try:
                await asyncio.wait_for(self._first.wait(), timeout_s)
            except TimeoutError:
                log.info("no peer dialled back within %.0f s", timeout_s)

    async def run(self, *, is_direct: Callable[[], bool]) -> None:
        """Keep the reports of three nodes. Old reports count until new ones arrive."""
        while True:
            oldest_s = self._clock() - (RECHECK_DIRECT_S if is_direct() else RECHECK_S)
            fresh = {node for node, (at_s, _) in self._seen.items() if at_s > oldest_s}
            if len(fresh) < ASKED_PEERS:
                now_s = self._clock()
                may_ask = [
                    node for node in self._nodes() if node not in fresh and self._not_before_s.get(node, now_s) <= now_s
                ]
                chosen = random.sample(may_ask, min(len(may_ask), ASKED_PEERS - len(fresh)))
                if any(await asyncio.gather(*map(self._ask_one, chosen))):
                    self._seen = {node: report for node, report in self._seen.items() if report[0] > oldest_s}
            await asyncio.sleep(LOOK_S)

    async def _ask_one(self, node: str) -> bool:
        """Ask a node to dial back, and return whether it did."""
        self._not_before_s[node] = self._clock() + ASK_AGAIN_S
        try:
            self._seen[node] = self._clock(), await self._ask(node)
            self._first.set()
            return True
        except DirectoryError as error:
            log.debug("could not ask %s to dial back: %s", short_id(node), error)
        except Exception:  # a stranger's answer must not keep the others from being asked
            log.exception("could not process the dial-back reply from %s", short_id(node))
        return False


async def ask(node: SwarmNode, peer: str, ports: Sequence[int], *, at: str = "") -> DialBack:
    """Ask a peer to dial back to `ports` on this machine, and return its report.

    If libp2p is not connected to the peer, its address `at` is dialled. Raises DirectoryError if the peer does not
    answer properly.
    """
    try:
        reader, writer = await node.open_stream(peer, DIAL, at=at)
        try:
            writer.write(" ".join(map(str, ports)).encode() + b"\n")
            async with asyncio.timeout(ANSWER_S):
                return DialBack.parse(await read_line(reader), ports)
        finally:
            writer.close()
    except FAULTS as error:
        raise DirectoryError(f"{short_id(peer)} did not dial back: {error}") from None


def _shown(text: object, most_chars: int) -> str:
    """Return text from another node, cut and without characters that could manipulate a terminal."""
    return "".join(char for char in str(text)[:most_chars] if char.isprintable())


class DialBackServer:
    """Answers the nodes that ask this one to dial back."""

    def __init__(self, node: SwarmNode) -> None:
        self._node = node
        self._of_one = Rates(per_s=DIALS_A_MINUTE_OF_ONE / 60, at_once=DIALS_A_MINUTE_OF_ONE)
        self._of_network = Rates(per_s=DIALS_A_MINUTE / 60, at_once=DIALS_A_MINUTE)

    async def start(self) -> None:
        await self._node.handle_streams(DIAL, self._on_dial)

    async def _on_dial(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ANSWER_S):
            ports = [int(port) for port in (await read_line(reader)).split()][:MAX_PORTS]
        may_ask = all(0 < port < 65_536 for port in ports) and self._of_one.take(peer)
        host = max(await self._node.hosts_of(peer), default="") if may_ask else ""  # "" for a relay
        if not host or not self._may_dial(host):
            writer.write(NO)
            return
        found = await asyncio.gather(*(knock(listen_multiaddr(host, port)) for port in ports))
        answers = ["no connection" if fault else "" for fault in found]  # do not reveal the error
        writer.write(json.dumps([host, dict(zip(map(str, ports), answers, strict=True))]).encode() + b"\n")
        await writer.drain()

    def _may_dial(self, host: str) -> bool:
        return (is_public(host) or not self._node.guard.only_public) and self._of_network.take(network_of(host))
