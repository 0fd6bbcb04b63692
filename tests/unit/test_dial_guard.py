"""Names that strangers announce and no name server answers for: they occupy few threads, and stop no other lookup."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from harness.patience import PATIENCE_S

from noloco_p2p import dial_guard
from noloco_p2p.dial_guard import (
    FAILED_LOOKUPS_A_MINUTE,
    FAILURES_A_MINUTE,
    KEEP_FAILED_S,
    KEEP_S,
    MAX_LOOKUPS,
    DialGuard,
)
from noloco_p2p.errors import Unreachable

RESOLVE_S = 1.0  # for lookups that nobody answers; those that somebody answers take a thread and a moment
ADDRESS = "192.0.2.7"


class Resolver:
    """The four threads of libuv. Lookups of names with "silent" in them last until `answer` is called."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.knows = True
        self._answered = threading.Event()
        self._pool = ThreadPoolExecutor(4)

    @property
    def num_silent(self) -> int:
        return sum(count for name, count in self.asked.items() if "silent" in name)

    async def getaddrinfo(self, name: str, *_: object, **__: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._look_up, name)

    def _look_up(self, name: str) -> Any:
        self.asked[name] += 1
        if "silent" in name:
            self._answered.wait(PATIENCE_S)
        if "silent" in name or not self.knows:
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ADDRESS, 0))]

    def answer(self) -> None:
        self._answered.set()
        self._pool.shutdown()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_guard, "RESOLVE_S", RESOLVE_S)


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    resolver = Resolver()
    yield resolver
    resolver.answer()


def run(resolver: Resolver, main: Callable[[], Awaitable[None]]) -> None:
    async def patched() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.getaddrinfo = resolver.getaddrinfo
        await main()

    asyncio.run(patched())


async def fails(guard: DialGuard, *names: str, is_given: bool = False) -> None:
    found = await asyncio.gather(
        *(guard.way("liar", name, is_given=is_given) for name in names), return_exceptions=True
    )
    assert all(isinstance(each, Unreachable) for each in found), found


@pytest.mark.usefixtures("short_deadline")
def test_names_that_nobody_answers_for_leave_others_their_lookups(resolver: Resolver) -> None:
    async def main() -> None:
        guard = DialGuard()
        await fails(guard, *(f"{number}.silent.example" for number in range(50)))
        assert resolver.num_silent == 1, "one lookup at a time for one domain"
        assert await guard.way("honest", "good.example.org") == ADDRESS
        assert await guard.way("honest", ADDRESS) == ADDRESS
        assert await guard.way("honest", "good.example.com", is_given=True) == ADDRESS

    run(resolver, main)


@pytest.mark.usefixtures("short_deadline")
def test_many_domains_stop_neither_known_names_nor_those_of_the_user(resolver: Resolver) -> None:
    async def main() -> None:
        clock = Clock()
        guard = DialGuard(clock=clock)
        assert await guard.way("honest", "good.example.org") == ADDRESS
        await fails(guard, *(f"a.silent{number}.example" for number in range(50)))
        clock.now_s += KEEP_S
        assert resolver.num_silent == MAX_LOOKUPS
        assert await guard.way("honest", "good.example.org") == ADDRESS, "as before"
        assert await guard.way("user", "good.example.com", is_given=True) == ADDRESS
        await fails(guard, *(f"a.silent{number}.example" for number in range(50)), is_given=True)
        assert resolver.num_silent == 2 * MAX_LOOKUPS, "a ticket can name silent hosts, too"

    run(resolver, main)


def test_a_name_that_was_not_resolved_is_not_looked_up_again_for_a_while(resolver: Resolver) -> None:
    async def main() -> None:
        clock = Clock()
        guard = DialGuard(clock=clock)
        resolver.knows = False
        for _ in range(3):
            await fails(guard, "name.example.org")
            assert resolver.asked["name.example.org"] == 1
        await fails(guard, *(f"{number}.example.org" for number in range(50)))
        assert resolver.asked.total() == FAILED_LOOKUPS_A_MINUTE, "for all names of a domain"
        clock.now_s += KEEP_FAILED_S
        resolver.knows = True
        assert await guard.way("honest", "name.example.org") == ADDRESS

    run(resolver, main)


def test_a_name_keeps_its_address_while_lookups_fail(resolver: Resolver) -> None:
    async def main() -> None:
        clock = Clock()
        guard = DialGuard(clock=clock)
        for knows in (True, False):
            resolver.knows = knows
            for _ in range(3):
                assert await guard.way("honest", "name.example.org") == ADDRESS
            clock.now_s += KEEP_S
        assert resolver.asked["name.example.org"] == 2

    run(resolver, main)


def test_a_given_host_may_be_private_and_its_dials_count_like_those_of_others(resolver: Resolver) -> None:
    async def main() -> None:
        guard = DialGuard(only_public=True, clock=Clock())
        for _ in range(10):
            assert await guard.way("given", "10.0.0.5", num_dials=2, is_given=True) == "10.0.0.5"
        await fails(guard, "10.0.0.5", is_given=True)
        guard.reached("given", "10.0.0.5", num_dials=2)
        assert await guard.way("another", "10.0.0.5", num_dials=2, is_given=True) == "10.0.0.5"
        await fails(guard, "10.0.0.5", is_given=True)

    run(resolver, main)


def test_a_scan_of_this_network_is_slow_though_strangers_claim_to_be_in_it() -> None:
    async def main(guard: DialGuard) -> int:
        num_dialled = 0
        for number in range(1, 255):
            with suppress(Unreachable):
                await guard.way(f"liar {number}", f"192.168.1.{number}")
                num_dialled += 1
        assert await guard.way("peer", "45.77.0.9") == "45.77.0.9"
        return num_dialled

    assert asyncio.run(main(DialGuard(only_public=True, clock=Clock()))) == FAILURES_A_MINUTE
    assert asyncio.run(main(DialGuard(clock=Clock()))) == 254, "in a swarm on private addresses, these are peers"
