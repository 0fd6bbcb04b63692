"""Serves the swarm as a read-only web page, without secrets, addresses or external resources.

    /               the page
    /api/page       the text that the page shows: ?sort=..&descending=1&words=..&page=..
    /api/status     the swarm as JSON (docs/monitoring.md)
    /api/history    curves of the swarm, and of the peers in ?id=..&id=..
    /metrics, /healthz    for monitoring systems

All URLs on the page are relative, so a proxy can serve it under any path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noloco_p2p.monitor.collect import Watcher
from noloco_p2p.monitor.columns import BY_NAME, STAGE_COLUMNS, Choice, Column, Peer, columns_of, values
from noloco_p2p.monitor.history import History
from noloco_p2p.monitor.roster import Health, Meeting
from noloco_p2p.swarm.directory import SwarmDirectory
from noloco_p2p.telemetry.http import HttpServer
from noloco_p2p.telemetry.prometheus import CONTENT_TYPE, swarm_page
from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
LOOK_S = 2.0
MEETINGS_SHOWN_S = 120.0
MAX_MEETINGS_SHOWN = 2_000
STALE_S = 30.0  # the monitor is unhealthy if it has not read the swarm for this long
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
WIDE_RANK = 5  # columns with this rank or a higher one appear only in wide windows
PAGE_PEERS = 50  # rows of the table
MANY_PEERS = 40  # with more peers, the page shows only the curves of those that match its search


class LiveSwarm:
    """The last summary of a watcher, the swaps among its `meetings`, and the curves since the start."""

    def __init__(self, meetings: Iterable[Meeting]) -> None:
        self.history = History()
        self.summary: dict[str, Any] = {}
        self.looked_at_s = time.monotonic()
        self._meetings = meetings

    def show(self, summary: dict[str, Any]) -> None:
        """Show this summary from now on, and add a sample to the curves."""
        self.looked_at_s = time.monotonic()
        self.summary = summary
        self.history.add(summary)

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
        recent = [m for m in self._meetings if m.at_s >= swarm["time_s"] - MEETINGS_SHOWN_S]
        return {
            **{name: swarm[name] for name in ("run", "time_s", "notices")},
            "values": [asdict(value) for value in values(swarm, left_s=self.history.left_s())],
            "columns": [_head(column) for column in columns],
            "rows": [
                {"peer": peer["peer_id"], "health": peer["health"], "cells": [column.show(peer) for column in columns]}
                for peer in peers[first : first + PAGE_PEERS]
            ],
            "num_rows": len(peers),
            "page": first // PAGE_PEERS,
            "num_pages": last + 1,
            "stage_columns": [_head(column) for column in STAGE_COLUMNS],
            "stages": [
                {"health": "" if stage["peers"] else "empty", "cells": [column.show(stage) for column in STAGE_COLUMNS]}
                for stage in swarm["stages"]
            ],
            "graph": [
                {"id": peer["peer_id"], **{name: peer[name] for name in ("health", "stage", "sends_to")}}
                for peer in swarm["peers"]
            ],
            "meetings": [[round(m.at_s, 1), m.peer, m.partner] for m in recent[-MAX_MEETINGS_SHOWN:]],
            "curves": self._curves(peers, has_words=bool(choice.words)),
        }

    def _curves(self, chosen: list[Peer], *, has_words: bool) -> dict[str, Any]:
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


def _head(column: Column) -> dict[str, str]:
    kinds = {"text": column.is_text, "wide": column.rank >= WIDE_RANK}
    return {"name": column.name, "classes": " ".join(name for name, is_it in kinds.items() if is_it)}


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
        return JSONResponse(swarm.history.columns(request.query_params.getlist("id")))

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
    return Starlette(routes=routes, middleware=[Middleware(_Headers), Middleware(GZipMiddleware, minimum_size=2048)])


class _Headers:
    """Adds security headers to every response."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._inner(scope, receive, with_headers if scope["type"] == "http" else send)


async def serve(
    ticket: Ticket,
    directory: SwarmDirectory,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    say: Callable[[str], None],
) -> None:
    """Serve the page until `stop` is set. Raises SettingsError if the address cannot be used."""
    watcher = Watcher(ticket)
    swarm = LiveSwarm(watcher.roster.meetings)
    server = HttpServer(app(swarm), host=host, port=port)
    swarm.show(watcher.look(directory))
    await server.start(flag="--listen")
    say(f"the page is at http://{host}:{server.port}/ (press Ctrl-C to stop)")
    try:
        while not stop.is_set():
            try:
                swarm.show(watcher.look(directory))
            except Exception:  # showing old values, labelled as old, is better than showing nothing
                log.exception("cannot read the swarm")
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
    finally:
        await server.stop()
