"""Serves the swarm as a read-only web page, without secrets, addresses or external resources.

    /               the page, which polls /api/status
    /api/status     the swarm as JSON (docs/monitoring.md)
    /api/history    curves of the swarm, and of the peers in ?id=..&id=..
    /metrics, /healthz    for monitoring systems

All URLs on the page are relative, so a proxy can serve it under any path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
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
from noloco_p2p.monitor.history import History
from noloco_p2p.monitor.roster import Health
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.telemetry.http import HttpServer
from noloco_p2p.telemetry.metrics import IN_COLUMNS, METRICS
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
WIDE_RANK = 5  # columns with this rank or a higher one, and text columns, appear only in wide windows
COLUMNS = [  # the columns of metrics; page.js defines the others
    {
        "name": METRICS[name].column,
        "key": name,
        "unit": METRICS[name].unit,
        "text": METRICS[name].kind == "text",
        "wide": METRICS[name].rank >= WIDE_RANK or METRICS[name].kind == "text",
    }
    for name in IN_COLUMNS
]


class LiveSwarm:
    """What a watcher has read last, and the curves since the start."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.history = History()
        self.summary: dict[str, Any] = {}
        self.looked_at_s = time.monotonic()

    def look(self, take: Callable[[], None]) -> None:
        """Read the swarm with `take`, and add a sample to the curves."""
        take()
        self.looked_at_s = time.monotonic()
        self.summary = self.watcher.summary()
        self.history.add(self.summary)

    @property
    def status(self) -> dict[str, Any]:
        """The response to /api/status: the summary without addresses, which stay private, and what the page needs."""
        peers = [{name: value for name, value in peer.items() if name != "addresses"} for peer in self.summary["peers"]]
        recent = [m for m in self.watcher.roster.meetings if m.at_s >= self.watcher.now_s - MEETINGS_SHOWN_S]
        meetings = [[round(m.at_s, 1), m.peer, m.partner] for m in recent[-MAX_MEETINGS_SHOWN:]]
        return {**self.summary, "peers": peers, "columns": COLUMNS, "meetings": meetings}


def app(swarm: LiveSwarm) -> Starlette:
    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def status(request: Request) -> Response:
        return JSONResponse(swarm.status)

    async def history(request: Request) -> Response:
        return JSONResponse(swarm.history.columns(request.query_params.getlist("id")))

    async def metrics(request: Request) -> Response:
        page = swarm_page(swarm.summary, healths=list(Health))
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def healthz(request: Request) -> Response:
        is_well = time.monotonic() - swarm.looked_at_s < STALE_S
        return PlainTextResponse(
            "ok\n" if is_well else "the monitor has stopped reading the swarm\n", status_code=200 if is_well else 503
        )

    routes = [
        *(Route("/", index), Route("/api/status", status), Route("/api/history", history)),
        *(Route("/metrics", metrics), Route("/healthz", healthz)),
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
    swarm = LiveSwarm(Watcher(ticket))
    server = HttpServer(app(swarm), host=host, port=port)
    swarm.look(lambda: swarm.watcher.look(directory))
    await server.start(flag="--listen")
    say(f"the page is at http://{host}:{server.port}/ (press Ctrl-C to stop)")
    try:
        while not stop.is_set():
            try:
                swarm.look(lambda: swarm.watcher.look(directory))
            except Exception:  # showing old values, labelled as old, is better than showing nothing
                log.exception("cannot read the swarm")
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)
    finally:
        await server.stop()
