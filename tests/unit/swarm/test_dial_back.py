from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p.errors import Unreachable
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.swarm.addresses import any_public, host_of, host_port, is_public, only_public
from noloco_p2p.swarm.dial_back import (
    ASKED_PEERS,
    DialBack,
    DialBacks,
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


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("8.8.8.8", True),
        ("[2001:4860:4860::8888]", True),
        ("peer.example.org", True),
        ("172.17.0.2", False),
        ("100.64.0.1", False),
        ("127.0.0.1", False),
        ("::1", False),
        ("bootstrap", False),
        ("noloco-0.noloco.default.svc.cluster.local", False),
        ("", False),
    ],
)
def test_public_hosts(host: str, expected: bool) -> None:
    assert is_public(host) is expected


def test_one_public_address_is_enough() -> None:
    private = ["/ip4/10.0.0.1/tcp/1", f"/dns4/bootstrap/tcp/1/p2p/{PEER}", "/unix/tmp/socket"]
    assert not any_public(private)
    assert any_public([*private, f"/dns4/peer.example.org/tcp/1/p2p/{PEER}"])


def test_only_public_addresses_are_left() -> None:
    public = f"/ip4/8.8.8.8/tcp/31338/p2p/{PEER}"
    assert only_public([f"/ip4/10.0.0.1/tcp/1/p2p/{PEER}", public, f"/ip6/::1/tcp/1/p2p/{PEER}"]) == [public]


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

    def __init__(self, *candidates: Candidate) -> None:
        self.candidates = candidates
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.strange: set[str] = set()

    async def ask(self, candidate: Candidate) -> DialBack:
        self.asked.append(candidate.peer_id)
        if candidate.peer_id in self.silent:
            raise Unreachable("silent", peer=candidate.peer_id)
        if candidate.peer_id in self.strange:
            raise AttributeError("what a stranger says")
        return DialBack("1.2.3.4", OPEN)


def dial_back(peers: Peers, *, enough: int) -> list[DialBack]:
    async def main() -> list[DialBack]:
        asking = DialBacks(live=lambda: peers.candidates, ask=peers.ask)
        running = asyncio.create_task(asking.run(is_direct=lambda: True))
        while len(asking.seen()) < enough:
            await asking.wait(1.0)
            await asyncio.sleep(0)
        running.cancel()
        return asking.seen()

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_three_are_asked_however_many_there_are_and_none_that_cannot_be_called() -> None:
    peers = Peers(*(Candidate(f"peer{n}", "host:1", can_be_called=n != 0) for n in range(9)))
    assert len(dial_back(peers, enough=ASKED_PEERS)) == ASKED_PEERS
    assert len(peers.asked) == ASKED_PEERS
    assert "peer0" not in peers.asked


def test_one_that_does_not_answer_is_replaced() -> None:
    peers = Peers(*(Candidate(f"peer{n}", "host:1") for n in range(6)))
    peers.silent, peers.strange = {"peer0", "peer1"}, {"peer2"}
    assert len(dial_back(peers, enough=ASKED_PEERS)) == ASKED_PEERS


def test_peers_are_asked_again_at_once_when_other_ports_are_asked_about() -> None:
    async def main() -> None:
        peers = Peers(*(Candidate(f"peer{n}", "host:1") for n in range(ASKED_PEERS)))
        asking = DialBacks(live=lambda: peers.candidates, ask=peers.ask)
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


def test_alone_nobody_is_waited_for() -> None:
    asyncio.run(asyncio.wait_for(DialBacks(live=lambda: (), ask=Peers().ask).wait(1e6), PATIENCE_S))


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
