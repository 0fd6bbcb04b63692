"""Peers behind routers and a firewall that let nobody in, as real processes in separate network namespaces.

A bootstrap with a public address is the only entry point, and the only peer that dials back and relays.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import netlab
import pytest
from harness.home_router import UpnpRouter
from harness.nat import Router, outer_address
from harness.patience import PATIENCE_S
from harness.processes import Command, PeerProcess, small_spec, until, write_spec

from noloco_p2p.control import ask

pytestmark = pytest.mark.slow


PUNCHABLE = Router("endpoint", "port")


def reach(peer: PeerProcess, state: str) -> str:
    """Wait until a peer reports this reachability, and return how it puts it."""

    def found() -> dict[str, Any] | None:
        shown = (ask(peer.folder, "status") or {}).get("reach", {})
        return shown if shown.get("state") == state else None

    return until(found, what=f"{state}: {peer.text}")["sentence"]


def neighbours(peer: PeerProcess) -> dict[str, str]:
    return (ask(peer.folder, "status") or {}).get("neighbours", {})


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
@pytest.mark.parametrize("way", ["punched", "relayed"])
def test_peers_that_nobody_reaches_swap_through_a_hole_or_by_the_relay(tmp_path: Path, way: str) -> None:
    """The bootstrap is the only machine that accepts connections. Spec and state come over the same relayed path."""
    file, door = write_spec(small_spec("closed"), tmp_path), tmp_path / "door"
    lab = {
        "punched": netlab.NetLab(3, routers=[PUNCHABLE, PUNCHABLE], behind=[None, 0, 1]),
        "relayed": netlab.NetLab(3, routers=[Router("port", "port")], behind=[None, 0, None], closed=[2]),
    }[way]
    with lab, ExitStack() as stack:
        middle, *homes = lab.nodes
        flags = ("--state-dir", tmp_path / "boot", "--listen", f"{middle.address}:0", "--address-file", door)
        boot = Command("bootstrap", *flags, log=tmp_path / "boot.txt", namespace=middle.namespace)
        stack.enter_context(boot).wait_for("others can join with:")
        where = [partial(PeerProcess, namespace=home.namespace, host=home.address) for home in homes]
        one = stack.enter_context(where[0](file, tmp_path / "one", "--bootstrap", f"@{door}"))
        assert "is a private address" in reach(one, "relayed")
        two = stack.enter_context(where[1](one.ticket, tmp_path / "two"))
        two.swap_with(one)
        one.swap_with(two)
        assert neighbours(two) == {one.peer_id: way}
        if way == "relayed":  # a firewall without a router
            told = reach(two, "relayed")
            assert "peers could not reach port" in told
            assert "forward TCP" in told


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_a_run_that_begins_behind_a_router_is_entered_at_the_ports_that_it_maps(tmp_path: Path) -> None:
    """The emulated router forwards all ports; the double in the peer's network says so by UPnP."""
    pytest.importorskip("miniupnpc")
    routers = [replace(PUNCHABLE, forwards_to=1)]
    with netlab.NetLab(2, routers=routers, behind=[None, 0]) as lab, ThreadPoolExecutor(1) as there:
        abroad, home = lab.nodes
        there.submit(netlab.enter, home.namespace).result(PATIENCE_S)
        outside, file = outer_address(0, routers[0]), write_spec(small_spec("mapped"), tmp_path)
        with (
            there.submit(UpnpRouter, outside, inside=home.address).result(PATIENCE_S) as router,
            PeerProcess(file, tmp_path / "one", namespace=home.namespace, host=home.address) as one,
            PeerProcess(one.ticket, tmp_path / "two", namespace=abroad.namespace, host=abroad.address) as two,
        ):
            two.swap_with(one)
            assert "which the router maps to this machine (UPnP)" in reach(one, "mapped")
            until(lambda: [*neighbours(two).values()] == ["mapped"], what="the record of the first at the second")
            assert len(router.mapped) == 2
            one.send(signal.SIGINT)
            one.wait()
            assert not router.mapped
