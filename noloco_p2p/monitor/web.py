"""Serves the swarm as a read-only web page, without secrets, addresses or external resources.

    /               the page
    /api/page       the text that the page shows: ?sort=..&descending=1&words=..&page=..
    /api/status     the swarm as JSON (docs/operators.md)
    /api/history    curves of the swarm, and of the peers in ?id=..&id=..
    /metrics, /healthz    for monitoring systems

All URLs on the page are relative, so a proxy can serve it under any path.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from noloco_p2p.monitor.tables import BY_NAME, STAGE_COLUMNS, Choice, Column, columns_of, values
from noloco_p2p.monitor.watcher import Health, Watcher
from noloco_p2p.swarm.directory import SwarmDirectory
from noloco_p2p.telemetry.http import serving
from noloco_p2p.telemetry.prometheus import CONTENT_TYPE, swarm_page
from noloco_p2p.telemetry.totals import TOTALS, is_living

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
LOOK_S = 2.0
NAMES = tuple(total.name for total in TOTALS)
SAMPLE_S = 10.0
MAX_SAMPLES = 1_000
MAX_LOSSES = 400_000  # in all samples together, about 40 MB
MAX_SERIES = 60  # maximum number of peers whose curves are returned at once
LEFT_OVER_S = 600.0  # the time over which the progress is measured, to estimate the time left
MEASURED_S = 120.0  # no estimate before, as the records that show the progress are up to 15 s old
MEETINGS_SHOWN_S = 120.0
MAX_MEETINGS_SHOWN = 2_000
STALE_S = 30.0  # the monitor is unhealthy if it has not read the swarm for this long
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
WIDE_RANK, WIDEST_RANK = 5, 10  # columns with this rank or a higher one appear only in wide windows
PAGE_PEERS = 50  # rows of the table
MANY_PEERS = 40  # with more peers, the page shows only the curves of those that match its search


class LiveSwarm:
    """The last summary of a swarm, its curves since the start, and what the page shows of both.

    Whenever there are too many samples, every second one is dropped, and the interval is doubled.
    """

    def __init__(self, meetings: Iterable[tuple[float, str, str]]) -> None:
        self.summary: dict[str, Any] = {}
        self.looked_at_s = time.monotonic()
        self.interval_s = SAMPLE_S
        self._samples: list[tuple[dict[str, Any], dict[str, float]]] = []  # totals, and losses by peer
        self._meetings = meetings

    def show(self, summary: dict[str, Any]) -> None:
        """Show this summary from now on, and add a sample to the curves if one is due."""
        self.looked_at_s = time.monotonic()
        self.summary = summary
        if self._samples and summary["time_s"] - self._samples[-1][0]["time_s"] < self.interval_s:
            return
        totals = {name: summary["totals"][name] for name in NAMES}
        losses = {
            sys.intern(peer["peer_id"]): round(peer["loss"], 4)
            for peer in summary["peers"]
            if is_living(peer) and peer["loss"] is not None
        }
        num_living = sum(map(is_living, summary["peers"]))
        self._samples.append(({"time_s": summary["time_s"], "alive": num_living, **totals}, losses))
        while len(self._samples) > MAX_SAMPLES or sum(len(losses) for _, losses in self._samples) > MAX_LOSSES:
            del self._samples[-2::-2]
            self.interval_s *= 2

    def curves(self, peers: Sequence[str]) -> dict[str, Any]:
        """Return `time_s`, `alive`, the totals, and `losses`, which has the curves of the named peers.

        Peers without samples are omitted, and at most MAX_SERIES peers are returned.
        """
        losses = {name: [losses.get(name) for _, losses in self._samples] for name in peers[:MAX_SERIES]}
        return {
            "interval_s": self.interval_s,
            **{name: [totals[name] for totals, _ in self._samples] for name in ("time_s", "alive", *NAMES)},
            "losses": {name: curve for name, curve in losses.items() if any(loss is not None for loss in curve)},
        }

    def left_s(self) -> float | None:
        """Estimate the time until the schedule is complete from the progress in the last ten minutes."""
        points = [(t["time_s"], t["progress"]) for t, _ in self._samples if t["progress"] is not None]
        if not points:
            return None
        now_s, progress = points[-1]
        began_s, begun = next((point for point in points[::-1] if now_s - point[0] >= LEFT_OVER_S), points[0])
        if now_s - began_s < MEASURED_S or progress <= begun:
            return None
        return (1 - progress) * (now_s - began_s) / (progress - begun)

    @property
    def status(self) -> dict[str, Any]:
        """The response to /api/status: the summary without addresses, which stay private."""
        peers = [{name: value for name, value in peer.items() if name != "addresses"} for peer in self.summary["peers"]]
        return {**self.summary, "peers": peers}

    def page(self, choice: Choice, number: int) -> dict[str, Any]:
        """Return what the page shows, with page `number` (from 0) of the table of peers."""
        swarm, peers = self.summary, choice.of(self.summary["peers"])
        columns, last = columns_of(swarm), max(0, len(peers) - 1) // PAGE_PEERS
        first = PAGE_PEERS * max(0, min(number, last))
        bearers = Counter(peer["name"] for peer in swarm["peers"])
        recent = [meeting for meeting in self._meetings if meeting[0] >= swarm["time_s"] - MEETINGS_SHOWN_S]
        return {
            **{name: swarm[name] for name in ("run", "about", "time_s", "notices")},
            "values": list(values(swarm, left_s=self.left_s())),
            "columns": _heads(columns),
            "rows": [
                {"peer": peer["peer_id"], "health": peer["health"], "cells": [column.show(peer) for column in columns]}
                for peer in peers[first : first + PAGE_PEERS]
            ],
            "num_rows": len(peers),
            "page": first // PAGE_PEERS,
            "num_pages": last + 1,
            "stage_columns": _heads(STAGE_COLUMNS),
            "stages": [
                {"health": "" if stage["peers"] else "empty", "cells": [column.show(stage) for column in STAGE_COLUMNS]}
                for stage in swarm["stages"]
            ],
            "graph": [
                {
                    "id": peer["peer_id"],
                    "label": peer["name"] if peer["name"] and bearers[peer["name"]] == 1 else peer["shown"],
                    **{name: peer[name] for name in ("health", "stage", "sends_to", "is_own")},
                }
                for peer in swarm["peers"]
            ],
            "meetings": [[round(at_s, 1), peer, partner] for at_s, peer, partner in recent[-MAX_MEETINGS_SHOWN:]],
            "curves": self._shown_curves(peers, has_words=bool(choice.words)),
        }

    def _shown_curves(self, chosen: list[dict[str, Any]], *, has_words: bool) -> dict[str, Any]:
        """Return whose losses the page shows, each as a curve, and a sentence about them."""
        number = len(self.summary["peers"])
        is_few = number <= MANY_PEERS
        shown = self.summary["peers"] if is_few else chosen if has_words else []
        heads = [peer["peer_id"] for peer in shown if not peer["stage"]]  # other stages have no loss
        if is_few:
            note = "one line for each head" if self.summary["stages"] else "one line for each peer"
        else:
            more = ", and of those that match the search" if has_words else "; search for peers to see their lines"
            note = f"lowest, mean and highest of {number} peers{more}"
        return {"ids": sorted(heads)[:MANY_PEERS], "has_range": not is_few, "note": note}


def _heads(columns: Sequence[Column]) -> list[dict[str, str]]:
    def classes(column: Column) -> str:
        kinds = {"text": column.is_text, "wide": column.rank >= WIDE_RANK, "widest": column.rank >= WIDEST_RANK}
        return " ".join(name for name, has in kinds.items() if has)

    return [{"name": column.name, "classes": classes(column)} for column in columns]


def app(swarm: LiveSwarm) -> Starlette:
    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def status(request: Request) -> Response:
        return JSONResponse(swarm.status)

    async def page(request: Request) -> Response:
        query = request.query_params
        sort, number = query.get("sort", ""), query.get("page", "")
        choice = Choice(sort if sort in BY_NAME else "state", query.get("words", ""), "descending" in query)
        return JSONResponse(swarm.page(choice, int(number[:9]) if number.isdecimal() else 0))

    async def history(request: Request) -> Response:
        return JSONResponse(swarm.curves(request.query_params.getlist("id")))

    async def metrics(request: Request) -> Response:
        text = swarm_page(swarm.summary, healths=list(Health))
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def healthz(request: Request) -> Response:
        is_well = time.monotonic() - swarm.looked_at_s < STALE_S
        return PlainTextResponse(
            "ok\n" if is_well else "the monitor has stopped reading the swarm\n", status_code=200 if is_well else 503
        )

    routes = [
        *(Route("/", index), Route("/metrics", metrics), Route("/healthz", healthz)),
        *(Route("/api/page", page), Route("/api/status", status), Route("/api/history", history)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    gzip = Middleware(GZipMiddleware, minimum_size=2048)
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=_with_headers), gzip])


async def _with_headers(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Add the security headers to a response."""
    response = await answer(request)
    response.headers.update(HEADERS)
    return response


async def serve(
    watcher: Watcher, directory: SwarmDirectory, *, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve the page until the task is cancelled. Raises SettingsError if the address cannot be used."""
    swarm = LiveSwarm(watcher.meetings)
    swarm.show(watcher.look(directory))
    async with serving(app(swarm), host=host, port=port, flag="--listen") as actual_port:
        say(f"the page is at http://{host}:{actual_port}/ (press Ctrl-C to stop)")
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                swarm.show(watcher.look(directory))
            except Exception:  # showing old values, labelled as old, is better than showing nothing
                log.exception("cannot read the swarm")
