"""This module builds a peer's round driver and the service that answers other peers."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from noloco_p2p.errors import Refused
from noloco_p2p.gossip.deadlines import INTERNET, Deadlines
from noloco_p2p.gossip.frames import FetchItem, FetchWant, Hello, PeerStatus, RefuseCode
from noloco_p2p.gossip.rate_estimators import StepRate
from noloco_p2p.gossip.round_driver import RoundDriver
from noloco_p2p.gossip.seams import Directory, FrameStream, Transport
from noloco_p2p.spec import Spec

Standing = tuple[Hello, str, int, float]  # hello, state (such as training or paused), round, progress
Serve = Callable[[FetchWant], AsyncGenerator[FetchItem]]


async def serve_nothing(want: FetchWant) -> AsyncGenerator[FetchItem]:
    """Refuse every request. Peers that have no state to serve use this function."""
    raise Refused("this peer does not serve its state", code=RefuseCode.BETWEEN_ROUNDS.name)
    yield


class PeerService:
    """Answers the calls of other peers. It implements `gossip.seams.Service`, which a transport's server calls."""

    def __init__(self, *, driver: RoundDriver, serve: Serve, status: Callable[[], Standing]) -> None:
        self._driver = driver
        self._serve = serve
        self._status = status
        self.num_calls = 0  # calls from other peers, including the ones that were refused

    def admit(self, hello: Hello) -> None:
        self.num_calls += 1
        self._driver.admit(hello)

    async def on_swap(self, stream: FrameStream) -> None:
        self.num_calls += 1
        await self._driver.on_swap(stream)

    async def on_status(self, swap_id: bytes) -> PeerStatus:
        hello, state, round_index, progress = self._status()
        return PeerStatus(hello, state, round_index, progress, self._driver.swap_state(swap_id))

    def on_fetch(self, want: FetchWant) -> AsyncGenerator[FetchItem]:
        return self._serve(want)


@dataclass(frozen=True, slots=True)
class RoundStack:
    driver: RoundDriver
    service: PeerService


def build_round_stack(
    spec: Spec,
    *,
    hello: Callable[[], Hello],
    transport: Transport,
    directory: Directory,
    executor: Executor,
    rng: random.Random,
    serve: Serve = serve_nothing,
    status: Callable[[], Standing] | None = None,
    deadlines: Deadlines = INTERNET,
    clock: Callable[[], float] = time.monotonic,
    on_corrupt: Callable[[str, str], None] = lambda peer_id, reason: None,
) -> RoundStack:
    """Build the driver and the service. Call it on the event loop.

    `serve` answers the requests of newcomers; it is usually a method of a `StateServer`. If `status` is None, the
    driver's own state is reported. `RoundDriver` describes the other arguments.
    """
    driver = RoundDriver(
        hello=hello,
        transport=transport,
        directory=directory,
        step_rate=StepRate(spec.first_inner_steps),
        executor=executor,
        rng=rng,
        deadlines=deadlines,
        clock=clock,
        on_corrupt=on_corrupt,
    )

    def own_status() -> Standing:
        return hello(), driver.peer_state, driver.round.index, driver.round.progress

    return RoundStack(driver, PeerService(driver=driver, serve=serve, status=status or own_status))
