from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import DirectoryError
from noloco_p2p.simulate.clock import run_virtual
from noloco_p2p.swarm.addresses import host_of, host_port, only_public
from noloco_p2p.swarm.dial_back import (
    ASK_AGAIN_S,
    ASKED_PEERS,
    DIALS_A_MINUTE_OF_ONE,
    NO,
    RECHECK_S,
    DialBack,
    DialBacks,
    DialBackServer,
    Reach,
    Verdict,
    assess,
    is_abroad,
    way_to,
)

PRIVATE, PUBLIC = "172.17.0.2:31337", "8.8.8.8:31337"
PEER = "12D3KooWK2gwFiFWxgNtk5RYUnaMSwBrBdWiVZaRwxqCoXQBHSA7"
OPEN: Mapping[int, str] = {31337: "", 31338: ""}
CLOSED: Mapping[int, str] = {31337: "no answer within 4 s", 31338: "no answer within 4 s"}


def verdict(
    announced: str,
    *reached: Mapping[int, str],
    abroad: bool = True,
    calls: int = 0,
    relayed: bool = False,
    num_holes: int = 0,
) -> Verdict:
    return assess(
        announced,
        ports=(31337, 31338),
        dial_backs=[DialBack("1.2.3.4", ports) for ports in reached],
        abroad=abroad,
        num_calls=calls,
        relayed=relayed,
        num_holes=num_holes,
    )


def test_only_public_addresses_are_left() -> None:
    public = [f"/ip4/8.8.8.8/tcp/31338/p2p/{PEER}", f"/dns4/peer.example.org/tcp/1/p2p/{PEER}"]
    private = ["/ip4/10.0.0.1/tcp/1", f"/dns4/bootstrap/tcp/1/p2p/{PEER}", "/unix/tmp/socket", "/ip6/::1/tcp/1"]
    assert only_public([*private, *public]) == public


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert host_port("::1", 5) == host_port("[::1]", 5) == "[::1]:5"
    assert host_port("10.0.0.1", 5) == "10.0.0.1:5"
    assert (host_of("[::1]:5"), host_of(PUBLIC)) == ("::1", "8.8.8.8")


def test_a_swarm_is_abroad_when_anybody_is_on_a_public_address() -> None:
    assert is_abroad([], [PRIVATE, PUBLIC])
    assert is_abroad([f"/ip4/8.8.8.8/tcp/31338/p2p/{PEER}"], [])
    assert not is_abroad([f"/dns4/bootstrap/tcp/31338/p2p/{PEER}"], ["172.17.0.3:31337", ""])


def test_those_who_got_through_are_proof() -> None:
    found = verdict(PUBLIC, OPEN, OPEN, CLOSED)
    assert (found.state, found.sentence) == (
        Reach.DIRECT,
        "2 of 3 peers that dialled back reached port 31337",
    )


def test_a_closed_libp2p_port_is_told_to_a_direct_peer() -> None:
    found = verdict(PUBLIC, {31337: "", 31338: "Connection refused"})
    assert found.state == Reach.DIRECT
    assert "port 31338 (libp2p) is closed" in found.sentence


def test_a_closed_port_comes_with_exact_advice() -> None:
    found = verdict(PUBLIC, CLOSED, CLOSED, OPEN)
    assert found.state == Reach.OUTBOUND_ONLY
    assert "2 of 3 peers could not reach port 31337 (no answer within 4 s)" in found.sentence
    assert "forward TCP ports 31337 and 31338 from the router to this machine" in found.sentence
    assert found.sentence.endswith("join with --announce 1.2.3.4")
    assert verdict(PUBLIC, CLOSED, relayed=True).state == Reach.RELAYED
    punched = verdict(PUBLIC, CLOSED, relayed=True, num_holes=3)
    assert punched.state == Reach.PUNCHED
    assert "reaches others with closed ports by hole punching (connections so far: 3)" in punched.sentence


def test_a_private_address_in_a_public_swarm_is_outbound_only_whoever_gets_through() -> None:
    found = verdict(PRIVATE, OPEN)
    assert found.state == Reach.OUTBOUND_ONLY
    assert "172.17.0.2 is a private address" in found.sentence
    assert found.sentence.endswith("they can reach 1.2.3.4: join with --announce 1.2.3.4")
    assert "forward TCP ports 31337 and 31338" in verdict(PRIVATE).sentence
    assert verdict(PRIVATE, OPEN, abroad=False).state == Reach.DIRECT


