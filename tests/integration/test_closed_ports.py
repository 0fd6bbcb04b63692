"""Two peers at homes that let connections out and none in, and one that everybody reaches: real processes in network
namespaces of their own. The founder is the only entrance, and the only relay."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from noloco_p2p.control import ask
from noloco_p2p.testing.processes import PeerProcess, small_spec, until, write_spec


def load_netlab() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "netlab.py"
    spec = importlib.util.spec_from_file_location("netlab", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


netlab = load_netlab()


def why_not() -> str:
    try:
        netlab.check_rights(os.geteuid())
    except netlab.LabError as error:
        return str(error)
    return ""


def reach(peer: PeerProcess) -> dict[str, Any]:
    return (ask(peer.folder, "status") or {}).get("reach", {})


@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_peers_behind_closed_ports_swap_with_everybody_and_are_told_what_to_open(tmp_path: Path) -> None:
    file = write_spec(small_spec("closed"), tmp_path)
    with netlab.NetLab([netlab.home(rate_mbit_s=0, round_trip_ms=2)] * 3) as lab:
        lab.let_nothing_in(1, 2)
        homes = [{"namespace": node.namespace, "host": node.address} for node in lab.nodes]
        with PeerProcess(file, tmp_path / "open", **homes[0]) as opened:
            ticket = opened.ticket
            with (
                PeerProcess(ticket, tmp_path / "one", **homes[1]) as one,
                PeerProcess(ticket, tmp_path / "two", **homes[2]) as two,
            ):
                for peer in (one, two):
                    peer.swap_with(opened)
                one.swap_with(two)  # by a tunnel: neither can be dialled
                assert reach(opened)["state"] == "direct"
                found = until(
                    lambda: seen if (seen := reach(one))["state"] == "relayed" else None, timeout_s=60, what="relayed"
                )
                assert "1 of 1 peers could not dial port" in found["sentence"]
                assert "forward TCP" in found["sentence"]
                # nobody has called in vain
                assert not any("failed" in peer.text for peer in (opened, one, two))
