"""Two peers behind one router that does not return packets to its inside, as real processes in network namespaces."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import netlab
import pytest
from harness.processes import Command, PeerProcess, small_spec, until, write_spec

from noloco_p2p.control import ask

ABROAD = "45.77.0.1"  # where the bootstrap is
ROUTER = "45.77.0.9"  # the address that both peers announce, and which leads nowhere from inside


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


@contextmanager
def home() -> Iterator[list[tuple[str, str]]]:
    """Yield (namespace, address) of a machine abroad, which is also the switch at home, and of two machines at home."""
    hosts = [ABROAD, "192.168.77.1", "192.168.77.2"]
    machines = [(f"noloco-home-{os.getpid()}-{number}", host) for number, host in enumerate(hosts)]
    (abroad, _), *others = machines
    try:
        for name, _ in machines:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"-n {abroad} addr add {ABROAD}/32 dev lo")
        ip(f"-n {abroad} link add switch type bridge")
        ip(f"-n {abroad} addr add 192.168.77.254/24 dev switch")
        ip(f"-n {abroad} link set switch up")
        for number, (name, address) in enumerate(others):
            ip(f"-n {name} link add cable type veth peer name cable{number} netns {abroad}")
            ip(f"-n {abroad} link set cable{number} master switch up")
            ip(f"-n {name} addr add {address}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} route add default via 192.168.77.254")
            ip(f"-n {name} route add blackhole {ROUTER}")
        yield machines
    finally:
        for name, _ in machines:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_peers_behind_one_router_swap_at_their_private_addresses(tmp_path: Path) -> None:
    file, door = write_spec(small_spec("home"), tmp_path), tmp_path / "door"
    with home() as ((abroad, there), (name, address), (other_name, other_address)):
        flags = ("--state-dir", tmp_path / "boot", "--listen", f"{there}:0", "--address-file", door)
        join = ("--announce", ROUTER)
        with Command("bootstrap", *flags, log=tmp_path / "boot.txt", namespace=abroad) as bootstrap:
            bootstrap.wait_for("others can join with:")
            first = PeerProcess(file, tmp_path / "one", "--bootstrap", f"@{door}", *join, host=address, namespace=name)
            with (
                first as one,
                PeerProcess(one.ticket, tmp_path / "two", *join, host=other_address, namespace=other_name) as two,
            ):
                two.swap_with(one)
                one.swap_with(two)
                ways = until(lambda: (ask(two.folder, "status") or {}).get("neighbours"), what="neighbours")
                assert list(ways.values()) == ["direct"]
