"""Mappings of ports by the router: real requests to doubles of routers, and routers that lie or say nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine

import pytest
import uvloop
from harness.home_router import UpnpRouter
from harness.patience import PATIENCE_S

from noloco_p2p.swarm import port_mapping
from noloco_p2p.swarm.port_mapping import MappedPorts, NoMapping, PortMapping

OUTSIDE = "45.77.0.9"
PORTS = (31337, 31338)


def mapping(on_change: Callable[[], None] = lambda: None) -> PortMapping:
    made = PortMapping("192.168.1.7", ports=lambda: PORTS, on_change=on_change)
    made._local_host = "127.0.0.1"  # where the doubles are
    return made


def run(main: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE_S))


def test_upnp_maps_both_ports_and_removes_them() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        with UpnpRouter(OUTSIDE) as router:
            made = mapping()
            made.mapped = await made._ask()
            assert made.mapped == MappedPorts(OUTSIDE, PORTS)
            assert router.mapped == {31337: "127.0.0.1:31337", 31338: "127.0.0.1:31338"}
            await made.close()
            assert not router.mapped

    run(main)


def test_a_router_that_holds_a_request_up_is_not_asked_another_one() -> None:
    async def main() -> None:
        made, goes_on = mapping(), threading.Event()
        held = asyncio.create_task(made._beside(goes_on.wait))
        await asyncio.sleep(0)
        with pytest.raises(NoMapping, match="still processing"):
            await made._beside(made._map)
        assert made._thread is not None
        assert made._thread.daemon, "the process can end meanwhile"
        goes_on.set()
        assert await held

    run(main)


def test_a_port_that_another_machine_has_is_replaced() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        with UpnpRouter(OUTSIDE, refuses=frozenset({31338})) as router:
            mapped = await mapping()._ask()
            assert mapped
            assert mapped.ports[0] == 31337
            assert mapped.ports[1] in port_mapping.OTHER_PORTS
            assert router.mapped[mapped.ports[1]] == "127.0.0.1:31338"

    run(main)


def test_an_upnp_router_that_refuses_all_ports_is_of_no_use() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        made = mapping()
        with UpnpRouter(OUTSIDE, refuses=frozenset(range(65_536))), pytest.raises(NoMapping, match="Conflict"):
            await made._beside(made._map)

    run(main)


def test_a_mapping_is_announced_and_removed_at_the_end() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        with UpnpRouter(OUTSIDE) as router:
            changed = asyncio.Event()
            made = mapping(changed.set)
            task = asyncio.create_task(made.run())
            await changed.wait()
            task.cancel()
            assert made.mapped == MappedPorts(OUTSIDE, PORTS)
            assert router.mapped
            await made.close()
            assert not router.mapped
            assert made.mapped is None

    run(main)


def test_a_router_with_a_private_address_is_of_no_use() -> None:
    pytest.importorskip("miniupnpc")

    async def main() -> None:
        with UpnpRouter("100.64.0.9") as router:
            assert await mapping()._ask() is None
            assert not router.mapped, "what nobody can reach is removed"

    run(main)


@pytest.mark.parametrize("host", ["45.77.0.9", "127.0.0.1", "2001:db8::7"])
def test_no_router_is_asked_for_a_peer_that_needs_none(host: str) -> None:
    assert not PortMapping(host, ports=lambda: PORTS).asks