def test_without_an_answer_a_call_that_came_in_is_proof() -> None:
    assert verdict(PUBLIC).state == Reach.UNKNOWN
    assert verdict(PUBLIC, calls=1).state == Reach.DIRECT
    assert verdict(PUBLIC, CLOSED, calls=1).state == Reach.OUTBOUND_ONLY  # the call came in another way


class Peers:
    """A swarm whose peers dial back."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.strange: set[str] = set()

    async def ask(self, peer: str) -> DialBack:
        self.asked.append(peer)
        if peer in self.silent:
            raise DirectoryError("silent")
        if peer in self.strange:
            raise AttributeError("what a stranger says")
        return DialBack("1.2.3.4", OPEN)


def dial_back(peers: Peers, *, enough: int) -> list[DialBack]:
    async def main() -> list[DialBack]:
        asking = DialBacks(nodes=lambda: peers.ids, ask=peers.ask)
        running = asyncio.create_task(asking.run(is_direct=lambda: True))
        while len(asking.seen()) < enough:
            await asking.wait(1.0)
            await asyncio.sleep(0)
        running.cancel()
        return asking.seen()

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_three_are_asked_however_many_there_are() -> None:
    peers = Peers(*(f"peer{n}" for n in range(9)))
    assert len(dial_back(peers, enough=ASKED_PEERS)) == ASKED_PEERS
    assert len(peers.asked) == ASKED_PEERS


def test_one_that_does_not_answer_is_replaced() -> None:
    peers = Peers(*(f"peer{n}" for n in range(6)))
    peers.silent, peers.strange = {"peer0", "peer1"}, {"peer2"}
    assert len(dial_back(peers, enough=ASKED_PEERS)) == ASKED_PEERS


def test_peers_are_asked_again_at_once_when_other_ports_are_asked_about() -> None:
    async def main() -> None:
        peers = Peers(*(f"peer{n}" for n in range(ASKED_PEERS)))
        asking = DialBacks(nodes=lambda: peers.ids, ask=peers.ask)
        running = asyncio.create_task(asking.run(is_direct=lambda: True))
        for _ in range(2):
            while len(asking.seen()) < ASKED_PEERS:
                await asking.wait(1.0)
                await asyncio.sleep(0)
            asking.ask_again()
            assert not asking.seen()
        running.cancel()
        assert len(peers.asked) == 2 * ASKED_PEERS

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_old_reports_count_until_new_ones_arrive() -> None:
    async def main() -> None:
        peers = Peers(*(f"peer{n}" for n in range(ASKED_PEERS)))
        asking = DialBacks(nodes=lambda: peers.ids, ask=peers.ask, clock=asyncio.get_running_loop().time)
        running = asyncio.create_task(asking.run(is_direct=lambda: False))
        await asyncio.sleep(RECHECK_S - 1)
        assert len(peers.asked) == ASKED_PEERS
        peers.silent = set(peers.ids)
        await asyncio.sleep(2)
        assert len(peers.asked) == 2 * ASKED_PEERS
        assert len(asking.seen()) == ASKED_PEERS
        peers.silent = {"peer0"}
        await asyncio.sleep(ASK_AGAIN_S)
        assert len(asking.seen()) == ASKED_PEERS - 1
        running.cancel()

    run_virtual(main())


def test_alone_nobody_is_waited_for() -> None:
    asyncio.run(asyncio.wait_for(DialBacks(nodes=tuple, ask=Peers().ask).wait(1e6), PATIENCE_S))


class Asker:
    """A node that asks from `host`, and the end of its stream."""

    guard = DialGuard(only_public=True)

    def __init__(self, host: str = "203.0.113.9") -> None:
        self.host = host
        self.num_looked_up = 0
        self.said = b""

    async def hosts_of(self, peer: str) -> set[str]:
        self.num_looked_up += 1
        await asyncio.sleep(0)  # as slow as p2pd
        return {self.host}

    def write(self, data: bytes) -> None:
        self.said += data

    async def drain(self) -> None: ...

    async def ask(self, server: DialBackServer, ports: bytes, peer: str = "peer") -> bytes:
        reader, self.said = asyncio.StreamReader(), b""
        reader.feed_data(ports + b"\n")
        await server._on_dial(peer, reader, cast(Any, self))
        return self.said


@pytest.fixture
def knocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the addresses at which a node knocks. Only port 1 is open."""
    knocks: list[str] = []

    async def knock(multiaddr: str) -> str:
        knocks.append(multiaddr)
        return "" if multiaddr.endswith("/tcp/1") else "connection refused"

    monkeypatch.setattr("noloco_p2p.swarm.dial_back.knock", knock)
    return knocks


