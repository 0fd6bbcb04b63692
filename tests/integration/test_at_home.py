"""Two peers in one local network, with a ticket that leads nowhere from inside: real processes and real multicast."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import netlab
import pytest
from harness.processes import PeerProcess, small_spec, until, write_spec

from noloco_p2p.control import ask

ABROAD = "45.77.0.9"  # nobody is there: the router at home returns nothing to the inside


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@contextmanager
def home() -> Iterator[list[tuple[str, str]]]:
    """Yield (namespace, address) of two machines with one cable between them."""
    machines = [(f"noloco-home-{os.getpid()}-{number}", f"192.168.77.{number}") for number in (1, 2)]
    try:
        for name, _ in machines:
            ip(f"netns add {name}")
        (one, _), (other, _) = machines
        ip(f"-n {one} link add cable type veth peer name cable netns {other}")
        for name, address in machines:
            ip(f"-n {name} addr add {address}/24 dev cable")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} route add default dev cable")
        yield machines
    finally:
        for name, _ in machines:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_peers_in_one_household_swap_though_the_ticket_leads_outside(tmp_path: Path) -> None:
    file = write_spec(small_spec("home"), tmp_path)
    with home() as ((name, address), (other_name, other_address)):
        first = PeerProcess(file, tmp_path / "one", "--announce", ABROAD, host=address, namespace=name)
        with first as one, PeerProcess(one.ticket, tmp_path / "two", host=other_address, namespace=other_name) as two:
            two.swap_with(one)
            one.swap_with(two)
            ways = until(lambda: (ask(two.folder, "status") or {}).get("neighbours"), what="neighbours")
            assert list(ways.values()) == ["direct"]
