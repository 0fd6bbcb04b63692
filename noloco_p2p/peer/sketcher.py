"""Sketches of the slow weights for the record of a peer, made beside training."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from noloco_p2p.swarm.records import TTL_S

if TYPE_CHECKING:
    from torch import Tensor

SKETCH_EVERY_S = TTL_S / 4  # as often as the record is announced


class Sketcher:
    """`latest`: the packed sketch, "" before there is one, and the norm of the slow weights."""

    def __init__(self, run: str) -> None:
        """`run`: the digest of the spec, from which all peers draw the same sketch."""
        self.latest: tuple[str, float | None] = ("", None)
        self._run = run
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="noloco-sketch")
        self._running: Future[None] | None = None
        self._began_s = -math.inf

    def sketch(self, slow_weights: Tensor) -> None:
        """Begin one, at most once an announcement.

        Should the round end before it is done, the sketch is a mixture of two states that were a round apart.
        """
        now_s = time.monotonic()
        if now_s - self._began_s < SKETCH_EVERY_S or (self._running and not self._running.done()):
            return
        self._began_s = now_s
        self._running = self._executor.submit(self._make, slow_weights)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _make(self, slow_weights: Tensor) -> None:
        from noloco_p2p.codec import sketch

        packed = sketch.pack(sketch.sketch(slow_weights, run=self._run))
        norm = sketch.norm(slow_weights)
        self.latest = (packed, float(f"{norm:.9g}")) if packed else ("", None)
