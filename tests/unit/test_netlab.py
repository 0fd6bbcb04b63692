"""The links of the benchmarks shape, delay and drop as specified, as the figures depend on them."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import netlab
import pytest
from harness.patience import PATIENCE_S

PACKET_BYTES = 1250  # 0.1 ms at 100 Mbit/s


def fabric(*accesses: Any) -> Any:
    return netlab.Fabric(list(accesses), random.Random(0))


def send(links: Any, source: int, destination: int, *, at_s: float = 0.0, frame: bytes = b"") -> None:
    links.accept(frame, source=source, destination=destination, num_bytes=PACKET_BYTES, now_s=at_s)


def arrivals(links: Any) -> list[tuple[float, int, bytes]]:
    """Return (seconds, node, frame) of all frames on the way, at the times when the forwarding process would wake."""
    found = []
    while (next_s := links.next_s()) is not None:
        found += [(next_s, node, frame) for node, frame in links.deliver(next_s)]
    return found


def test_round_trip_of_two_homes_is_what_was_asked_for() -> None:
    links = fabric(*[netlab.home(rate_mbit_s=0, round_trip_ms=50)] * 2)
    send(links, 0, 1, frame=b"ping")
    (there_s, node, frame) = arrivals(links)[0]
    send(links, 1, 0, at_s=there_s)
    assert (node, frame) == (1, b"ping")
    assert arrivals(links)[0][0] == pytest.approx(0.05)


def test_an_uplink_is_shared_by_all_that_its_node_sends() -> None:
    links = fabric(*[netlab.home(rate_mbit_s=100, round_trip_ms=0)] * 3)
    for packet in range(10):
        send(links, 0, 1 + packet % 2)
    assert arrivals(links)[-1][0] == pytest.approx(10 * 1e-4)


def test_a_downlink_is_shared_by_all_that_send_to_its_node() -> None:
    links = fabric(*[netlab.home(rate_mbit_s=100, round_trip_ms=0)] * 3)
    for _ in range(10):
        send(links, 1, 0)
        send(links, 2, 0)
    last_s = arrivals(links)[-1][0]
    assert last_s == pytest.approx(20 * 1e-4, rel=0.05)


def test_directions_do_not_share_a_line() -> None:
    links = fabric(*[netlab.home(rate_mbit_s=100, round_trip_ms=0)] * 2)
    for _ in range(10):
        send(links, 0, 1)
        send(links, 1, 0)
    assert arrivals(links)[-1][0] == pytest.approx(10 * 1e-4)


def test_a_full_queue_drops_and_counts() -> None:
    line = netlab.home(rate_mbit_s=100, round_trip_ms=0, queue_ms=1.0)
    links = fabric(line, line)
    for _ in range(100):
        send(links, 0, 1)
    arrived, counters = len(arrivals(links)), links.counters[0]
    assert arrived == pytest.approx(11, abs=1)  # ten are queued, one is being sent
    assert arrived + counters.dropped_packets == 100
    assert counters.sent_bytes == 100 * PACKET_BYTES
    assert links.counters[1].received_bytes == arrived * PACKET_BYTES


def test_loss_has_the_share_that_was_asked_for() -> None:
    links = fabric(*[netlab.home(rate_mbit_s=0, round_trip_ms=0, loss=0.1)] * 2)
    for _ in range(5000):
        send(links, 0, 1)
    assert len(arrivals(links)) == pytest.approx(4500, abs=100)
    assert links.counters[0].lost_packets == pytest.approx(500, abs=100)


def test_jitter_delays_but_keeps_the_order() -> None:
    links = fabric(*[netlab.home(rate_mbit_s=0, round_trip_ms=20, jitter_ms=5)] * 2)
    for packet in range(200):
        send(links, 0, 1, at_s=packet * 1e-4, frame=bytes([packet]))
    came = arrivals(links)
    assert [frame[0] for _, _, frame in came] == list(range(200))
    delays_s = [when_s - packet * 1e-4 for packet, (when_s, _, _) in enumerate(came)]
    assert min(delays_s) >= 0.01
    assert 0.012 < max(delays_s) <= 0.0151


def test_a_partition_is_silent_until_it_heals() -> None:
    links = fabric(*[netlab.Access()] * 3)
    links.groups = [0, 0, 1]
    send(links, 0, 1)
    send(links, 0, 2)
    assert [node for _, node, _ in arrivals(links)] == [1]
    links.groups = [0, 0, 0]
    send(links, 0, 2, at_s=1.0)
    assert [node for _, node, _ in arrivals(links)] == [2]


def packet(source: bytes, destination: bytes, near: int, far: int) -> bytes:
    """Return a TCP packet with the offload header, as the TUN device delivers it."""
    addresses = bytes([10, 77, 0]) + source + bytes([10, 77, 0]) + destination
    header = bytes([0x45]) + bytes(8) + bytes([6]) + bytes(2) + addresses
    return netlab.OFFLOAD_HEADER.pack(0, 0, 0, 0, 0, 0) + header + near.to_bytes(2, "big") + far.to_bytes(2, "big")


def test_a_closed_node_lets_in_what_answers_it_and_nothing_else() -> None:
    links = fabric(*[netlab.Access()] * 2)
    links.closed = {0}
    out, answer = packet(b"\1", b"\2", 5000, 80), packet(b"\2", b"\1", 80, 5000)
    send(links, 1, 0, frame=answer)
    assert not arrivals(links)
    send(links, 0, 1, frame=out)
    send(links, 1, 0, frame=answer)
    send(links, 1, 0, frame=packet(b"\2", b"\1", 81, 5000))
    assert sorted(frame for _, _, frame in arrivals(links)) == sorted([out, answer])


def test_one_way_can_be_cut_alone() -> None:
    links = fabric(*[netlab.Access()] * 2)
    links.blocked = {(0, 1)}
    send(links, 0, 1, frame=b"lost")
    send(links, 1, 0, frame=b"here")
    assert [frame for _, _, frame in arrivals(links)] == [b"here"]


def test_a_packet_of_many_segments_counts_the_headers_of_each() -> None:
    header = netlab.OFFLOAD_HEADER.pack(1, 1, 52, 1448, 0, 0)
    frame = header + bytes(52 + 3 * 1448 + 10)
    assert netlab.wire_bytes(frame) == 4 * 52 + 3 * 1448 + 10
    plain = netlab.OFFLOAD_HEADER.pack(0, 0, 0, 0, 0, 0) + bytes(60)
    assert netlab.wire_bytes(plain) == 60


def test_only_ipv4_has_a_destination() -> None:
    header = netlab.OFFLOAD_HEADER.pack(0, 0, 0, 0, 0, 0)
    ipv4 = bytes([0x45]) + bytes(15) + bytes([10, 77, 0, 2])
    assert netlab.destination_address(header + ipv4) == bytes([10, 77, 0, 2])
    assert netlab.destination_address(header + bytes([0x60]) + bytes(39)) is None
    assert netlab.destination_address(header + ipv4[:10]) is None


def test_missing_rights_are_named(tmp_path: Path) -> None:
    with pytest.raises(netlab.LabError, match="root"):
        netlab.check_rights(1000)
    if shutil.which("ip"):
        with pytest.raises(netlab.LabError, match="no-tun"):
            netlab.check_rights(0, tun=tmp_path / "no-tun")


@pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not())
def test_a_closed_lab_leaves_neither_namespaces_nor_processes() -> None:
    with netlab.NetLab([netlab.home(rate_mbit_s=100, round_trip_ms=10)] * 2) as lab:
        names = [node.namespace for node in lab.nodes]
        sleeper = subprocess.Popen(["ip", "netns", "exec", names[0], "sleep", "600"])
        assert 10 <= netlab.round_trip_ms(lab, repeats=3) < 100
        lab.partition([0], [1])
        with pytest.raises(TimeoutError):
            netlab.round_trip_ms(lab, repeats=1, timeout_s=0.2)
        lab.heal()
        lab.set_access(0, netlab.home(rate_mbit_s=100, round_trip_ms=110))
        assert netlab.round_trip_ms(lab, repeats=3) >= 60
        assert lab.counters()[0].lost_packets == 1
    assert sleeper.wait(PATIENCE_S) < 0
    assert not any((netlab.NAMESPACES / name).exists() for name in names)
