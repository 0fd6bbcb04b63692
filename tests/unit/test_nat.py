"""The emulated routers and firewalls: what each kind of them forwards, packet by packet."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
from itertools import product
from pathlib import Path

import netlab
import pytest
from harness.nat import Breadth, Router, Routers
from harness.packets import NEEDS_CHECKSUM, OFFLOAD_HEADER, TCP, UDP, End, ends_of, with_ends

BREADTHS: tuple[Breadth, ...] = ("endpoint", "address", "port")
HOME, NEIGHBOUR, ONE, OTHER = 0, 1, 2, 3  # nodes: two behind a router, two on the internet


def end(address: str, port: int) -> End:
    return socket.inet_aton(address), port


def packet(source: End, destination: End, *, protocol: int = TCP, flags: int = 0, payload: bytes = b"word!") -> bytes:
    """Return a packet with the checksums that the kernel would compute."""
    addresses = source[0] + destination[0]
    header = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 40 + len(payload), 7, 0, 64, protocol, 0) + addresses)
    struct.pack_into("!H", header, 10, checksum(bytes(header)))
    size = 20 if protocol == TCP else 8
    body = bytearray(struct.pack("!HH", source[1], destination[1]) + bytes(size - 4) + payload)
    pseudo = addresses + struct.pack("!BBH", 0, protocol, len(body))
    total = ~checksum(pseudo) & 0xFFFF if flags else checksum(pseudo + bytes(body))
    struct.pack_into("!H", body, 16 if protocol == TCP else 6, total)
    return OFFLOAD_HEADER.pack(flags, 0, 0, 0, 0, 0) + bytes(header) + bytes(body)


def checksum(data: bytes) -> int:
    total = sum(word for (word,) in struct.iter_unpack("!H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Net:
    """A router with two nodes behind it, and two nodes on the internet."""

    def __init__(self, mapping: Breadth, filtering: Breadth) -> None:
        self.routers = Routers([Router(mapping, filtering)], [0, 0, None, None])

    def at(self, node: int, port: int) -> End:
        return end(self.routers.addresses[node], port)

    def send(self, node: int, port: int, to: End) -> tuple[int, End, End] | None:
        """Send a packet; return (node, source, destination) as it arrives, or None if it is dropped."""
        left = self.routers.leave(packet(self.at(node, port), to), node)
        if left is None or (arrived := self.routers.arrive(left[0])) is None:
            return None
        found = ends_of(arrived)
        assert found is not None
        return left[1], found[1], found[2]

    def seen(self, to_node: int, to_port: int) -> End:
        """Return the address of the home's port 5000 as a partner sees it."""
        found = self.send(HOME, 5000, self.at(to_node, to_port))
        assert found is not None
        return found[1]


@pytest.mark.parametrize("mapping", BREADTHS)
def test_a_port_outside_depends_on_as_much_of_the_partner_as_the_mapping_says(mapping: Breadth) -> None:
    net = Net(mapping, "endpoint")
    first = net.seen(ONE, 80)
    assert first[0] == socket.inet_aton("45.78.0.1")
    assert first[1] != 5000
    assert net.seen(ONE, 80) == first
    assert (net.seen(ONE, 81) == first) == (mapping != "port")
    assert (net.seen(OTHER, 80) == first) == (mapping == "endpoint")


@pytest.mark.parametrize("filtering", BREADTHS)
def test_in_comes_what_the_filtering_says(filtering: Breadth) -> None:
    net = Net("endpoint", filtering)
    seen = net.seen(ONE, 80)
    assert net.send(ONE, 80, seen) == (HOME, net.at(ONE, 80), net.at(HOME, 5000))
    assert bool(net.send(ONE, 81, seen)) == (filtering != "port")
    assert bool(net.send(OTHER, 80, seen)) == (filtering == "endpoint")
    assert net.send(ONE, 80, (seen[0], seen[1] + 1)) is None


def test_nothing_comes_back_to_the_inside_but_by_the_inside() -> None:
    net = Net("endpoint", "endpoint")
    seen = net.seen(ONE, 80)
    assert net.send(NEIGHBOUR, 6000, seen) is None
    assert net.send(NEIGHBOUR, 6000, net.at(HOME, 5000)) == (HOME, net.at(NEIGHBOUR, 6000), net.at(HOME, 5000))
    assert net.send(ONE, 80, net.at(HOME, 5000)) is None  # nobody outside can reach a private address


