"""The round of now of one peer, as the rooms that move it on share it: seeking, answering, swapping and ending.

Lives on the event loop. A decision and the change of state that it calls for are one step without an await between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from noloco_p2p.errors import PeerError, Unreachable
from noloco_p2p.gossip.frames import Boundary, Hello, SectionName
from noloco_p2p.gossip.goodput import Goodput
from noloco_p2p.gossip.layout import ModelLayout
from noloco_p2p.gossip.outcome import Correction, LonelyCause
from noloco_p2p.gossip.pace import Pace
from noloco_p2p.gossip.pairing import Pairing
from noloco_p2p.gossip.pipeline import Staged
from noloco_p2p.gossip.round import Phase, Round
from noloco_p2p.gossip.round_length import LinkMeasure
from noloco_p2p.gossip.running import Running
from noloco_p2p.gossip.seams import Directory
from noloco_p2p.gossip.sections import SectionPlan

log = logging.getLogger(__name__)

POLL_S = 0.1  # how often the directory is looked at for newcomers while a partner is sought
LAST_LOOK_S = 1.0  # at its boundary a peer without a partner looks for one so long, however many it could still ask
TRAILING_RETRY_S = 1.0
TRAILING_SHARE = 1 / 3  # of a round, in which the late part of the last one has the link to itself


@dataclass(frozen=True, slots=True)
class Opening:
    """The state of a peer at the opening of a round. The tensors must not change until the outcome is collected.

    patience_s: of a closing round. Nobody is kept from training, so another partner than the last one is looked for so
    long, and trainers that are in the middle of a round are waited for.
    """

    round: int
    progress: float
    total_steps: int  # of the run: what progress is a share of
    longest_round: int  # inner steps that a round of this run may have
    early_state: dict[SectionName, Tensor]  # flat, fp32, on the CPU
    patience_s: float = 0.0


@dataclass(slots=True)
class Faults:
    """The last thing that went wrong with another peer: in words, what to do about it, and when (Unix time)."""

    last: str = ""
    advice: str = ""
    at_s: float = 0.0

    def tell(self, text: str, error: PeerError, *, level: int = logging.WARNING) -> None:
        self.last, self.advice, self.at_s = text, error.advice, time.time()
        log.log(level, text)


class LiveRound:
    """`running` is the swap of this round, `trailing` that of the last one while its late part is on the way.

    `reason` and `cause` tell why there is no partner yet; `failed_link` is of a swap of this round that did not come
    to its early part. Times are those of `clock`.
    """

    def __init__(
        self,
        *,
        hello: Callable[[], Hello],
        directory: Directory,
        pace: Pace,
        pairing: Pairing,
        clock: Callable[[], float],
    ) -> None:
        self.hello = hello
        self.layout: ModelLayout | None = None  # of the model that trains here, once it is known
        self.directory = directory
        self.pace = pace
        self.pairing = pairing
        self.clock = clock
        self.goodput = Goodput()
        self.faults = Faults()
        self.told_stale = False  # a peer has refused this one, as they are too far apart in the run
        self.plans: tuple[SectionPlan, ...] = ()
        self.corrections: deque[Correction] = deque(maxlen=2)
        self.correcting = False  # the main thread adds a correction to the vectors now
        self.is_leaving = False  # this peer was asked to: no boundary waits any more
        self.trailing: Running | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.round = Round(0, own_id=hello().peer_id)
        self.round.close()
        self._changed = asyncio.Event()
        self._begin(None)

    def open(self, opening: Opening, plans: tuple[SectionPlan, ...]) -> None:
        self.plans = plans
        self.round = Round(opening.round, own_id=self.hello().peer_id, progress=opening.progress)
        self._begin(opening)
        self.correcting = False  # whoever opens a round is done with correcting, also when he could not say so
        self.pairing.open_round(is_patient=opening.patience_s > 0)

    def _begin(self, opening: Opening | None) -> None:
        self.opening = opening
        self.staged = Staged()
        self.running: Running | None = None
        self.reason, self.cause = "", LonelyCause.NO_ANSWER
        self.failed_link: LinkMeasure | None = None
        self.opened_s = self.clock()
        self.patient_until_s = self.opened_s + (opening.patience_s if opening else 0.0)
        self.boundary_s: float | None = None  # when its boundary came

    def boundary(self) -> Boundary:
        """Where this peer stands, as its partner is told."""
        return self.pace.boundary(round_index=self.round.index, progress=self.round.progress, now_s=self.clock())

    def trails(self) -> bool:
        """The last round is not over: its late part gets the link first, and its correction the vectors.

        So the partner's gradient comes early, and what is sent of this round does not change any more. A late part that
        takes long has to share the link; its correction then waits until the early part is here.
        """
        if self.correcting:
            return True
        round_s = self.pace.seconds_per_round()
        is_long = round_s is not None and self.clock() - self.opened_s > TRAILING_SHARE * round_s
        return not is_long and (self.trailing is not None or bool(self.corrections))

    def trails_for_s(self) -> float:
        """How much longer it does, as far as can be told."""
        round_s, now_s = self.pace.seconds_per_round(), self.clock()
        if self.trailing is None or round_s is None:
            return TRAILING_RETRY_S
        until_s = min(self.opened_s + TRAILING_SHARE * round_s, self.trailing.expected_s(now_s, self.goodput))
        return max(0.0, until_s - now_s)

    def drop_trailing(self) -> None:
        if self.trailing:
            trailing, self.trailing = self.trailing, None
            trailing.swap.abandon(Unreachable("the next boundary came before the late part"))

    def is_hopeless(self) -> bool:
        """Nobody is here who could still be the partner of this round."""
        if self.round.phase is not Phase.SEEKING:
            return False
        now_s = self.clock()
        if self.boundary_s is not None and now_s > max(self.boundary_s + LAST_LOOK_S, self.patient_until_s):
            return True
        return not self.pairing.hopeful(self.directory.live(), now_s, latest_s=max(now_s, self.patient_until_s))

    def notify(self) -> None:
        self._changed.set()
        self.on_change()

    async def wait_for_change(self, at_most_s: float) -> None:
        """Until something changed, or for a moment: newcomers and retry times are not announced."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), at_most_s)


class OwnedTasks:
    """Tasks that end with their owner; an unexpected error in one is told, and ends nothing else."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def stop(self, *, grace_s: float) -> None:
        """Cancels what has not ended by itself within `grace_s`."""
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a network task ended in an unexpected error", exc_info=error)
