"""A gRPC server with a single method that writes raw bytes, which no honest peer would send."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from noloco_p2p.gossip.seams import Candidate
from noloco_p2p.net.connection import MEMBERSHIP_KEY, SERVICE


@asynccontextmanager
async def rogue(
    method: str, handler: Callable[[AsyncIterator[bytes], Any], Awaitable[None]]
) -> AsyncIterator[Candidate]:
    async def admit(requests: AsyncIterator[bytes], context: Any) -> None:
        await context.send_initial_metadata(((MEMBERSHIP_KEY, b""),))
        await handler(requests, context)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {method: grpc.stream_stream_rpc_method_handler(admit)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Candidate("rogue", f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
