"""The search for peers in the local network: what is announced, what is believed, and who counts as near."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import cast

import pytest
import uvloop
from harness.identities import identity_of
from harness.patience import PATIENCE_S, until
from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceInfo

from noloco_p2p.dial_guard import DialGuard
from noloco_p2p.errors import Unreachable
from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.swarm import household
from noloco_p2p.swarm.address_book import AddressBook
from noloco_p2p.swarm.clock import Offset
from noloco_p2p.swarm.dialer import Dialer
from noloco_p2p.swarm.household import (
    GRPC,
    MAX_FOUND,
    MAX_HOSTS,
    SERVICE,
    Found,
    Household,
    Interface,
    mark_of,
    nearby,
    own_interfaces,
    read,
)
from noloco_p2p.swarm.node import SwarmNode

HERE = [Interface("192.168.1.7/24"), Interface("10.0.0.7/30")]
PEER = identity_of("peer").peer_id
RUN = "ab" * 32


class Answered(AsyncServiceInfo):
    """A service that has been asked: nothing is sent."""

    async def async_request(self, *_: object, **__: object) -> bool:
        return True


def info_of(
    *hosts: str, name: str = f"{mark_of(RUN)}-{PEER}", grpc: bytes = b"31337", port: int = 31338
) -> AsyncServiceInfo:
    addresses = [ipaddress.ip_address(host).packed for host in hosts]
    return Answered(SERVICE, f"{name}.{SERVICE}", port=port, properties={GRPC: grpc}, addresses=addresses)


def test_a_service_names_a_peer_and_its_two_ports() -> None:
    found = read(info_of("192.168.1.9"), HERE)
    assert found is not None
    assert found == Found(PEER, ("192.168.1.9",), 31337, 31338)
    assert found.multiaddrs() == [f"/ip4/192.168.1.9/tcp/31338/p2p/{PEER}"]
    assert found.grpc() == ["192.168.1.9:31337"]


@pytest.mark.parametrize(
    "info",
    [
        info_of("8.8.8.8"),
        info_of("192.168.2.9"),
        info_of("127.0.0.1"),
        info_of("192.168.1.7"),
        info_of(),
        info_of("192.168.1.9", grpc=b"0"),
        info_of("192.168.1.9", grpc=b"x" * 200),
        info_of("192.168.1.9", port=0),
        info_of("192.168.1.9", name="printer"),
    ],
    ids=["public", "other subnet", "loopback", "this machine", "no address", "port 0", "no port", "libp2p 0", "name"],
)
def test_what_does_not_lead_to_a_peer_of_this_network_is_ignored(info: AsyncServiceInfo) -> None:
    assert read(info, HERE) is None


def test_a_peer_has_few_addresses() -> None:
    assert len(nearby((f"192.168.1.{number}" for number in range(100, 200)), HERE)) == MAX_HOSTS


def test_the_mark_does_not_show_the_run() -> None:
    assert len(mark_of(RUN)) == 8
    assert mark_of(RUN) != mark_of("cd" * 32)
    assert mark_of(RUN) not in RUN


def test_a_peer_on_loopback_is_in_no_local_network() -> None:
    assert own_interfaces("127.0.0.1") == []


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE_S))


class Home:
    """One side: a household on a loopback address, which stands for a local network. It hears of itself, too."""

    def __init__(self, name: str, interface: str, run: str = RUN) -> None:
        self.peer_id = identity_of(name).peer_id
        self.found: dict[str, Sequence[str]] = {}
        self.asked: list[str] = []
        self.records: list[Candidate] = []
        self.answers = True
        self.household = Household(
            self.peer_id,
            run,
            [Interface(interface)],
            live=lambda: self.records,
            on_found=self.found.__setitem__,
            ask=self._ask,
        )

    async def _ask(self, candidate: Candidate) -> None:
        self.asked.append(candidate.address)
        if not self.answers:
            raise Unreachable("another peer is there", peer=candidate.peer_id)


def test_peers_of_one_run_find_each_other_by_multicast() -> None:
    async def main() -> None:
        here, there, stranger = Home("a", "127.0.0.1/8"), Home("b", "127.0.0.2/8"), Home("c", "127.0.0.3/8", "cd" * 32)
        homes = (here, there, stranger)
        for port, each in enumerate(homes, 4001):
            each.household.look()
            each.household.announce(grpc_port=port, libp2p_port=port + 1000)
        await until(lambda: there.peer_id in here.found and here.peer_id in there.found)
        assert here.found == {there.peer_id: [f"/ip4/127.0.0.2/tcp/5002/p2p/{there.peer_id}"]}
        assert not stranger.found
        for each in homes:
            await each.household.stop()

    run(main)


def test_a_peer_is_near_once_it_has_proven_its_identity_at_its_address_here() -> None:
    async def main() -> None:
        here, there = Home("a", "127.0.0.1/8"), Home("b", "127.0.0.2/8")
        far = Candidate(there.peer_id, "198.51.100.7:1", can_be_called=False)
        here.answers = False
        here.household.look()
        there.household.look()
        there.household.announce(grpc_port=4002, libp2p_port=5002)
        await until(lambda: bool(here.found))
        assert not here.asked, "without its record there is no session key to prove"
        here.records = [far]
        await until(lambda: bool(here.asked))
        assert here.household.reached([far]) == [far]
        here.answers = True
        here.household._check_at_s.clear()
        await until(lambda: here.household.is_near(there.peer_id))
        (near,) = here.household.reached([far])
        assert (near.address, near.can_be_called) == ("127.0.0.2:4002", True)
        await there.household.stop()
        await until(lambda: not here.household.is_near(there.peer_id))
        await here.household.stop()

    run(main)


def test_a_network_that_is_down_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        home = Home("a", "127.0.0.1/8")
        home.household.look()
        logging.getLogger("zeroconf").warning("Error with socket 9: Network is unreachable", exc_info=OSError())
        await home.household.stop()
        assert not caplog.records

    run(main)


def test_a_liar_that_names_hundreds_of_peers_is_heard_for_a_few() -> None:
    async def main() -> None:
        home = Home("a", "127.0.0.1/8")
        nowhere = cast(Zeroconf, None)
        for number in range(300):
            name = f"{mark_of(RUN)}-{identity_of(str(number)).peer_id}.{SERVICE}"
            home.household._on_change(nowhere, SERVICE, name, ServiceStateChange.Added)
        assert home.household._named.qsize() == MAX_FOUND

    run(main)


async def dialled_after(
    announced: Sequence[tuple[AsyncServiceInfo, ServiceStateChange]], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Sequence[str]], set[str]]:
    """Return what a dialler still has at the end, and all multiaddrs that it got."""
    home, dialled = Home("a", "127.0.0.1/8"), set[str]()

    def dial(peer_id: str, multiaddrs: Sequence[str]) -> None:
        home.found[peer_id] = multiaddrs
        dialled.update(multiaddrs)

    home.household._on_found = dial
    services = {info.name: info for info, _ in announced}
    home.household.look()
    monkeypatch.setattr(household, "AsyncServiceInfo", lambda _, name: services[name])
    for info, change in announced:
        services[info.name] = info
        home.household._on_change(cast(Zeroconf, None), SERVICE, info.name, change)
        await until(home.household._named.empty)
    await home.household.stop()
    return {peer: ways for peer, ways in home.found.items() if ways}, dialled


def test_goodbyes_make_no_room_for_a_scan_of_the_local_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def services() -> Iterator[tuple[AsyncServiceInfo, ServiceStateChange]]:
        for number in range(100):
            info = info_of(f"127.0.1.{number}", name=f"{mark_of(RUN)}-{identity_of(str(number)).peer_id}")
            yield info, ServiceStateChange.Added
            yield info, ServiceStateChange.Removed

    async def main() -> None:
        left, dialled = await dialled_after(list(services()), monkeypatch)
        assert not left
        assert len(dialled) == MAX_FOUND

    run(main)


def test_a_peer_that_moves_again_and_again_is_followed_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        places = [(info_of(f"127.0.1.{number}"), ServiceStateChange.Updated) for number in range(100)]
        left, dialled = await dialled_after(places, monkeypatch)
        assert len(dialled) == MAX_FOUND
        assert list(left) == [PEER]

    run(main)


def test_repeated_words_of_a_peer_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        same = [(info_of("127.0.1.1"), ServiceStateChange.Updated)] * 100
        other = (info_of("127.0.1.2"), ServiceStateChange.Updated)
        left, _ = await dialled_after([*same, other], monkeypatch)
        assert left == {PEER: [f"/ip4/127.0.1.2/tcp/31338/p2p/{PEER}"]}

    run(main)


def test_addresses_of_the_local_network_are_dialled_and_not_kept() -> None:
    nearby, known = f"/ip4/192.168.1.9/tcp/31338/p2p/{PEER}", f"/ip4/203.0.113.5/tcp/31338/p2p/{PEER}"
    dialled: list[Sequence[str]] = []

    class Node:
        def neighbours(self) -> set[str]:
            return set()

        async def dial(self, _: str, ways: Sequence[str]) -> Offset:
            dialled.append(ways)
            return Offset(0.0, 0.0)

        async def hosts_of(self, _: str) -> set[str]:
            return set()

    async def met() -> None:
        pass

    async def main() -> None:
        book = AddressBook()
        book.remember(PEER, [known])
        dialer = Dialer(
            cast(SwarmNode, Node()),
            {},
            book,
            own_peer_id="me",
            every_s=0.01,
            heard_of=lambda: (),
            on_met=met,
            on_wrong_clock=lambda: None,
            guard=DialGuard(only_public=True),
        )
        dialer.dial_nearby(PEER, [nearby])
        await dialer.dial()
        dialer.dial_nearby(PEER, ())
        await until_dialled_again(dialer)
        assert dialled == [[way.partition("/p2p/")[0] for way in ways] for ways in ([nearby, known], [known])]
        assert book.addresses() == {PEER: (known,)}

    async def until_dialled_again(dialer: Dialer) -> None:
        while len(dialled) < 2:
            await dialer.dial()

    run(main)
