"""Which texts are hosts, which hosts are private, and how often one may be dialled."""

from __future__ import annotations

import asyncio

import pytest

from noloco_p2p.dial_guard import FAILURES_A_MINUTE, DialGuard
from noloco_p2p.errors import Unreachable
from noloco_p2p.hosts import is_host, is_port, is_public, network_of
from noloco_p2p.rates import MAX_KEYS, Rates

PUBLIC = "203.0.114.7"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    "text", ["", "unix:", "unix:/run/x", "a/b", "dns:///x", "127.1", "0x7f.1", "2130706433", "224.0.0.1", "::", "a b"]
)
def test_what_is_no_host(text: str) -> None:
    assert not is_host(text)


@pytest.mark.parametrize("text", ["192.0.2.7", "[2001:db8::7]", "2001:db8::7", "peer.example.org", "localhost"])
def test_what_is_a_host(text: str) -> None:
    assert is_host(text)


@pytest.mark.parametrize(
    ("text", "is_one"), [("1", True), ("65535", True), ("0", False), ("65536", False), ("²", False)]
)
def test_ports(text: str, is_one: bool) -> None:
    assert is_port(text) == is_one


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.17.0.2",
        "::1",
        "::ffff:10.0.0.1",
        "fe80::1",
        "nas.local",
        "bootstrap",
        "noloco-0.noloco.default.svc.cluster.local",
        "",
    ],
)
def test_private_hosts(host: str) -> None:
    assert not is_public(host)


@pytest.mark.parametrize(
    "host",
    [
        "fec0::1",  # site-local
        "::7f00:1",  # IPv4-compatible: 127.0.0.1
        "::ffff:0:192.168.0.1",  # IPv4-translated
        "2002:c0a8:101::1",  # 6to4: 192.168.1.1
        "64:ff9b::c0a8:101",  # NAT64: 192.168.1.1
        "64:ff9b:1::c0a8:101",  # NAT64 with a local prefix
        "100::1",  # discard-only
    ],
)
def test_private_hosts_in_other_words(host: str) -> None:
    assert not is_public(host)


@pytest.mark.parametrize(
    "host", [PUBLIC, f"::ffff:{PUBLIC}", f"64:ff9b::{PUBLIC}", "2002:cb00:7207::1", "2606:4700::1111", "example.org"]
)
def test_public_hosts(host: str) -> None:
    assert is_public(host)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2::7", "2001:db8:1::/48"),
        ("::ffff:192.0.2.7", "192.0.2.0/24"),
        ("fe80::1%eth0", "fe80::/48"),
    ],
)
def test_the_network_of_a_host(host: str, network: str) -> None:
    assert network_of(host) == network


def test_rates_are_of_each_key_and_come_back_with_time() -> None:
    clock = Clock()
    rates = Rates(per_s=0.5, at_once=2, clock=clock)
    assert [rates.take("a") for _ in range(3)] == [True, True, False]
    assert rates.take("b")
    clock.now_s += 2.0
    assert [rates.take("a") for _ in range(2)] == [True, False]
    rates.give_back("a")
    assert rates.take("a")
    clock.now_s += 86_400.0
    assert [rates.take("a") for _ in range(3)] == [True, True, False], "a quiet day is not saved up"
    for index in range(2 * MAX_KEYS):
        rates.take(str(index))
    assert len(rates) == MAX_KEYS


def ways(guard: DialGuard, peer: str, host: str, tries: int) -> int:
    async def main() -> int:
        given = 0
        for _ in range(tries):
            try:
                await guard.way(peer, host)
                given += 1
            except Unreachable:
                pass
        return given

    return asyncio.run(main())


def test_a_host_where_nobody_is_found_is_dialled_a_few_times_a_minute_whoever_names_it() -> None:
    clock = Clock()
    guard = DialGuard(clock=clock)
    assert sum(ways(guard, f"liar {number}", PUBLIC, 10) for number in range(50)) == FAILURES_A_MINUTE
    clock.now_s += 60.0
    assert sum(ways(guard, f"liar {number}", PUBLIC, 10) for number in range(50)) == FAILURES_A_MINUTE


def test_in_the_first_minute_a_host_is_dialled_as_often_at_once_and_as_often_again() -> None:
    clock = Clock()
    guard = DialGuard(clock=clock)
    minutes = list[int]()
    for _ in range(3):
        minutes.append(0)
        for _ in range(600):
            minutes[-1] += ways(guard, "liar", PUBLIC, 1)
            clock.now_s += 0.1
    assert FAILURES_A_MINUTE < minutes[0] <= 2 * FAILURES_A_MINUTE
    assert all(most <= FAILURES_A_MINUTE for most in minutes[1:])


def test_a_peer_that_was_reached_is_dialled_again_whatever_others_say_of_its_host() -> None:
    guard = DialGuard(clock=Clock())
    assert ways(guard, "honest", PUBLIC, 1) == 1
    guard.reached("honest", PUBLIC)
    assert ways(guard, "liar", PUBLIC, 100) == FAILURES_A_MINUTE
    assert ways(guard, "honest", PUBLIC, 5) == 5


def test_a_name_that_means_a_private_address_is_refused_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", ("10.0.0.5", 0))]

    async def main(guard: DialGuard) -> str:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return await guard.way("peer", "rebound.example.org")

    with pytest.raises(Unreachable, match="private address"):
        asyncio.run(main(DialGuard(only_public=True)))
    assert asyncio.run(main(DialGuard())) == "10.0.0.5"
