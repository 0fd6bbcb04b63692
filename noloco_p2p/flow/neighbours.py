"""Chooses the peers to which a node of the pipeline sends, and keeps the streams that it needs.

A node sends to a few replicas of the next stage, and redraws one of them from time to time. A head keeps streams to
replicas of the last stage, through which its microbatches return. A head chooses only a few of them, so each replica of
the last stage also keeps streams to a few heads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping

from noloco_p2p.flow.limits import MAX_SINKS
from noloco_p2p.flow.node import Links, Node

NUM_NEIGHBOURS = 4  # replicas of the next stage to which a replica sends
NUM_HEADS = 2  # heads to which a replica of the last stage keeps a stream
LOOK_S = 1.0  # how often the live peers and the streams are checked
REDRAW_S = 60.0  # how often one neighbour is redrawn
DIAL_AGAIN_S = 5.0  # between two dials of a neighbour to which a stream is kept open


class Few:
    """A few random live peers, which are kept as long as they are alive."""

    def __init__(self, rng: random.Random, most: int) -> None:
        self.chosen: tuple[str, ...] = ()
        self._rng = rng
        self._most = most

    def update(self, live: Collection[str]) -> None:
        kept = [peer for peer in self.chosen if peer in live]
        others = sorted(set(live) - set(kept))
        num_new = max(0, min(self._most - len(kept), len(others)))
        self.chosen = (*kept, *self._rng.sample(others, num_new))

    def drop_one(self) -> None:
        """Drop one peer. The next `update` draws a replacement, possibly the same peer."""
        if self.chosen:
            left_out = self._rng.choice(self.chosen)
            self.chosen = tuple(peer for peer in self.chosen if peer != left_out)


class Neighbours:
    """The neighbours of a node.

    `live` returns the peers of each stage that take part in the pipeline. `is_closed` returns whether no peer can dial
    this one, in which case it must dial all its neighbours.
    """

    def __init__(
        self,
        node: Node,
        links: Links,
        *,
        stage: int,
        num_stages: int,
        live: Callable[[], Mapping[int, Collection[str]]],
        is_closed: Callable[[], bool] = lambda: False,
        rng: random.Random,
    ) -> None:
        self.downstream, self._upstream = Few(rng, NUM_NEIGHBOURS), Few(rng, NUM_NEIGHBOURS)
        self._ring = Few(rng, NUM_HEADS if stage else MAX_SINKS)  # where the pipeline closes
        self._node, self._links = node, links
        self._stage, self._num_stages = stage, num_stages
        self._live, self._is_closed = live, is_closed

    async def look_after(self) -> None:
        """Follow the live peers until cancelled."""
        loop = asyncio.get_running_loop()
        before: tuple[str, ...] | None = None
        dialled_s: dict[str, float] = {}
        redraw_s = loop.time() + REDRAW_S
        while True:
            now_s = loop.time()
            if now_s >= redraw_s:
                redraw_s = now_s + REDRAW_S
                self.downstream.drop_one()
            kept = self._draw()
            if self.downstream.chosen != before:
                before = self.downstream.chosen
                self._node.neighbours_changed(before)
            dialled_s = {peer: dialled_s.get(peer, -DIAL_AGAIN_S) for peer in kept}
            for peer, last_s in dialled_s.items():
                if peer not in self._links.stages and now_s - last_s >= DIAL_AGAIN_S:
                    dialled_s[peer] = now_s
                    self._links.open(peer)
            self._links.look()
            await asyncio.sleep(LOOK_S)

    def _draw(self) -> list[str]:
        """Draw the peers to send to, and return the peers to which a stream is kept open."""
        of_stage, last, kept = self._live(), self._num_stages - 1, list[str]()
        self.downstream.update(of_stage.get((self._stage + 1) % self._num_stages, ()))
        if self._stage in (0, last):
            self._ring.update(of_stage.get(last - self._stage, ()))
            kept += self._ring.chosen
        if self._is_closed():
            self._upstream.update(of_stage.get((self._stage - 1) % self._num_stages, ()))
            kept += self._upstream.chosen
        return kept
