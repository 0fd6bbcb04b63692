"""Two peers behind firewalls that allow outgoing connections only, as real processes in separate network namespaces.

A bootstrap with a public address is the only entry point, and the only peer that dials back and relays.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
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


def relayed(peer: PeerProcess) -> dict[str, Any] | None:
    """Return the reachability that a peer reports once it has a reservation at a relay, else None."""
    found = (ask(peer.folder, "status") or {}).get("reach", {})
    return found if found.get("state") == "relayed" else None


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_peers_behind_closed_ports_swap_and_are_told_what_to_open(tmp_path: Path) -> None:
    with netlab.NetLab(3, closed=[1, 2]) as lab:
        found, _ = swap_at_two_homes(lab, tmp_path)
    assert "1 of 1 peers could not reach port" in found["sentence"]
    assert "forward TCP" in found["sentence"]


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
@pytest.mark.parametrize(
    ("kind", "way"), [(Router("endpoint", "port"), "punched"), (Router("port", "port"), "relayed")]
)
def test_peers_behind_routers_swap_through_a_hole_or_by_the_relay(tmp_path: Path, kind: Router, way: str) -> None:
    with netlab.NetLab(3, routers=[kind, kind], behind=[None, 0, 1]) as lab:
        found, neighbours = swap_at_two_homes(lab, tmp_path)
    assert "is a private address" in found["sentence"]
    assert list(neighbours.values()) == [way]


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_a_run_that_begins_behind_a_router_is_entered_at_the_ports_that_it_maps(tmp_path: Path) -> None:
    """The emulated router forwards all ports; the double in the peer's network says so by UPnP."""
    pytest.importorskip("miniupnpc")
    routers = [Router("endpoint", "port", forwards_to=1)]
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
            found = until(lambda: mapped(one), what="a dial-back to the mapped port")
            assert "which the router maps to this machine (UPnP)" in found["sentence"]
            until(lambda: neighbours(two) == ["mapped"], what="the record of the first at the second")
            assert len(router.mapped) == 2
            one.send(signal.SIGINT)
            one.wait()
            assert not router.mapped


def mapped(peer: PeerProcess) -> dict[str, Any] | None:
    found = (ask(peer.folder, "status") or {}).get("reach", {})
    return found if found.get("state") == "mapped" else None


def neighbours(peer: PeerProcess) -> list[str]:
    return list((ask(peer.folder, "status") or {}).get("neighbours", {}).values())


def swap_at_two_homes(lab: netlab.NetLab, tmp_path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the reachability that the first reports, and the neighbours that the second reports after a swap."""
    file = write_spec(small_spec("closed"), tmp_path)
    middle, *homes = lab.nodes
    door = tmp_path / "door"
    flags = ("--state-dir", tmp_path / "boot", "--listen", f"{middle.address}:0", "--address-file", door)
    with Command("bootstrap", *flags, log=tmp_path / "boot.txt", namespace=middle.namespace) as bootstrap:
        bootstrap.wait_for("others can join with:")
        where = [partial(PeerProcess, namespace=home.namespace, host=home.address) for home in homes]
        with where[0](file, tmp_path / "one", "--bootstrap", f"@{door}") as one:
            found = until(lambda: relayed(one), what="a relay for the first")
            with where[1](one.ticket, tmp_path / "two") as two:  # spec and state come over the same relayed path
                two.swap_with(one)
                one.swap_with(two)
                return found, (ask(two.folder, "status") or {})["neighbours"]
