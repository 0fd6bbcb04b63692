"""Serves the swarm as a read-only web page, without secrets, addresses or external resources.

    /                 the page             /api/status          the swarm as JSON (docs/monitoring.md)
    /api/history      curves of the swarm  /api/history/peers   curves of some peers, ?id=..&id=..
    /api/events       server-sent events   /metrics, /healthz   for monitoring systems

All URLs on the page are relative, so a proxy can serve it under any path.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noloco_p2p.monitor.collect import Watcher
from noloco_p2p.monitor.history import MAX_SERIES, History
from noloco_p2p.monitor.roster import Health, Meeting
from noloco_p2p.swarm.dht import SwarmDirectory
from noloco_p2p.telemetry.http import HttpServer
from noloco_p2p.telemetry.metrics import IN_COLUMNS, METRICS
from noloco_p2p.telemetry.prometheus import CONTENT_TYPE, swarm_page
from noloco_p2p.ticket import Ticket

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
LOOK_S = 2.0
KEEPALIVE_S = 15.0
MAX_READERS = 100  # maximum number of readers of server-sent events
MEETINGS_SHOWN_S = 120.0
STALE_S = 30.0  # the monitor is unhealthy if it has not read the swarm for this long
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
ROW = (  # the fields of a peer on the page, in order; made_at_s instead of an age, so that only changes are sent
    *(
        "peer_id",
        "name",
        "state",
        "paused_by",
        "health",
        "stage",
        "sends_to",
        "distance",
        "reachability",
        "software",
        "made_at_s",
    ),
    *IN_COLUMNS,
)
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


class SwarmFeed:
    """Sends the newest state of a watcher, and the changes after each read, to any number of readers."""

    def __init__(self, watcher: Watcher, history: History) -> None:
        self.watcher = watcher
        self.history = history
        self.summary: dict[str, Any] = {}
        self.looked_at_s = time.monotonic()
        self.num_readers = 0
        self._rows: dict[str, list[Any]] = {}
        self._meetings: deque[Meeting] = deque(maxlen=2_000)
        self._number = 0
        self._update = b""
        self._is_closed = False
        self._changed = asyncio.Condition()
        for meeting in history.meetings(since_s=time.time() - MEETINGS_SHOWN_S):
            self._meetings.append(meeting)

    async def look(self, take: Callable[[], None]) -> None:
        """Read the swarm with `take`, store a sample, and wake the readers."""
        before = len(self.watcher.roster.meetings)
        last = self.watcher.roster.meetings[-1] if before else None
        take()
        self.looked_at_s = time.monotonic()
        self.summary = self.watcher.summary()
        meetings = _after(self.watcher.roster.meetings, last)
        self._meetings.extend(meetings)
        await asyncio.to_thread(self.history.add, self.summary, meetings)
        rows = {peer["peer_id"]: self._row(peer) for peer in self.summary["peers"]}
        changed = [row for name, row in rows.items() if self._rows.get(name) != row]
        removed = [name for name in self._rows if name not in rows]
        self._rows = rows
        self._number += 1
        self._update = _event(
            "update", {**self._head(), "peers": changed, "removed": removed, "meetings": _shown(meetings)}
        )
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        """End the streams of all readers, so that the server can stop."""
        self._is_closed = True
        async with self._changed:
            self._changed.notify_all()

    def whole(self) -> bytes:
        """Return the first event for a new reader. It contains the whole state."""
        since_s = time.time() - MEETINGS_SHOWN_S
        recent = [meeting for meeting in self._meetings if meeting.at_s >= since_s]
        state = {
            **self._head(),
            "row": ROW,
            "columns": COLUMNS,
            "peers": list(self._rows.values()),
            "meetings": _shown(recent),
        }
        return _event("whole", state)

    async def read(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events. A reader that is too slow for updates is sent the whole state again."""
        self.num_readers += 1
        try:
            number, first = self._number, True
            while not self._is_closed:
                if first or self._number > number + 1:
                    number, first = self._number, False
                    yield self.whole()
                elif self._number == number + 1:
                    number = self._number
                    yield self._update
                else:
                    try:
                        async with asyncio.timeout(KEEPALIVE_S), self._changed:
                            await self._changed.wait()
                    except TimeoutError:
                        yield b": still here\n\n"
        finally:
            self.num_readers -= 1

    def status(self) -> dict[str, Any]:
        """Return the response to /api/status: the summary without addresses, which stay private."""
        peers = [{name: value for name, value in peer.items() if name != "addresses"} for peer in self._peers()]
        return {**self.summary, "peers": peers}

    def _peers(self) -> list[dict[str, Any]]:
        return self.summary.get("peers", [])

    def _head(self) -> dict[str, Any]:
        return {name: value for name, value in self.summary.items() if name != "peers"}

    def _row(self, peer: dict[str, Any]) -> list[Any]:
        member = self.watcher.roster.members[peer["peer_id"]]
        known = {**peer, "made_at_s": round(member.made_at_s, 1), "distance": _rounded(peer["distance"])}
        return [known[name] for name in ROW]