def test_a_router_behind_another_one_is_passed_both_ways() -> None:
    routers = Routers([Router("endpoint", "endpoint"), Router("endpoint", "port", behind=0)], [1, None])
    home, far = end(routers.addresses[0], 5000), end(routers.addresses[1], 80)
    left = routers.leave(packet(home, far), 0)
    assert left is not None
    found = ends_of(routers.arrive(left[0]) or b"")
    assert found is not None
    assert found[1][0] == socket.inet_aton("45.78.0.1")
    back = routers.leave(packet(far, found[1]), 1)
    assert back is not None
    assert ends_of(routers.arrive(back[0]) or b"") == (TCP, far, home)
    stranger = routers.leave(packet((far[0], 81), found[1]), 1)
    assert stranger is not None
    assert routers.arrive(stranger[0]) is None  # the carrier forwards it, the router at home does not


@pytest.mark.parametrize(("protocol", "flags"), list(product((TCP, UDP), (0, NEEDS_CHECKSUM))))
def test_checksums_fit_the_new_ends(protocol: int, flags: int) -> None:
    old, new = (end("10.0.0.1", 5000), end("45.77.0.2", 80)), (end("45.78.255.9", 20_000), end("45.77.0.2", 81))
    before = packet(*old, protocol=protocol, flags=flags, payload=b"even")
    assert with_ends(before, *new) == packet(*new, protocol=protocol, flags=flags, payload=b"even")


def test_a_router_that_forwards_its_ports_keeps_their_numbers() -> None:
    net = Net("endpoint", "port")
    net.routers = Routers([Router("endpoint", "port", forwards_to=HOME)], [0, 0, None, None])
    outside = end("45.78.0.1", 5000)
    assert net.send(ONE, 7000, outside) == (HOME, net.at(ONE, 7000), net.at(HOME, 5000))
    assert net.send(HOME, 5000, net.at(ONE, 7000)) == (ONE, outside, net.at(ONE, 7000))
    assert net.send(NEIGHBOUR, 5000, net.at(ONE, 7000)) != (ONE, outside, net.at(ONE, 7000))


def test_a_packet_takes_half_of_the_round_trip() -> None:
    way = netlab.Forwarding(Routers([], [None, None]), delay_s=0.025, closed=[])
    way.send(packet(end("45.77.0.1", 5000), end("45.77.0.2", 80)), 0, 1.0)
    assert way.arrived(1.02) == []
    assert [node for node, _ in way.arrived(1.025)] == [1]


def test_a_closed_node_lets_in_what_answers_it_and_nothing_else() -> None:
    way = netlab.Forwarding(Routers([], [None, None]), delay_s=0.0, closed=[0])
    closed, far = end("45.77.0.1", 5000), end("45.77.0.2", 80)
    way.send(packet(far, closed), 1, 0.0)
    assert way.arrived(0.0) == []
    way.send(packet(closed, far), 0, 0.0)
    way.send(packet(far, closed), 1, 0.0)
    way.send(packet((far[0], 81), closed), 1, 0.0)
    assert [node for node, _ in way.arrived(0.0)] == [1, 0]


def test_missing_rights_are_named(tmp_path: Path) -> None:
    with pytest.raises(netlab.LabError, match="root"):
        netlab.check_rights(1000)
    if shutil.which("ip"):
        with pytest.raises(netlab.LabError, match="no-tun"):
            netlab.check_rights(0, tun=tmp_path / "no-tun")


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_a_closed_lab_leaves_neither_namespaces_nor_processes() -> None:
    with netlab.NetLab(2) as lab:
        names = [node.namespace for node in lab.nodes]
        command = ["ip", "netns", "exec", names[0], "sh", "-c", "echo; exec sleep 600"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as sleeper:
            assert sleeper.stdout
            assert sleeper.stdout.readline(), "it is in the namespace"
            lab.close()
    assert sleeper.returncode < 0
    assert not any((netlab.NAMESPACES / name).exists() for name in names)
