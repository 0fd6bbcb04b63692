"""Mappings of ports by the router: real requests to doubles of routers, and routers that lie or say nothing."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop
from harness.home_router import PmpRouter, UpnpRouter
from harness.patience import AT_ONCE_S, PATIENCE_S

from noloco_p2p.swarm import port_mapping
from noloco_p2p.swarm.port_mapping import MappedPorts, NatPmp, NoMapping, PortMapping, Upnp, clients_of, gateway

OUTSIDE = "45.77.0.9"
PORTS = (31337, 31338)


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE_S))


def test_nat_pmp_maps_both_ports_and_removes_them() -> None:
    async def main() -> None:
        with PmpRouter(OUTSIDE, shift=7, lease_s=1800) as router:
            client = NatPmp("127.0.0.1", router.port)
            mapping = await client.map(PORTS)
            assert mapping == MappedPorts(OUTSIDE, (31344, 31345), "NAT-PMP", 1800)
            assert router.mapped == {31337: 31344, 31338: 31345}
            await client.unmap(PORTS, mapping)
            assert not router.mapped

    run(main)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0",
        b"\xff" * 64,
        struct.pack("!BBHI", 0, 128, 3, 1) + bytes(8),
        struct.pack("!BBHI", 2, 128, 1, 1) + bytes(8),
        struct.pack("!BBHI", 0, 128, 0, 1) + b"\x2d\x4d\x00\x09",
    ],
    ids=["silence", "a byte", "noise", "refused", "PCP", "an answer to another question"],
)
def test_a_router_that_does_not_map_is_given_up_in_time(answer: bytes) -> None:
    async def main() -> None:
        with PmpRouter(OUTSIDE, answer=answer) as router, pytest.raises(NoMapping):
            async with asyncio.timeout(sum(port_mapping.PMP_TRIES_S) + AT_ONCE_S):
                await NatPmp("127.0.0.1", router.port).map(PORTS)

    run(main)


def test_upnp_maps_both_ports_and_removes_them() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        with UpnpRouter(OUTSIDE) as router:
            client = Upnp("127.0.0.1")
            mapping = await client.map(PORTS)
            assert mapping == MappedPorts(OUTSIDE, PORTS, "UPnP")
            assert router.mapped == {31337: "127.0.0.1:31337", 31338: "127.0.0.1:31338"}
            await client.unmap(PORTS, mapping)
            assert not router.mapped

    run(main)


def test_a_router_that_holds_a_request_up_is_not_asked_another_one() -> None:
    async def main() -> None:
        client, goes_on = Upnp("127.0.0.1"), threading.Event()
        held = asyncio.create_task(client._beside(goes_on.wait))
        await asyncio.sleep(0)
        with pytest.raises(NoMapping, match="still processing"):
            await client.map(PORTS)
        assert client._thread is not None
        assert client._thread.daemon, "the process can end meanwhile"
        goes_on.set()
        assert await held

    run(main)


def test_a_port_that_another_machine_has_is_replaced() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        with UpnpRouter(OUTSIDE, refuses=frozenset({31338})) as router:
            mapping = await Upnp("127.0.0.1").map(PORTS)
            assert mapping.ports[0] == 31337
            assert mapping.ports[1] in port_mapping.OTHER_PORTS
            assert router.mapped[mapping.ports[1]] == "127.0.0.1:31338"

    run(main)


def test_an_upnp_router_that_refuses_all_ports_is_of_no_use() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        with UpnpRouter(OUTSIDE, refuses=frozenset(range(65_536))), pytest.raises(NoMapping, match="Conflict"):
            await Upnp("127.0.0.1").map(PORTS)

    run(main)


def test_the_next_router_is_asked_and_the_mapping_removed_at_the_end() -> None:
    async def main() -> None:
        with PmpRouter(OUTSIDE, answer=b"no") as deaf, PmpRouter(OUTSIDE) as router:
            changed = asyncio.Event()
            clients = [NatPmp("127.0.0.1", each.port) for each in (deaf, router)]
            mapping = PortMapping(clients, ports=lambda: PORTS, on_change=changed.set)
            task = asyncio.create_task(mapping.run())
            await changed.wait()
            task.cancel()
            assert mapping.mapped == MappedPorts(OUTSIDE, PORTS, "NAT-PMP", 3600)
            assert router.mapped
            await mapping.close()
            assert not router.mapped
            assert mapping.mapped is None

    run(main)


def test_a_router_with_a_private_address_is_of_no_use() -> None:
    async def main() -> None:
        with PmpRouter("100.64.0.9") as router:
            clients = [NatPmp("127.0.0.1", router.port)]
            mapping = PortMapping(clients, ports=lambda: PORTS, on_change=lambda: pytest.fail("nothing changed"))
            assert await mapping._ask(PORTS) is None
            assert not router.mapped, "what nobody can reach is removed"

    run(main)


def test_the_gateway_is_that_of_the_default_route(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    head = "Iface Destination Gateway Flags\n"
    routes.write_text(head + "eth0 0001A8C0 00000000 0001\neth0 00000000 0101A8C0 0003\n")
    assert gateway(routes) == "192.168.1.1"
    for text in ("", head, head + "eth0 00000000 08080808 0003\n", head + "eth0 00000000 zz\n", "x\n00000000"):
        routes.write_text(text)
        assert gateway(routes) == ""
    assert gateway(tmp_path / "missing") == ""


@pytest.mark.parametrize("host", ["45.77.0.9", "127.0.0.1", "2001:db8::7"])
def test_no_router_is_asked_for_a_peer_that_needs_none(host: str) -> None:
    assert clients_of(host) == []
