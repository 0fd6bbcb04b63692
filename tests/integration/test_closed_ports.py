"""Two peers at homes that let connections out and none in: real processes in network namespaces of their own. A
bootstrap, which everybody reaches, is the only entrance, dials back, and is the only relay."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import netlab
import pytest
from harness.processes import Command, PeerProcess, small_spec, until, write_spec

from noloco_p2p.control import ask

pytestmark = pytest.mark.slow


def why_not() -> str:
    try:
        netlab.check_rights(os.geteuid())
    except netlab.LabError as error:
        return str(error)
    return ""


def relayed(peer: PeerProcess) -> dict[str, Any] | None:
    """The reachability that a peer reports once it has a reservation at a relay."""
    found = (ask(peer.folder, "status") or {}).get("reach", {})
    return found if found.get("state") == "relayed" else None


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_peers_behind_closed_ports_swap_by_a_relay_and_are_told_what_to_open(tmp_path: Path) -> None:
    file = write_spec(small_spec("closed"), tmp_path)
    with netlab.NetLab([netlab.home(rate_mbit_s=0, round_trip_ms=2)] * 3) as lab:
        lab.let_nothing_in(1, 2)
        middle, *homes = lab.nodes
        door = tmp_path / "door"
        flags = ("--state-dir", tmp_path / "boot", "--listen", f"{middle.address}:0", "--address-file", door)
        with Command("bootstrap", *flags, log=tmp_path / "boot.txt", namespace=middle.namespace) as bootstrap:
            bootstrap.wait_for("others enter with:")
            where = [partial(PeerProcess, namespace=home.namespace, host=home.address) for home in homes]
            with where[0](file, tmp_path / "one", "--bootstrap", f"@{door}") as one:
                found = until(lambda: relayed(one), what="a relay for the first")
                assert "1 of 1 peers could not dial port" in found["sentence"]
                assert "forward TCP" in found["sentence"]
                with where[1](one.ticket, tmp_path / "two") as two:  # spec and state come by the tunnel
                    two.swap_with(one)
                    one.swap_with(two)