def test_only_the_address_of_the_asker_is_dialled_and_no_cause_is_told(knocks: list[str]) -> None:
    async def main() -> None:
        asker = Asker("45.77.0.9")
        answer = await asker.ask(DialBackServer(cast(Any, asker)), b"1 2 3 4 5")
        assert knocks == ["/ip4/45.77.0.9/tcp/1", "/ip4/45.77.0.9/tcp/2"]
        assert DialBack.parse(answer, [1, 2]) == DialBack("45.77.0.9", {1: "", 2: "no connection"})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "ports"), [("", b"1"), ("192.168.7.2", b"1"), ("45.77.0.9", b"0"), ("45.77.0.9", b"1 70000")]
)
def test_a_relayed_or_private_asker_and_a_port_that_is_none_are_not_dialled(
    knocks: list[str], host: str, ports: bytes
) -> None:
    asker = Asker(host)
    assert asyncio.run(asker.ask(DialBackServer(cast(Any, asker)), ports)) == NO
    assert not knocks


def test_a_burst_of_questions_is_not_dialled_back_more_often_than_a_slow_one() -> None:
    async def main() -> None:
        asker = Asker("")
        server = DialBackServer(cast(Any, asker))
        await asyncio.gather(*(asker.ask(server, b"4000") for _ in range(2 * DIALS_A_MINUTE_OF_ONE)))
        assert asker.num_looked_up == DIALS_A_MINUTE_OF_ONE

    asyncio.run(main())


@pytest.mark.parametrize(("num_peers", "most"), [(1, 16), (50, 48)])
def test_in_no_minute_are_more_ports_dialled_back_than_promised(knocks: list[str], num_peers: int, most: int) -> None:
    """Peers of one network ask ten times a second."""
    now_s, dialled_s = 1000.0, list[float]()

    async def main() -> None:
        nonlocal now_s
        asker = Asker("45.77.0.9")
        server = DialBackServer(cast(Any, asker))
        for rates in (server._of_network, server._of_one):
            rates._clock = lambda: now_s
        for step in range(2000):
            now_s += 0.1
            before = len(knocks)
            await asker.ask(server, b"1 2 3 4", str(step % num_peers))
            dialled_s.extend([now_s] * (len(knocks) - before))

    asyncio.run(main())
    busiest = max(sum(begin <= each < begin + 60.0 for each in dialled_s) for begin in dialled_s)
    assert most / 2 < busiest <= most


def test_a_report_cannot_play_with_a_terminal() -> None:
    told = ["\x1b[2J192.0.2.7", {"9": "\x1b]0;owned\x07no" + 500 * "x", "10": ""}]
    found = DialBack.parse(json.dumps(told).encode(), [9])
    assert (found.observed_host, list(found.reached)) == ("[2J192.0.2.7", [9])
    assert found.reached[9].startswith("]0;ownedno")
    assert len(found.reached[9]) <= 200


@pytest.mark.parametrize("line", [NO, b"", b"1", b'["192.0.2.7", {}]', b'["192.0.2.7", ["9"]]', b"[" * 100_000])
def test_what_is_no_report_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"report|Expecting"):
        DialBack.parse(line, [9])


@pytest.mark.parametrize(
    ("published", "last_way", "is_closed", "way"),
    [
        ("direct", None, True, Reach.DIRECT),
        ("mapped", None, True, Reach.MAPPED),
        ("mapped", None, False, Reach.MAPPED),
        ("unknown", None, True, Reach.DIRECT),
        ("what a later version says", None, True, Reach.DIRECT),
        ("relayed", None, False, Reach.DIRECT),  # it dials this peer
        ("relayed", None, True, Reach.RELAYED),
        ("punched", None, True, Reach.RELAYED),  # with others, but not yet with this peer
        ("relayed", Reach.PUNCHED, True, Reach.PUNCHED),
        ("punched", Reach.RELAYED, True, Reach.RELAYED),
        ("outbound-only", Reach.PUNCHED, True, Reach.OUTBOUND_ONLY),
    ],
)
def test_a_neighbour_is_reached_as_both_sides_allow(
    published: str, last_way: Reach | None, is_closed: bool, way: Reach
) -> None:
    assert way_to(published, last_way, is_closed=is_closed) is way
