"""The only door between the training thread and the network thread.

The network thread takes snapshots and hands over committed swaps. The training thread never waits for the network,
except with `outer.wait` and in closing swaps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_p2p.gossip.coder import Coding
from noloco_p2p.gossip.units import Ages, Slice, Units

SMOOTHED_STEPS = 8  # over which the duration of a step is averaged
ANSWER_MORE_S = 10.0  # for which a call from the training thread may take longer than it waits


@dataclass(frozen=True, slots=True)
class Halves:
    """The half-differences of a swap, as they are added to the weights.

    `values` is an fp32 tensor on the CPU. `moved` is its root mean square, `distance` that of the differences to the
    partner, and `magnitude` that of this peer's own weights. `num_clipped` of `num_pieces` pieces have been clipped.
    """

    values: Tensor
    moved: float = 0.0
    distance: float = 0.0
    magnitude: float = 0.0
    num_pieces: int = 0
    num_clipped: int = 0


def decoded(coding: Coding, partner: str) -> Halves:
    """Return the half-differences as they are."""
    return Halves(torch.cat([coding.half_difference(index) for index in range(len(coding.chunks))]))


@dataclass(frozen=True, slots=True)
class Committed:
    """A swap whose half-differences may be added to the weights, from element `start` of the flat vector.

    `progress` is what the partner told when this peer had taken `told_step` inner steps. `snapshot_step` is the inner
    step after which the snapshot was taken. `num_live` is the number of live peers, including this one.
    """

    swap_id: bytes
    partner: str
    progress: float
    told_step: int
    part: Slice
    start: int
    halves: Halves
    snapshot_step: int
    seconds: float
    num_live: int


class Exchange:
    """Passes snapshots and half-differences between the two threads.

    `loop` is the loop of the network thread. In a simulation, both sides run on this loop.

    Attributes:
        step: The number of inner steps of this replica. During closing swaps, it counts swaps instead.
        step_s: The duration of an inner step, or 0 before the second one.
        progress: The position of this peer in the schedule of the run. The training thread sets it.
        read: A function that copies elements [start, stop) of the weights, on any thread. If it is None, the training
            thread copies them in `serve`.
        judge: A function that returns the half-differences of a committed swap, on any thread. It may overwrite the
            snapshot with them.
        codes_beside: Whether coding takes no processor time from training, because an accelerator trains.
        is_at_rest: Whether training is over, so that closing swaps may follow each other at once.
        only_answers: Whether this peer makes no offers, because only others still need closing swaps.
        is_open: With `outer.wait`, whether training waits for a swap.
        has_diverged: Whether a snapshot had non-finite weights.
        is_closed: Whether this peer has stopped, or swaps through another exchange.
        is_replaced: Whether this peer swaps through another exchange.
    """

    def __init__(self, units: Units, loop: asyncio.AbstractEventLoop, *, progress: float = 0.0) -> None:
        self.units = units
        self.ages = Ages(units.num_units)
        self.step = 0
        self.step_s = 0.0
        self.added_s = 0.0  # running mean of the time that the training thread needs to apply a swap
        self.progress = progress
        self.read: Callable[[int, int], Tensor] | None = None
        self.judge: Callable[[Coding, str], Halves] = decoded
        self.codes_beside = False
        self.is_at_rest = False
        self.only_answers = False
        self.is_open = False
        self.is_closed = self.is_replaced = False
        self.has_diverged = False
        self.num_live: Callable[[], int] = lambda: 1
        self.has_partners: Callable[[], bool] = lambda: False  # whether any other peer may be training
        self.on_open: Callable[[], object] = lambda: None  # called on the network thread
        self.on_close: Callable[[], object] = lambda: None  # likewise
        self._loop = loop
        self._wanted: deque[tuple[Slice, asyncio.Future[tuple[Tensor, int]]]] = deque()
        self._committed: deque[Committed] = deque()
        self._news = asyncio.Event()  # on the network thread: a swap has been committed
        self._last_step_s: float | None = None

    # the training thread

    def step_taken(self, now_s: float) -> None:
        """Record that an inner step has ended at `now_s`."""
        if self._last_step_s is not None:
            took_s = now_s - self._last_step_s
            self.step_s += (took_s - self.step_s) / min(SMOOTHED_STEPS, self.step) if self.step_s else took_s
        self.step, self._last_step_s = self.step + 1, now_s

    def paused(self) -> None:
        """Do not count the time until the next step as the duration of a step."""
        self._last_step_s = None

    def collect(self) -> list[Committed]:
        """Return the swaps that have been committed since the last call. Call `applied` for each of them."""
        return [self._committed.popleft() for _ in range(len(self._committed))]

    def applied(self, swap: Committed, *, seconds: float) -> None:
        """Release the units of a swap whose half-differences have been added, which took `seconds`."""
        self.added_s += (seconds - self.added_s) / SMOOTHED_STEPS if self.added_s else seconds
        self._loop.call_soon_threadsafe(self._applied, swap)

    def serve(self, read: Callable[[int, int], Tensor]) -> None:
        """Copy the slices that the network thread asked for. `read(start, stop)` returns a new fp32 tensor."""
        for _ in range(len(self._wanted)):
            part, answer = self._wanted.popleft()
            values = read(*self.units.bounds(part))
            self._loop.call_soon_threadsafe(_answer, answer, values, self.step)

    def hurry(self) -> None:
        """End a wait of the training thread. This is safe on any thread and in a signal handler."""
        self._loop.call_soon_threadsafe(self._news.set)

    def wait_until_settled(self, timeout_s: float) -> None:
        """Block as `settled` does."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.settled(timeout_s), self._loop).result(timeout_s + ANSWER_MORE_S)

    # the network thread

    async def settled(self, timeout_s: float) -> None:
        """Let this peer swap, and wait until one swap has been committed, for at most `timeout_s`."""
        self.is_open = True
        self.on_open()
        self._news.clear()
        if not self._committed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        self.is_open = False

    async def snapshot(self, part: Slice) -> tuple[Tensor, int]:
        """Return the values of a slice after the next inner step, and the number of that step.

        The wait has no deadline of its own, because an inner step may take minutes. The partner's patience limits it.
        """
        answer = self._loop.create_future()
        self._wanted.append((part, answer))
        return await answer

    def close(self) -> None:
        self.is_closed = True
        self.on_close()

    def committed(self, swap: Committed) -> None:
        self.is_open = False
        self._committed.append(swap)
        self._news.set()

    def _applied(self, swap: Committed) -> None:
        # Before, a snapshot would lack the half-difference, and the same difference would be applied twice.
        self.ages.end(swap.part, mixed_at=swap.snapshot_step)


def _answer(answer: asyncio.Future[tuple[Tensor, int]], values: Tensor, step: int) -> None:
    if not answer.done():  # the swap may have failed meanwhile
        answer.set_result((values, step))