def app(feed: SwarmFeed) -> Starlette:
    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def status(request: Request) -> Response:
        return JSONResponse(feed.status())

    async def history(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(feed.history.swarm))

    async def peers(request: Request) -> Response:
        names = request.query_params.getlist("id")[:MAX_SERIES]
        return JSONResponse(await asyncio.to_thread(feed.history.peers, names))

    async def events(request: Request) -> Response:
        if feed.num_readers >= MAX_READERS:
            return PlainTextResponse("too many event streams are open; poll /api/status instead\n", status_code=503)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # keep proxies from buffering events
        return StreamingResponse(feed.read(), media_type="text/event-stream", headers=headers)

    async def metrics(request: Request) -> Response:
        page = swarm_page(feed.summary, healths=list(Health))
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def healthz(request: Request) -> Response:
        is_well = time.monotonic() - feed.looked_at_s < STALE_S
        return PlainTextResponse(
            "ok\n" if is_well else "the monitor has stopped reading the swarm\n", status_code=200 if is_well else 503
        )

    routes = [
        *(Route("/", index), Route("/api/status", status), Route("/api/history", history)),
        *(Route("/api/history/peers", peers), Route("/api/events", events)),
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
    history: Path,
    stop: asyncio.Event,
    say: Callable[[str], None],
) -> None:
    """Serve the page until `stop` is set. Raises SettingsError if the address or the history file cannot be used."""
    kept = History(history)
    try:
        feed = SwarmFeed(Watcher(ticket), kept)
        server = HttpServer(app(feed), host=host, port=port)
        await feed.look(lambda: feed.watcher.look(directory))
        await server.start(flag="--listen")
        say(f"the page is at http://{host}:{server.port}/ (curves are stored in {history}); press Ctrl-C to stop")
        try:
            await _until(stop, lambda: feed.look(lambda: feed.watcher.look(directory)))
        finally:
            await feed.close()
            await server.stop()
    finally:
        kept.close()


async def _until(stop: asyncio.Event, look: Callable[[], Awaitable[None]]) -> None:
    while not stop.is_set():
        try:
            await look()
        except Exception:  # showing old values, labelled as old, is better than showing nothing
            log.exception("cannot read the swarm")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)


def _after(meetings: deque[Meeting], last: Meeting | None) -> list[Meeting]:
    """Return the meetings that were added after `last`."""
    found: list[Meeting] = []
    for meeting in reversed(meetings):
        if meeting is last:
            break
        found.append(meeting)
    return found[::-1]


def _shown(meetings: list[Meeting]) -> list[list[Any]]:
    return [[round(meeting.at_s, 1), meeting.peer, meeting.partner] for meeting in meetings]


def _rounded(share: float | None) -> float | None:
    return None if share is None else float(f"{share:.2g}")


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
