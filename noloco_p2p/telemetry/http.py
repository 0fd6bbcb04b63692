"""Runs an HTTP server on an existing event loop. It uses uvicorn, but leaves signal handlers and logging alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from noloco_p2p.errors import SettingsError

if TYPE_CHECKING:
    from starlette.applications import Starlette

STOP_S = 2.0
MAX_CONNECTIONS = 256


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because `cli` handles signals."""
        yield


class HttpServer:
    """Serves an ASGI app from `start` until `stop`. `port` is the actual port."""

    def __init__(self, app: Any, *, host: str, port: int) -> None:
        self.port = port
        self._host = host
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",  # limits the size of headers; httptools, which would be preferred if installed, does not
            ws="none",
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
        )
        self._server = _Quiet(config)
        self._task: asyncio.Task[None] | None = None
        self._listening: socket.socket | None = None

    async def start(self, *, flag: str) -> None:
        """Start the server. Raises SettingsError, which names the flag, if the address cannot be used."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self._host.strip("[]"), self.port))
            listening.listen(MAX_CONNECTIONS)  # now, because a client that knows the address may connect immediately
        except OSError as error:
            listening.close()
            raise SettingsError(f"{flag} {self._host}:{self.port}: {error.strerror}; choose another address") from None
        self.port, self._listening = listening.getsockname()[1], listening
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def stop(self) -> None:
        if self._task:
            self._server.should_exit = True
            done, _ = await asyncio.wait({self._task}, timeout=STOP_S)
            if not done:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._listening:
            self._listening.close()


def metrics_app(page: Callable[[], bytes]) -> Starlette:
    """Return the ASGI app that serves /metrics and /healthz of a peer."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    from noloco_p2p.telemetry.prometheus import CONTENT_TYPE

    async def metrics(request: Request) -> Response:
        return Response(page(), headers={"content-type": CONTENT_TYPE})

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(routes=[Route("/metrics", metrics), Route("/healthz", healthz)])
