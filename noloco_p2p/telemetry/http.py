"""Runs an HTTP server on an existing event loop. It uses uvicorn, but leaves signal handlers and logging alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from noloco_p2p.errors import SettingsError
from noloco_p2p.forks import kept_from_forks

if TYPE_CHECKING:
    from starlette.applications import Starlette

STOP_S = 2.0
MAX_CONNECTIONS = 256


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because `cli` handles signals."""
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, *, host: str, port: int, flag: str) -> AsyncIterator[int]:
    """Serve an ASGI app, and yield the actual port. Raises SettingsError, which names the flag, for a wrong address."""
    listening = kept_from_forks(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), port))
        listening.listen(MAX_CONNECTIONS)  # now, because a client that knows the address may connect immediately
    except OSError as error:
        listening.close()
        raise SettingsError(f"{flag} {host}:{port}: {error.strerror}; choose another address") from None
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
    server = _Quiet(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        done, _ = await asyncio.wait({task}, timeout=STOP_S)
        if not done:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        listening.close()


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
